"""`vitx bench --tune`: how many sessions, of how many threads, with which batch size, is fastest on this machine."""

import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from vitx.bench.closed_loop import random_images
from vitx.bench.timing import Lane
from vitx.core.bundle import Bundle, timestamp
from vitx.core.console import counted, log
from vitx.core.latency import Latency, Setting, Tuning
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.instances import load_instances
from vitx.runtimes.session import Session, image_shape

BATCH_SIZES = (1, 4, 16)
# Every setting is measured for one turn; the finalists, those with this share of the best throughput, for four more.
TRIAL_SECONDS, FINAL_TURNS = 0.3, 4
FINALIST_SHARE = 0.8
# Throughputs that differ by no more than this count as equal, and the shorter latency decides.
EQUAL_WITHIN = 0.03
MAX_COPIES = 8
LoadWithThreads = Callable[[int], Session]


def tune(bundle: Bundle, load: LoadWithThreads, *, cores: int, quiet: bool = False) -> Tuning:
    """Measure the settings that use the whole machine and record the best in the bundle, for `vitx serve`.

    load: loads the bundle in a session of that many threads.
    """
    bundle.latency()  # raises for a damaged record, to which nothing could be added afterwards
    shape = image_shape(bundle)
    images = random_images(max(BATCH_SIZES), shape)
    with ExitStack() as opened:
        sessions = {
            split: opened.enter_context(load_instances(partial(load, split[1]), *split)) for split in core_splits(cores)
        }
        tried = [_Trial(session, *split, images[:size]) for split, session in sessions.items() for size in BATCH_SIZES]
        log(f"tune: {counted(len(tried), 'setting')} on {counted(cores, 'core')}", quiet=quiet)
        for trial in tried:
            trial.take_turn(TRIAL_SECONDS)
        fastest = max(trial.setting().images_per_second for trial in tried)
        finalists = [trial for trial in tried if trial.setting().images_per_second >= FINALIST_SHARE * fastest]
        for _ in range(FINAL_TURNS):
            for trial in finalists:
                trial.take_turn(TRIAL_SECONDS)
        settings = tuple(trial.setting() for trial in tried)
        description = next(iter(sessions.values())).describe()
    tuning = Tuning(best=best_setting(settings), tried=settings, runtime=description, created=timestamp())
    _record(bundle, tuning)
    return tuning


def core_splits(cores: int) -> list[tuple[int, int]]:
    """The pairs (instances, threads) whose product is `cores`.

    Instances of one thread share a session; instances of several threads hold a copy of the weights each (see
    `load_instances`), so there are at most MAX_COPIES of these.
    """
    divisors = [threads for threads in range(1, cores + 1) if cores % threads == 0]
    return [(cores // threads, threads) for threads in divisors if threads == 1 or cores // threads <= MAX_COPIES]


def best_setting(settings: Iterable[Setting]) -> Setting:
    """The setting of the highest throughput; of those within `EQUAL_WITHIN` of it, the one with the shortest call."""
    known = list(settings)
    fastest = max(setting.images_per_second for setting in known)
    equal = [setting for setting in known if setting.images_per_second >= (1 - EQUAL_WITHIN) * fastest]
    return min(equal, key=lambda setting: setting.median_ms)


class _Trial:
    """One setting: each instance calls the session from a thread of its own, without waiting for the others."""

    def __init__(self, session: Session, instances: int, threads: int, images: UInt8Array) -> None:
        self._session, self._instances, self._threads, self._images = session, instances, threads, images
        self._times: list[float] = []

    def take_turn(self, seconds: float) -> None:
        with ThreadPoolExecutor(self._instances) as callers:
            lanes = [Lane("", lambda: self._session.infer(self._images)) for _ in range(self._instances)]
            list(callers.map(lambda lane: lane.take_turn(seconds), lanes))
        self._times += [seconds for lane in lanes for seconds in lane.times]

    def setting(self) -> Setting:
        """The throughput and median latency of all turns so far."""
        median, size = statistics.median(self._times), len(self._images)
        return Setting(
            instances=self._instances,
            threads=self._threads,
            batch_size=size,
            images_per_second=self._instances * size / median,
            median_ms=1e3 * median,
        )


def _record(bundle: Bundle, tuning: Tuning) -> None:
    known = bundle.latency()
    if known is None:
        known = Latency(runtime=tuning.runtime, machine=describe_machine(), points=(), created=tuning.created)
    bundle.record_latency(known.model_copy(update={"tuning": tuning}))
