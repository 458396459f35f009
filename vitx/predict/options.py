"""What `vitx predict` may be told. Every number has its default here, and nowhere else."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

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


class Share(NamedTuple):
    """The part of an input that is one job's; the number of a job is 1 to `jobs`."""

    number: int
    jobs: int

    @property
    def suffix(self) -> str:
        """Of the names of this job's files."""
        return "" if self == WHOLE else f"-{self.number:05d}-of-{self.jobs:05d}"

    @property
    def anew(self) -> str:
        """How to begin anew, for an error: --overwrite would remove what the other jobs did."""
        return "pass --overwrite" if self == WHOLE else "remove that one"


WHOLE = Share(1, 1)


def _parse_share(given: Any) -> Any:
    """'3/32' or two numbers → Share(3, 32), anything else as it is; raise ValueError unless 1 ≤ I ≤ N."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        given = f"{given[0]}/{given[1]}"
    if not isinstance(given, str):
        return given
    if not (numbers := re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", given)):
        raise ValueError("expected I/N, the job's number and the number of jobs, such as 3/32")
    number, jobs = map(int, numbers.groups())
    if not 1 <= number <= jobs:
        raise ValueError(f"of {jobs} jobs there is no number {number}: they are 1 to N")
    return Share(number, jobs)


def _parse_names(given: Any) -> Any:
    """'a, b' → ('a', 'b'), '' → (), anything but a text as it is."""
    return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given


class PredictOptions(Options):
    """Options of a prediction; ray, ray_actors, threads, device and runtime are those of what runs the bundle."""

    headings: ClassVar[Mapping[str, str]] = {
        "top_k": "Columns",
        "image_column": "Parquet files",
        "strict": "Unreadable images",
        "batch_size": "Speed",
        "shard_size": "Parts and repeated runs",
        "allow_uncertified": "Certificate",
        "ray": "Ray",
    }
    top_k: int = option(5, "Classes listed for each image.", ge=1)
    logits: bool = option(False, "Add a column of all logits.")
    embeddings: bool = option(False, "Add a column of the features before the classifier.")
    attention: bool = option(False, "Add a column of how far each patch is looked at; see vitx export --output.")
    image_column: str | None = option(None, "Of Parquet files, where several columns hold bytes.")
    key: str | None = option(None, "Of Parquet files: the column whose values, all different, are `path`.")
    columns: Annotated[tuple[str, ...] | None, BeforeValidator(_parse_names)] = option(
        None,
        "Of Parquet files: columns to copy to the output. Default: all but those of bytes.",
        metavar="A,B",
        text=True,
    )
    strict: bool = option(False, "Stop at the first unreadable image.")
    max_error_rate: float = option(0.01, "Exit code 1 if a larger share of the images is unreadable.", ge=0, le=1)
    retry_errors: bool = option(False, "Read again what was unreadable in a finished run; its other rows stay.")
    batch_size: int = option(32, "Images to a batch.", flag="--batch", ge=1)
    draft: bool = option(False, "Decode faster, not quite the same pixels; refused where classes change.")
    read_threads: int | None = option(None, "Files read at once. Default: 2, of a URL 16.", ge=1)
    decode_threads: int | None = option(None, "Images decoded at once. Default: all cores.", ge=1)
    threads: Threads = None
    device: DeviceOption = "auto"
    runtime: RuntimeOption = "auto"
    shard_size: int = option(4096, "Files to a unit of work.", ge=1)
    shard: Annotated[Share | None, BeforeValidator(_parse_share)] = option(
        None, "This is job I of N that share the input, each with a part; on any machines.", metavar="I/N", text=True
    )
    incremental: bool = option(False, "Note what is read, and add what is new or changed when it is run again.")
    state: Path | None = option(None, "Local folder for the ledger and copies of the output, if --out is a URL.")
    overwrite: bool = option(False, "Remove the predictions that --out holds, and begin anew.")
    allow_uncertified: AllowUncertified = False
    require_signature: RequireSignature = None
    ray: RayAddress = None
    ray_actors: Annotated[tuple[int, int] | None, BeforeValidator(number_range)] = option(
        None, "Actors of --ray. Default: one a GPU, or as many as fit the CPUs.", metavar="N|MIN:MAX", text=True
    )

    @property
    def share(self) -> Share:
        return self.shard or WHOLE

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a session must give beside logits."""
        wanted = (("embedding", self.embeddings), ("attention", self.attention))
        return tuple(name for name, asked in wanted if asked)

    @property
    def lists(self) -> tuple[str, ...]:
        """What a session gives that becomes a column."""
        return (*(("logits",) if self.logits else ()), *self.outputs)
