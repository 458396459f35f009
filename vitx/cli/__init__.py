"""The command line: one file a verb. It composes the stages and holds no logic of its own."""

import importlib
import sys

import typer

from vitx import __version__
from vitx.core.errors import VitxError

# Order of the help page: the path of a checkpoint.
VERBS = (
    "train",
    "eval",
    "analyze",
    "export",
    "parity",
    "bench",
    "serve",
    "predict",
    "demo",
    "recipes",
    "models",
    "doctor",
)

app = typer.Typer(
    name="vitx",
    help="Vision transformers that do not over-smooth: train, export with proof, serve in batches.",
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


for _verb in VERBS:
    _module = importlib.import_module(f"vitx.cli.{_verb}")
    app.command(_verb)(_module.command)


def main() -> None:
    """Run the command line; every error of the user's is one line, with its exit code."""
    try:
        app()
    except VitxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
