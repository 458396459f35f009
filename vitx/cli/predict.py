"""`vitx predict`: a folder of images into one Parquet file."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import AllowUncertified, BundleArgument, DeviceOption, Json, Quiet, RuntimeOption, Threads


def command(
    bundle: BundleArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, in subfolders too.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for predictions.parquet and summary.json.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images to a batch.")] = 32,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Classes listed for each image.")] = 5,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unreadable image.")] = False,
    allow_uncertified: AllowUncertified = False,
    threads: Threads = None,
    device: DeviceOption = "auto",
    runtime: RuntimeOption = "onnxruntime",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify every image of a folder. An unreadable image becomes a row with the reason."""
    from vitx.core.bundle import Bundle
    from vitx.core.console import print_fields, print_json
    from vitx.serve.predict import predict
    from vitx.serve.runtimes import load_session

    opened = Bundle.open(bundle)
    summary = predict(
        opened,
        load_session(opened, runtime, device=device, threads=threads),
        folder,
        out,
        batch_size=batch,
        top_k=top_k,
        strict=strict,
        allow_uncertified=allow_uncertified,
        quiet=quiet,
    )
    if as_json:
        print_json(summary.model_dump(mode="json"))
        return
    common = sorted(summary.classes.items(), key=lambda item: item[1], reverse=True)[:5]
    print_fields(
        f"{summary.images} images of {folder}",
        {
            "written to": out,
            "unreadable": summary.errors,
            "seconds": summary.seconds,
            "images/s": summary.images_per_second,
            "most common": ", ".join(f"{name} ({count})" for name, count in common if count),
            "certified": "yes" if summary.certified else "no",
        },
    )
