"""The command line: one file a verb. It composes the stages and holds no logic of its own.

A verb is imported when it is asked for, and `vitx -h` imports none.
"""

import codecs
import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from vitx import __version__
from vitx.core.console import Forgiving, Output, ending_signals, log
from vitx.core.errors import (
    FULL_DISK,
    MORE_FILES,
    TOO_MANY_FILES,
    EnvironmentMissing,
    InputError,
    VitxError,
    first_line,
    naming_extra,
)


class Verb(NamedTuple):
    """extra: which brings what the verb needs. summary: its line in `vitx -h`."""

    extra: str
    summary: str


# In the order of a checkpoint's way.
VERBS = {
    "train": Verb("train", "Train a recipe into a run folder."),
    "watch": Verb("train", "Show a run while it trains."),
    "eval": Verb("train", "Accuracy and calibration of a run or bundle."),
    "report": Verb("analyze", "Show a run on one page."),
    "study": Verb("analyze", "Train variants of a recipe and compare them."),
    "analyze": Verb("analyze", "Measure a network layer by layer."),
    "export": Verb("export", "Make a certified bundle, with engines if asked for."),
    "parity": Verb("export", "Compare two of runs and bundles on real images."),
    "bench": Verb("serve", "Measure latency and throughput by batch size."),
    "serve": Verb("serve", "Serve bundles over HTTP and gRPC."),
    "top": Verb("serve", "Show what a server does, by model."),
    "predict": Verb("serve", "Classify any number of images into Parquet."),
    "demo": Verb("all", "The whole way on handwritten digits."),
    "recipes": Verb("train", "List the recipes, or show one in full."),
    "settings": Verb("train", "List what can be set in a recipe."),
    "models": Verb("train", "List, show or convert networks."),
    "doctor": Verb("all", "Say what this machine and installation can do."),
}


# A path that was given, or a file below it, is at fault.
_NOT_USABLE = (
    *(
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
    ),
    *(errno.EBUSY, errno.ENOTEMPTY),  # a volume is mounted there, or another process was first
)


# Any in what follows: newer versions of typer hold click inside, older ones depend on it.
class Verbs(TyperGroup):
    """The verbs, each imported when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # typer looks at the names, to suggest one

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
app = typer.Typer(
    name="vitx", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True, **PLAIN
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"vitx {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True)) -> None:
    """Vision transformers that do not over-smooth: train, export with proof, serve in batches."""


def _command(verb: str) -> Any:
    from vitx.cli.options import Command

    callback = importlib.import_module(f"vitx.cli.{verb}").command
    alone = typer.Typer(**PLAIN)
    described = callback.__doc__ or VERBS[verb].summary  # python -OO leaves the docstrings out
    alone.command(verb, cls=Command, help=described)(_naming_the_extra(callback, VERBS[verb].extra))
    return typer.main.get_command(alone)


def _naming_the_extra(command: Callable[..., None], extra: str) -> Callable[..., None]:
    """A package that is not installed becomes an error that names the extra which brings it."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        with naming_extra(extra):
            from vitx.core.preprocess import ignore_image_warnings  # here, so that --help imports no Pillow

            ignore_image_warnings()
            command(*arguments, **options)

    return run


def _open_standard_streams() -> None:
    """Open those that were closed, as by `>&-`: a file of ours that had their numbers would get what is printed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115
    if not isinstance(sys.stderr, Forgiving):  # also for progress bars, and the interpreter's flush at its end
        sys.stderr = Forgiving(sys.stderr)
    if isinstance(sys.stdout, TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a run must not fail for a name
    if not isinstance(sys.stdout, Output):
        sys.stdout = Output(sys.stdout)


def _lacking(error: BaseException) -> str | None:
    """What this machine has none of, and what to do, where the system refused for that; None for another reason."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if no_thread or (isinstance(error, BlockingIOError) and error.filename is None):  # the latter of fork
        limits = "of threads and processes (ulimit -u, or its container's), or of memory (ulimit -v)"
        return f"{first_line(error)}: raise the limit {limits}"
    too_many = os.strerror(errno.EMFILE)
    if isinstance(error, RuntimeError) and too_many in str(error):  # torch's, of a file of weights
        return f"{too_many}: {MORE_FILES}"
    if isinstance(error, RuntimeError) and "out of memory" in str(error):  # torch's: how much, then of what it consists
        what = ". ".join(first_line(error).split(". ")[:3])
        return (
            f"{what}: a GPU has too little memory: take smaller batches (in training batch_size, or as many images in "
            "more passes with optimizer.accumulate), or another --device"
        )
    if not isinstance(error, OSError):
        return None
    if error.errno in TOO_MANY_FILES:
        return f"{error.strerror}: {MORE_FILES}"
    if error.errno == errno.ENOENT and error.filename is None:  # of no file that was given
        if "temporary directory" in str(error):  # of `tempfile`, perhaps while a library is imported
            return "no folder for temporary files can be written: set TMPDIR"
        return _no_working_folder()
    return None


def _no_working_folder() -> str | None:
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder is gone: change to another one, or give absolute paths"
    return None


def _memory_lacks(error: BaseException) -> bool:
    """Whether a value did not fit, torch's too, or a library that is imported: of these the message alone tells."""
    text = f"{error} {error.__cause__}" if isinstance(error, ImportError | RuntimeError) else ""
    unmapped = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or unmapped or "failed to map segment" in text or "allocate memory" in text


def terminate(number: int, frame: object) -> None:
    if number != signal.SIGTERM:  # for one closed terminal the system and the shell each send some
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def not_yet(number: int, frame: object) -> None:
    """At a reload that a server is asked for before it can: what it loads then is new."""


def _signalled(error: BaseException) -> BaseException | None:
    """What a signal raised, where typer made an exit of it, or a package that was being imported an ImportError."""
    found = getattr(error.__context__, "__cause__", None) if isinstance(error, SystemExit) else error
    while isinstance(found, ImportError):
        found = found.__cause__
    return found if isinstance(found, KeyboardInterrupt | SystemExit) else None


def _told(error: BaseException) -> int | None:
    """Say in one line why a verb ended, and return the exit code; None where the exit or the traceback stands."""
    if (signalled := _signalled(error)) is not None:
        if isinstance(signalled, SystemExit):
            raise SystemExit(signalled.code)
        log("interrupted")
        return 130
    if isinstance(error, VitxError):
        text = str(error)
        if "://" in text:
            from vitx.core.urls import without_password

            text = without_password(text)
        # Of a relative path that is not there, the reason; of any other error, why the next one will be.
        gone = _no_working_folder() if isinstance(error, InputError) else None
        log(f"error: {text}{f'; {gone}' if gone else ''}")
        return error.exit_code
    if (lacking := _lacking(error)) is not None:
        log(f"error: {lacking}")
        return 3
    if _memory_lacks(error):
        what = first_line(error.__cause__ or error)
        log(f"error: {what}: too little memory for this process: raise its limit (ulimit -v, or its container's)")
        return 3
    if isinstance(error, OSError):
        return _told_of_system(error)
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in error.object):
        print(f"error: a name that is not UTF-8 cannot be used here: {error.object!a}", file=sys.stderr)
        return 2
    return None


def _told_of_system(error: OSError) -> int | None:
    if error.filename == Output.NAME:
        sys.stdout = Forgiving(sys.stdout)  # what it did not take is lost
        if error.errno == errno.EPIPE:  # a reader that has enough, such as head
            return 1
        log(f"error: cannot write to standard output: {error.strerror}")
        return 3
    name = error.filename2 or error.filename  # of a copy, what is written
    where = f" '{name}'" if name else ""
    if error.errno in FULL_DISK:
        log(f"error: cannot write{where}: {error.strerror}; what was there before is unchanged")
        return 3
    if error.errno in _NOT_USABLE:
        log(f"error: cannot use{where}: {error.strerror}")
        return 2
    if error.errno is None:  # a library's own, such as safetensors' of a file that is gone: its message alone tells
        log(f"error: {first_line(error)}")
        return 2 if isinstance(error, FileNotFoundError | PermissionError) else 3
    return None


def main() -> None:
    """Run the command line; an error of the user's is one line on standard error, with its exit code.

    SIGTERM and the SIGHUP of a closed terminal unwind the stack as Ctrl-C does, so that what is half written is
    removed; some verbs handle them themselves.
    """
    _open_standard_streams()
    if "OMP_WAIT_POLICY" not in os.environ:
        # PyTorch's threads wait for each other by spinning, on libgomp's own terms for milliseconds. Where another
        # program has their cores, training takes half as long again (benchmarks/train/busy_cores.py). Read when torch
        # is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    hang_up = not_yet if sys.argv[1:2] == ["serve"] else terminate  # it asks a server for a reload
    before = {
        number: signal.signal(number, terminate if number == signal.SIGTERM else hang_up) for number in ending_signals()
    }
    try:
        if codecs.lookup(encoding := sys.getfilesystemencoding()).name != "utf-8":
            raise EnvironmentMissing(f"names of files are taken for {encoding} here, expected utf-8: set PYTHONUTF8=1")
        try:
            app()
        finally:
            if isinstance(sys.exception(), SystemExit | None):  # else there is another error to tell
                sys.stdout.flush()  # the interpreter's own, at its end, would have exit code 120
    except BaseException as error:
        code = _told(error)
        if code is None:
            raise
        sys.exit(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
