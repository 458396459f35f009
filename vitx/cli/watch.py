"""`vitx watch`: a run in the terminal while it trains."""

import time
from functools import partial
from typing import Annotated

import typer

from vitx.cli.options import RunArgument


def command(
    run: RunArgument,
    interval: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two readings.")] = 1.0,
) -> None:
    """Show loss, top-1, images a second and the time that is left of a run, until it ends."""
    from vitx.core.run import RunFolder
    from vitx.train.watch import watch

    watch(RunFolder.open(run), partial(time.sleep, interval))
