"""`vitx watch`: a run in the terminal while it trains in another process."""

import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vitx.core.console import can_redraw, counted
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import read_record
from vitx.core.run import RunFolder
from vitx.train.loop.run_lock import is_held
from vitx.train.metrics_file import read_lines
from vitx.train.progress import OUT_OF_PATIENCE, PROGRESS_FILE, RunProgress, duration

if TYPE_CHECKING:
    from rich.table import Table


class RunState(NamedTuple):
    """A run at one moment: its newest steps, and the lines of metrics.jsonl."""

    progress: RunProgress
    history: list[dict[str, Any]]

    def fields(self) -> dict[str, str]:
        """What is shown, as text."""
        done, at = len(self.history), self.progress
        early = f", {OUT_OF_PATIENCE}" if at.ended and not at.failure and at.step < at.steps else ""
        shown = {"epochs done": f"{done} of {at.epochs}{early}", "steps": f"{at.step} of {at.steps}"}
        if at.loss is not None and at.images_per_second is not None and at.seconds_left is not None:
            shown |= {"loss": f"{at.loss:.4f}", "images/s": f"{at.images_per_second:.0f}"}
            shown |= {} if at.ended else {"left": duration(at.seconds_left)}
        if done:
            best = max(self.history, key=lambda row: row["top1"])
            shown["top-1"] = f"{self.history[-1]['top1']:.2%}, highest {best['top1']:.2%} after epoch {best['epoch']}"
        return shown


def states(run: RunFolder, pause: Callable[[], None]) -> Iterator[RunState]:
    """Yield the state of `run` until it has ended, calling `pause` in between.

    Raises InputError where nothing was trained yet, and CheckFailed when the training failed, or was stopped or killed.
    """
    path = run.path / PROGRESS_FILE
    if not path.is_file():
        raise InputError(f"'{run.path}' has no {PROGRESS_FILE}: expected a run whose training has begun")
    while True:
        progress = read_record(path, RunProgress)
        # Not by its pid, which in a restarted container is another's. Another host's locks may not be seen here.
        held = is_held(run)
        if held and progress.ended:  # of a process before: one that resumes the run has yet to look at the images
            progress = progress.model_copy(update={"ended": False, "failure": ""})
        gone = progress.host == socket.gethostname() and held is False
        gone = gone and not read_record(path, RunProgress).ended  # it may have ended in between
        yield (state := RunState(progress, read_lines(run.metrics_path)))
        if progress.failure:
            raise CheckFailed(f"the training of '{run.path}' ended before its last epoch: {progress.failure}")
        if progress.ended:
            return
        if gone:
            done = f"{len(state.history)} of {counted(progress.epochs, 'epoch')}"
            raise CheckFailed(
                f"the process that trained '{run.path}' is gone after {done}: resume with `vitx train … --resume`"
            )
        pause()


def watch(run: RunFolder, pause: Callable[[], None]) -> None:
    """Show the run until it ends: redrawn in a terminal, else a line for each epoch and for the end."""
    if can_redraw(sys.stdout):
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            for state in states(run, pause):
                live.update(_table(run, state), refresh=True)
        return
    shown = -1
    for state in states(run, pause):
        if len(state.history) != shown or state.progress.ended:
            shown = len(state.history)
            print(", ".join(f"{name} {value}" for name, value in state.fields().items()), flush=True)


def _table(run: RunFolder, state: RunState) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(str(run.path)), title_justify="left", show_header=False)
    for name, value in state.fields().items():
        table.add_row(name, Text(value))
    table.add_row("run", ProgressBar(total=state.progress.steps, completed=state.progress.step, width=40))
    return table
