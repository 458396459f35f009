"""`vitx analyze`: what the training did to the network."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Data, Json, RunArgument, SkipBad, Which


def command(
    run: RunArgument,
    data: Data = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write report.json into this folder.")] = None,
    checkpoint: Which = "best",
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Measure, layer by layer, how alike the tokens are and how peaked the attention is."""
    from vitx.analyze import over_smoothing
    from vitx.core.console import print_json, print_table
    from vitx.core.files import write_json
    from vitx.core.images import open_images
    from vitx.core.run import RunFolder
    from vitx.models import load_run_model

    source = RunFolder.open(run)
    info = source.info
    model, state = load_run_model(source, checkpoint)
    images = open_images(data or info.data, "val", skip_bad=skip_bad)
    result = over_smoothing(model, images, info.preprocessing)
    report = {
        "run": str(source.path),
        "checkpoint": checkpoint,
        "epoch": state.epoch,
        "data": images.name,
        **result.model_dump(),
    }
    if out is not None:
        write_json(out / "report.json", report)
    if as_json:
        print_json(report)
        return
    spreads = result.attention_std
    rows = [
        (layer, similarity, spreads.get(f"{layer}.attn", "not observable"))
        for layer, similarity in result.cos_sim.items()
    ]
    print_table(f"over-smoothing of {source.path}, {len(images)} images", ("layer", "CosSim", "attention std"), rows)
