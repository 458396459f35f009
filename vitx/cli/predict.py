"""`vitx predict`: any number of images into Parquet."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import AllowUncertified, BundleArgument, DeviceOption, Json, Quiet, RuntimeOption, Threads

INPUT_HELP = "A folder of images, a pattern, a list of paths (.txt), a .tar or .parquet file, or a URL of these."
# Numbers without a default here take predict()'s own.
Positive = int | None


def command(
    bundle: BundleArgument,
    source: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    out: Annotated[Path, typer.Option("--out", help="Folder for predictions.parquet/ and summary.json.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images to a batch.")] = 32,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Classes listed for each image.")] = 5,
    logits: Annotated[bool, typer.Option("--logits", help="Add a column of all logits, in float16.")] = False,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Add a column of the features before the classifier, in float16.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unreadable image.")] = False,
    shard_size: Annotated[int, typer.Option("--shard-size", min=1, help="Files to a unit of work.")] = 4096,
    image_column: Annotated[
        str | None, typer.Option("--image-column", help="Of Parquet files, where several columns hold bytes.")
    ] = None,
    read_threads: Annotated[
        Positive, typer.Option("--read-threads", min=1, help="Files read at once. Default: 2, of a URL 16.")
    ] = None,
    decode_threads: Annotated[
        Positive, typer.Option("--decode-threads", min=1, help="Images decoded at once. Default: all cores.")
    ] = None,
    lease: Annotated[
        float, typer.Option("--lease", min=1, help="Seconds until the work of a process that died is another's.")
    ] = 60.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the predictions that --out holds, and begin anew.")
    ] = False,
    allow_uncertified: AllowUncertified = False,
    threads: Threads = None,
    device: DeviceOption = "auto",
    runtime: RuntimeOption = "onnxruntime",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify every image of an input. An unreadable image becomes a row with the reason.

    Run it again to go on after a stop; run it several times at once to share the work.
    """
    from vitx.core.bundle import Bundle
    from vitx.core.console import print_fields, print_json
    from vitx.serve.offline import PREDICTIONS, predict
    from vitx.serve.runtimes import load_session

    opened = Bundle.open(bundle)
    summary = predict(
        opened,
        load_session(opened, runtime, device=device, threads=threads, features=embeddings),
        source,
        out,
        batch_size=batch,
        top_k=top_k,
        logits=logits,
        embeddings=embeddings,
        shard_size=shard_size,
        image_column=image_column,
        strict=strict,
        overwrite=overwrite,
        allow_uncertified=allow_uncertified,
        read_threads=read_threads,
        decode_threads=decode_threads,
        lease_seconds=lease,
        quiet=quiet,
    )
    if as_json:
        print_json(summary.model_dump(mode="json"))
        return
    common = sorted(summary.classes.items(), key=lambda item: item[1], reverse=True)[:5]
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stages.items())
    print_fields(
        f"{summary.images} images of {summary.input}",
        {
            "written to": out / PREDICTIONS,
            "unreadable": summary.errors,
            "done by this process": summary.images_here,
            "seconds": summary.seconds,
            "images/s": summary.images_per_second,
            "bound by": f"{summary.binding} ({busy})",
            "most common": ", ".join(f"{name} ({count})" for name, count in common if count),
            "certified": "yes" if summary.certified else "no",
        },
    )
