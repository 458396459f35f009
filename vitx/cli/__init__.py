"""The command line: one file a verb. It composes the stages and holds no logic of its own."""

import errno
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import typer

from vitx import __version__
from vitx.cli.options import Command
from vitx.core.errors import VitxError, missing_package

# Each verb, in the order of a checkpoint's way, with the extra that brings what it needs.
VERBS = {
    "train": "train",
    "eval": "train",
    "report": "analyze",
    "study": "analyze",
    "analyze": "analyze",
    "export": "export",
    "parity": "export",
    "bench": "serve",
    "serve": "serve",
    "top": "serve",
    "predict": "serve",
    "demo": "all",
    "recipes": "train",
    "models": "train",
    "doctor": "all",
}

app = typer.Typer(
    name="vitx",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"vitx {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True)) -> None:
    """Vision transformers that do not over-smooth: train, export with proof, serve in batches."""


def _naming_the_extra(command: Callable[..., None], extra: str) -> Callable[..., None]:
    """A package that is not installed becomes an error that names the extra which brings it."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("vitx"):
                raise
            raise missing_package(error.name, extra) from None

    return run


for _verb, _extra in VERBS.items():
    app.command(_verb, cls=Command)(_naming_the_extra(importlib.import_module(f"vitx.cli.{_verb}").command, _extra))


def main() -> None:
    """Run the command line; an error of the user's is one line on standard error, with its exit code."""
    try:
        app()
    except VitxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        where = f" '{error.filename}'" if error.filename else ""
        print(f"error: cannot write{where}: {error.strerror}; what was there before is unchanged", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
