"""What `vitx parity` may be told. Every default is here, and nowhere else."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from vitx.core.options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    MaxFlipRate,
    Options,
    Precision,
    option,
    parse_batch_sizes,
)


class ParityOptions(Options):
    """What is asked for, beside the reference and the candidate. batch_sizes: () for those of the candidate."""

    data: DataOption = None
    images: str = option("all", "all; enough (for the flip rate, if none flips); or a number: evenly spaced.")
    max_flip_rate: MaxFlipRate = 0.01
    reference_runtime: str | None = option(None, "See vitx bench.")
    runtime: str | None = option(None, "Of the candidate. Default: torch for a run, else ONNX Runtime.")
    batch_sizes: Annotated[tuple[int, ...], BeforeValidator(parse_batch_sizes)] = option(
        (), "Default: 1,2,7,32 and the ends of each plan's profiles.", text=True
    )
    precision: Precision = option("fp32", "What a served model computes in: its limit.")
    token_file: Path | None = option(None, "File with the token that a served model's server asks for.")
    served: bool = option(False, "Also send the images' bytes through vitx serve.")
    trace: bool = option(False, "Which layer diverges first, and what repairs it.")
    verify: bool = option(False, "Replay the certificate that a bundle carries.")
    report: Path | None = option(None, "Write one HTML file.", metavar="FILE.html")
    checkpoint: CheckpointOption = "best"
    device: DeviceOption = "auto"
    skip_bad: bool = option(False, "Leave unreadable images out, and count them.")
