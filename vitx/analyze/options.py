"""What `vitx analyze` may be told. Every default is here, and nowhere else."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from vitx.core.errors import unknown_name
from vitx.core.options import CheckpointOption, DataOption, DeviceOption, Options, comma_separated, option

# The names of vitx.analyze.METRICS (a test compares them): a wrong one is refused before torch is imported.
METRIC_NAMES = (
    *("over-smoothing", "attention-collapse", "attention-collapse-mixed", "residual-update", "feature-similarity"),
    *("rollout", "fourier", "variance", "cka", "lesions", "confidence", "temperature", "corruptions"),
    *("frequency-noise", "occlusion", "adversarial", "hessian", "hessian-density", "landscape", "trajectory"),
)


def check_metrics(names: Iterable[str]) -> None:
    """Raise InputError for a name that is neither a metric's nor 'all'."""
    for name in names:
        if name not in METRIC_NAMES and name != "all":
            raise unknown_name("metric", name, (*METRIC_NAMES, "all"))


class AnalysisRequest(Options):
    """What is asked for, beside one network or two. only: the metrics, () for those that do not take long."""

    data: DataOption = None
    out: Path | None = option(None, "Write index.html, report.json and figures into this folder.")
    only: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = option(
        (), "These metrics; 'all' adds those that take long.", metavar="A,B", text=True
    )
    images: int = option(512, "At most so many images, evenly spaced.", ge=1)
    batch_size: int = option(16, "Images at a time.", flag="--batch", ge=1)
    module: str = option("", "The Hessian in one module's weights: blocks.3.attn. Default: in all.")
    corrupted: Path | None = option(None, "Take corruptions from copies of CIFAR-C or ImageNet-C.", metavar="DIR")
    weights: str = option("pretrained", "Of a model: a checkpoint file, 'pretrained' (timm's) or 'random'.")
    checkpoint: CheckpointOption = "best"
    device: DeviceOption = "auto"
    skip_bad: bool = option(False, "Leave unreadable images out, and count them.")
