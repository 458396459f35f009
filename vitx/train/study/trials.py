"""The runs of a study: each is a `vitx train` in a separate process, and resumes where it was stopped."""

import os
import signal
import subprocess
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from vitx.core.console import ending_signals
from vitx.core.errors import InputError
from vitx.core.options import Checkpoint
from vitx.core.run import RunFolder
from vitx.core.sandbox import verb_command
from vitx.data.image_set import ImageSet
from vitx.train.loop.checkpoint import Metrics, is_finished, read_metrics, read_state
from vitx.train.loop.environment import DataRecord, RunEnvironment
from vitx.train.loop.interruption import TrainingStopped, signals_to
from vitx.train.loop.resuming import CHANGEABLE_SETTINGS
from vitx.train.recipes.recipe import Recipe, first_difference, read_recipe
from vitx.train.recipes.registry import resolve_recipe


@dataclass(frozen=True)
class Trial:
    """One run of a study: its row in the table (`variant`), its seed, and the `--set` texts of `vitx train`.

    device: where it trains, to which `photos` is fitted.
    """

    variant: str
    seed: int
    recipe: str
    data: str | None
    overrides: tuple[str, ...]
    device: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    def resolved(self) -> Recipe:
        overrides = [*self.overrides, f"seed={self.seed}"]
        return resolve_recipe(self.recipe, data=self.data, overrides=overrides, device=self.device)

    def folder(self, study: Path) -> Path:
        return study / "runs" / self.name

    def history(self, study: Path) -> list[Metrics] | None:
        """The metrics of a finished run, one entry for each epoch; None for a run that is not finished."""
        run = RunFolder(self.folder(study))
        if not run.checkpoint_path("last").is_symlink():
            return None
        _, state = read_state(run, "last")
        history = read_metrics(run.metrics_path, state.epoch)
        recipe = self.resolved()
        return history if is_finished(history, recipe.epochs, recipe.selection) else None

    def check_images(self, study: Path, train: ImageSet, found: Mapping[str, DataRecord]) -> None:
        """Raise InputError when the run was begun on other images than the study: `train`, and `found` of each split.

        A run opens them itself when it begins, which may be days after the study.
        """
        folder = self.folder(study)
        begun, classes = RunEnvironment.read(folder).data, RunFolder(folder).info.class_names
        same = all(begun[split].same_images(record) for split, record in found.items())
        if classes != train.class_names or not same:
            raise InputError(
                f"cannot go on with '{folder}': it was begun on {begun['train'].images} images of {len(classes)} "
                f"classes, and this study on other ones of '{train.name}' ({len(train)} of {len(train.class_names)}); "
                "choose another --out"
            )

    def check_begun(self, study: Path, train: ImageSet, found: Mapping[str, DataRecord]) -> None:
        """Raise InputError when the run was begun with another recipe or on other images, or is damaged."""
        folder, run = self.folder(study), RunFolder(self.folder(study))
        if not run.exists():
            return
        difference = first_difference(self.resolved(), read_recipe(folder), ignoring=CHANGEABLE_SETTINGS)
        if difference:
            raise InputError(f"cannot go on with '{folder}': {difference}; choose another --out")
        self.check_images(study, train, found)
        links: tuple[Checkpoint, ...] = ("last", "best")
        for link in links:
            if run.checkpoint_path(link).is_symlink():
                try:
                    run.checkpoint(link)  # compares the digests
                except InputError as error:
                    raise InputError(f"{error}; without the folder '{folder}' that run is trained again") from None


@dataclass
class Runner:
    """Runs trials, `jobs` at a time; with several jobs each computes with one thread.

    `_lock` guards `_live`, the processes under way, and `_stopping`.
    """

    study: Path
    jobs: int
    skip_bad: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: set["subprocess.Popen[bytes]"] = field(default_factory=set)
    _stopping: bool = False

    def run(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, str | None], None, None]:
        """Yield each trial when it has ended, with the reason if it failed, else None. Finished runs are kept.

        On SIGTERM and Ctrl-C the runs under way save and end, and TrainingStopped is raised.
        """
        # Leaving the pool waits for its threads, and so for the runs, which `_stop` has asked to save and end. Finished
        # runs are told under the lock too: study.json is written after each, and is that of the study that has it.
        with _study_lock(self.study) as lock, signals_to(_stop), ThreadPoolExecutor(self.jobs) as pool:
            waiting = [trial for trial in trials if trial.history(self.study) is None]
            try:
                yield from ((trial, None) for trial in trials if trial not in waiting)
                futures = {pool.submit(self._train, trial, lock): trial for trial in waiting}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                self._stop()
                raise

    def _train(self, trial: Trial, lock: int) -> str | None:
        """Train to the end in a separate process; return the reason if it failed, else None."""
        log = self.study / "logs" / f"{trial.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            with self._lock:
                if self._stopping:
                    return "not begun"
                process = subprocess.Popen(
                    self._command(trial),
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    env=self._environment(),
                    pass_fds=(lock,),  # a run that outlives its study keeps the study's folder locked
                    start_new_session=True,  # Ctrl-C reaches the study alone, which sends SIGTERM to its runs
                )
                self._live.add(process)
            code = process.wait()
            with self._lock:
                self._live.discard(process)
        if trial.history(self.study) is not None:
            return None
        return f"exit code {code}: {_last_line(log)}"

    def _command(self, trial: Trial) -> list[str]:
        folder = trial.folder(self.study)
        words = ["train", trial.recipe, "--out", str(folder), "--device", trial.device]
        words += ["--data", trial.data] if trial.data is not None else []
        for override in (*trial.overrides, f"seed={trial.seed}"):
            words += ["--set", override]
        words += ["--skip-bad"] if self.skip_bad else []
        words += ["--resume"] if RunFolder(folder).exists() else []
        return verb_command(*words)  # which saves and ends when the study is killed: no run goes on unseen

    def _environment(self) -> Mapping[str, str]:
        """The environment of a run's process: one thread where there are several jobs; errors come last in its log."""
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.jobs > 1 else {}
        return {**os.environ, "PYTHONUNBUFFERED": "1", **threads}

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for process in self._live:
                process.send_signal(signal.SIGTERM)


@contextmanager
def _study_lock(study: Path) -> Iterator[int]:
    """Lock the study's folder and yield the lock's file descriptor; raise InputError if it is locked already.

    It is an flock, which a child process holds on to as well when it inherits the descriptor.
    """
    import fcntl  # POSIX only, like the signals that stop a run

    descriptor = os.open(study / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"'{study}' is in use: another study trains there, or one that was killed still has runs that save "
                "and stop; wait for it, or choose another --out"
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


def _stop(number: int, _frame: FrameType | None) -> None:
    """The first SIGTERM, SIGHUP or SIGINT raises TrainingStopped, a second one KeyboardInterrupt.

    A second SIGHUP does nothing: for one closed terminal the system and the shell each send some.
    """
    for each in (*ending_signals(), signal.SIGINT):
        asked_again = each in (signal.SIGTERM, signal.SIGINT)
        signal.signal(each, signal.default_int_handler if asked_again else signal.SIG_IGN)
    raise TrainingStopped(number)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "no word"
