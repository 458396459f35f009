"""What a person sees: a progress bar on a terminal, plain lines elsewhere, tables, and JSON for machines."""

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

# What a terminal obeys or hides: control characters but the tab, and marks that turn the direction of text. And what
# stands for the bytes of a name that is no UTF-8: no JSON, metrics or messages take it.
_UNSEEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """One line, with a stranger's control characters as `\\x1b` and `\\n`: the name of a file may have them."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, most: int = 80) -> str:
    """A text of at most so many characters: one of a stranger's, such as the name of a class, may have a million."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def counted(number: int, noun: str) -> str:
    """'1 image', '2 images'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Progress(Protocol):
    """Reports `done` of a total; `note` is a short text beside the bar."""

    def update(self, done: int, note: str = "") -> None: ...


class _Silent:
    def update(self, done: int, note: str = "") -> None:
        pass


class _Lines:
    """A line at most every ten seconds, with the time that is left if all steps take as long."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.start = title, total, time.monotonic()
        self.next_time = self.start + 10

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if now >= self.next_time:
            self.next_time = now + 10
            of = f"/{self.total}" if self.total else ""
            left = f"about {(now - self.start) * (self.total / done - 1):.0f} s left" if 0 < done < self.total else ""
            log(", ".join(filter(None, (f"{self.title}: {done}{of}", left, note))))


def can_redraw(stream: TextIO) -> bool:
    """Whether it is a terminal in which lines can be drawn again; with TERM=dumb, as in editors, it cannot."""
    if not stream.isatty():
        return False
    from rich.console import Console

    return Console(file=stream).is_interactive


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False) -> Iterator[Progress]:
    """Report the progress of `total` steps, 0 if nobody knows how many, on standard error."""
    if quiet:
        yield _Silent()
        return
    if not can_redraw(sys.stderr):
        yield _Lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    # Names of files and classes are text, whatever brackets they have.
    title_column, note_column = (
        TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}")
    )
    columns = (title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(visible(title), total=total or None, note="")

        class _Bar:
            def update(self, done: int, note: str = "") -> None:
                bar.update(task, completed=done, note=visible(note))

        yield _Bar()


class Forgiving:
    """A stream that loses what it cannot take: a full disk, a reader that is gone, a terminal that was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Output(Forgiving):
    """Standard output: what it cannot take is an error that names it, which the system's does not."""

    NAME = "standard output"

    def write(self, text: str) -> int:
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self.NAME
            raise


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP, which a closed terminal sends, unless that is ignored, as `nohup` starts a program."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def log(message: str, *, quiet: bool = False) -> None:
    """One `visible` line on standard error, lost where that takes none: work goes on when nobody can read along."""
    if not quiet:
        with suppress(OSError):
            print(visible(message), file=sys.stderr, flush=True)


def log_next(*words: object, quiet: bool = False) -> None:
    """The command that usually follows, as a shell takes it, on standard error."""
    log(f"next: {shlex.join(map(str, words))}", quiet=quiet)


def print_json(value: Any) -> None:
    """JSON on standard output, for machines."""
    escaped = sys.stdout.errors == "backslashreplace"  # by the command line; not all of its escapes are JSON's
    print(json.dumps(value, indent=2, ensure_ascii=escaped, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output; numbers to the right. The title is one line, however narrow the table is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=any(columns))
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows) and bool(rows)
        table.add_column(Text(visible(column)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(f"{cell:.5g}" if isinstance(cell, float) else visible(str(cell))) for cell in row])
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(Text(visible(title), style="table.title"), soft_wrap=True)
    console.print(table)


def print_fields(title: str, fields: Mapping[str, object]) -> None:
    """A two-column table of names and values on standard output."""
    print_table(title, ("", ""), list(fields.items()))


def print_result(title: str, fields: Mapping[str, object], *, as_json: bool) -> None:
    """What a verb found, for machines or for people."""
    if as_json:
        print_json(fields)
    else:
        print_fields(title, fields)
