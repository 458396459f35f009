"""`vitx serve`: answer requests over HTTP."""

import signal
import sys

import typer

from vitx.cli import not_yet, terminate
from vitx.cli.options import from_records
from vitx.core.console import Forgiving
from vitx.serve.options import ServeOptions


@from_records("serve")
def command(options: ServeOptions) -> None:
    """Serve bundles: Open Inference Protocol v2, image classification, metrics and a web page."""
    if options.ray is not None and sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not_yet:
        signal.signal(signal.SIGHUP, terminate)  # nothing there loads again
    sys.stdout = Forgiving(sys.stdout)  # no server ends because nobody takes the line with its address
    from vitx.serve.process.launch import launch

    if code := launch(options):
        raise typer.Exit(code)
