"""`vitx report`: a run folder as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, RunArgument, SkipBad, Which
from vitx.core.console import log_next, print_result


def command(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", help="The page. Default: report.html in the run.")] = None,
    data: Data = None,
    checkpoint: Which = "best",
    device: DeviceOption = "auto",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a run on one page: curves, recipe, environment, confusion matrix, layers. It needs no other file."""
    from vitx.cli.next_command import export_of
    from vitx.core.run import RunFolder
    from vitx.models.device import choose_device
    from vitx.train.report import write_report

    folder = RunFolder.open(run)
    page = out or folder.path / "report.html"
    summary = write_report(
        folder, page, data=data, which=checkpoint, device=choose_device(device), skip_bad=skip_bad, quiet=quiet
    )
    print_result(f"report of {run}", summary, as_json=as_json)
    log_next(*export_of(run, summary.get("images"), skip_bad=skip_bad), quiet=quiet)
