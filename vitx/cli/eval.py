"""`vitx eval`: how good a run or a bundle is on its evaluation split."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad, Threads, Which
from vitx.core.console import print_result


def command(
    model: Annotated[Path, typer.Argument(metavar="RUN|BUNDLE", help="A run folder, or a bundle.")],
    data: Data = None,
    checkpoint: Which = "best",
    threads: Threads = None,
    device: DeviceOption = "auto",
    runtime: Annotated[
        str | None, typer.Option("--runtime", help="Default: torch for a run, ONNX Runtime for a bundle.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Top-1, NLL, calibration (ECE) and Brier score: a run through torch, a bundle through ONNX Runtime by default."""
    from vitx.parity.evaluate import evaluate_path

    result = evaluate_path(
        model,
        data=data,
        which=checkpoint,
        device=device,
        threads=threads,
        runtime=runtime,
        skip_bad=skip_bad,
        quiet=quiet,
    )
    print_result(f"evaluation of {model}", result.model_dump(), as_json=as_json)
