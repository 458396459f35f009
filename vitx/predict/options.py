"""What `vitx predict` may be told. Every number has its default here, and nowhere else."""

from typing import Annotated

from pydantic import BeforeValidator

from vitx.core.options import (
    AllowUncertified,
    DeviceOption,
    Options,
    RayAddress,
    RequireSignature,
    RuntimeOption,
    Threads,
    number_range,
    option,
)


class PredictOptions(Options):
    """Options of a prediction; ray, ray_actors, threads, device and runtime are those of what runs the bundle."""

    batch_size: int = option(32, "Images to a batch.", flag="--batch", ge=1)
    top_k: int = option(5, "Classes listed for each image.", ge=1)
    logits: bool = option(False, "Add a column of all logits.")
    embeddings: bool = option(False, "Add a column of the features before the classifier.")
    attention: bool = option(False, "Add a column of how far each patch is looked at; see vitx export --output.")
    draft: bool = option(False, "Decode faster, not quite the same pixels; refused where classes change.")
    strict: bool = option(False, "Stop at the first unreadable image.")
    max_error_rate: float = option(0.01, "Exit code 1 if a larger share of the images is unreadable.", ge=0, le=1)
    shard_size: int = option(4096, "Files to a unit of work.", ge=1)
    image_column: str | None = option(None, "Of Parquet files, where several columns hold bytes.")
    read_threads: int | None = option(None, "Files read at once. Default: 2, of a URL 16.", ge=1)
    decode_threads: int | None = option(None, "Images decoded at once. Default: all cores.", ge=1)
    lease_seconds: float = option(
        60.0, "Seconds until the work of a process that died is another's.", flag="--lease", ge=1
    )
    ledger_url: str | None = option(
        None,
        "postgresql://… that shares the work among machines; see --out.",
        flag="--ledger",
        metavar="URL",
    )
    run_name: str | None = option(None, "Of this run in --ledger. Default: the absolute path of --out.")
    overwrite: bool = option(False, "Remove the predictions that --out holds, and begin anew.")
    allow_uncertified: AllowUncertified = False
    require_signature: RequireSignature = None
    ray: RayAddress = None
    ray_actors: Annotated[tuple[int, int] | None, BeforeValidator(number_range)] = option(
        None,
        "Actors of --ray. Default: one a GPU, or as many as fit the CPUs.",
        metavar="N|MIN:MAX",
        text=True,
    )
    threads: Threads = None
    device: DeviceOption = "auto"
    runtime: RuntimeOption = "auto"

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a session must give beside logits."""
        wanted = (("embedding", self.embeddings), ("attention", self.attention))
        return tuple(name for name, asked in wanted if asked)
