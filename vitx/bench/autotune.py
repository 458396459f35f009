"""How many sessions, of how many threads, with which batch: measured on this machine, in seconds."""

import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vitx.bench.closed_loop import random_images
from vitx.bench.timing import Lane
from vitx.core.bundle import Bundle, timestamp
from vitx.core.console import log
from vitx.core.latency import Latency, Setting, Tuning
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Session, image_shape
from vitx.serve.models.instances import load_instances

BATCH_SIZES = (1, 4, 16)
# Each setting is tried for this long; those that come near the best are then measured together, in turns.
TRIAL_SECONDS, FINAL_TURNS = 0.3, 4
NEAR = 0.8
# Throughputs as near as this count as equal, and the shorter latency decides.
EQUAL = 0.03
MAX_COPIES = 8
Load = Callable[[int], Session]


def tune(bundle: Bundle, load: Load, *, cores: int, quiet: bool = False) -> Tuning:
    """Measure the settings that use the whole machine and record the best in the bundle, for `vitx serve`.

    load: loads the bundle with a number of threads.
    """
    shape = image_shape(bundle)
    images = random_images(max(BATCH_SIZES), shape)
    sessions = {split: load_instances(partial(load, split[1]), *split) for split in splits(cores)}
    tried = [_Trial(session, *split, images[:size]) for split, session in sessions.items() for size in BATCH_SIZES]
    log(f"tune: {len(tried)} settings on {cores} cores", quiet=quiet)
    for trial in tried:
        trial.take_turn(TRIAL_SECONDS)
    fastest = max(trial.setting().images_per_second for trial in tried)
    near = [trial for trial in tried if trial.setting().images_per_second >= NEAR * fastest]
    for _ in range(FINAL_TURNS):
        for trial in near:
            trial.take_turn(TRIAL_SECONDS)
    settings = tuple(trial.setting() for trial in tried)
    description = next(iter(sessions.values())).describe()
    tuning = Tuning(best=best_setting(settings), tried=settings, runtime=description, created=timestamp())
    _record(bundle, tuning)
    return tuning


def splits(cores: int) -> list[tuple[int, int]]:
    """(instances, threads) that use every core: threads are the divisors of `cores`.

    Several threads make a copy of the weights for each instance, so there are at most MAX_COPIES of those.
    """
    divisors = [threads for threads in range(1, cores + 1) if cores % threads == 0]
    return [(cores // threads, threads) for threads in divisors if threads == 1 or cores // threads <= MAX_COPIES]


def best_setting(settings: Iterable[Setting]) -> Setting:
    """The fastest; among those within `EQUAL` of it the one with the shortest call."""
    known = list(settings)
    fastest = max(setting.images_per_second for setting in known)
    equal = [setting for setting in known if setting.images_per_second >= (1 - EQUAL) * fastest]
    return min(equal, key=lambda setting: setting.median_ms)


class _Trial:
    """One setting: every instance calls on its own thread, again and again, and waits for no other."""

    def __init__(self, session: Session, instances: int, threads: int, images: UInt8Array) -> None:
        self._session, self._instances, self._threads, self._images = session, instances, threads, images
        self._times: list[float] = []

    def take_turn(self, seconds: float) -> None:
        with ThreadPoolExecutor(self._instances) as callers:
            lanes = [Lane("", lambda: self._session.infer(self._images)) for _ in range(self._instances)]
            list(callers.map(lambda lane: lane.take_turn(seconds), lanes))
        self._times += [seconds for lane in lanes for seconds in lane.times]

    def setting(self) -> Setting:
        """What the turns so far say."""
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
