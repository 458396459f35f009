"""`vitx predict`: any number of images into Parquet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import (
    AllowUncertified,
    BundleArgument,
    DeviceOption,
    Json,
    Quiet,
    RayAddress,
    RuntimeOption,
    Threads,
    number_range,
)
from vitx.core.errors import InputError

if TYPE_CHECKING:
    from vitx.predict.pipeline.executor import Executor
    from vitx.runtimes.session import Session

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
    draft: Annotated[
        bool, typer.Option("--draft", help="Decode faster, not quite the same pixels; refused where classes change.")
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
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="URL", help="postgresql://… that shares the work among machines; see --out."),
    ] = None,
    run_name: Annotated[
        str | None, typer.Option("--run-name", help="Of this run in --ledger. Default: the absolute path of --out.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the predictions that --out holds, and begin anew.")
    ] = False,
    allow_uncertified: AllowUncertified = False,
    ray: RayAddress = None,
    ray_actors: Annotated[
        str | None,
        typer.Option(metavar="N|MIN:MAX", help="Actors of --ray. Default: one a GPU, or as many as fit the CPUs."),
    ] = None,
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
    from vitx.predict import PREDICTIONS, predict
    from vitx.runtimes import load_session

    opened = Bundle.open(bundle)
    actors = _actors(ray, ray_actors)
    executor: Session | Executor
    if ray is None:
        executor = load_session(opened, runtime, device=device, threads=threads, features=embeddings)
    else:
        from vitx.predict.ray.pool import RayPool

        executor = RayPool(
            *(opened, ray),
            actors=actors,
            runtime=runtime,
            device=device,
            threads=threads,
            decode_threads=decode_threads,
        )
    summary = predict(
        opened,
        executor,
        source,
        out,
        batch_size=batch,
        top_k=top_k,
        logits=logits,
        embeddings=embeddings,
        draft=draft,
        shard_size=shard_size,
        image_column=image_column,
        strict=strict,
        overwrite=overwrite,
        allow_uncertified=allow_uncertified,
        read_threads=read_threads,
        decode_threads=decode_threads,
        ledger_url=ledger,
        run_name=run_name,
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


def _actors(ray: str | None, text: str | None) -> tuple[int, int] | None:
    """'4' → (4, 4), '2:8' → (2, 8)."""
    if text is None:
        return None
    if ray is None:
        raise InputError(f"--ray-actors {text} is for --ray: pass that too, or leave it out")
    return number_range("--ray-actors", text)
