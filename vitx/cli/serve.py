"""`vitx serve`: answer requests over HTTP."""

import typer

from vitx.cli.options import from_records
from vitx.serve.options import ServeOptions


@from_records("serve")
def command(options: ServeOptions) -> None:
    """Serve bundles: Open Inference Protocol v2, image classification, metrics and a web page."""
    from vitx.serve.process.launch import launch

    if code := launch(options):
        raise typer.Exit(code)
