"""What a metric is: what it reads, which options it depends on, its record, its line of text and its figure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from vitx.analyze.activations import Activations
from vitx.core.console import progress
from vitx.core.files import Record
from vitx.core.panels import Results
from vitx.data.image_set import ImageSet
from vitx.models.source import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Neighbouring layers count as similar above this cosine of their maps (DeepViT, arXiv 2103.11886, §3.2).
SIMILARITY_THRESHOLD = 0.9


class NotApplicable(Exception):
    """Raised with the reason when a metric cannot be computed for this network or these images."""


class ActivationMetric(Protocol):
    """Accumulates batches of the shared pass; `result` raises NotApplicable if there was nothing to measure."""

    def add(self, batch: Activations) -> None: ...

    def result(self) -> Record: ...


class AnalysisOptions(Record):
    """What metrics depend on besides the network and the images."""

    batch_size: PositiveInt = 16
    seed: NonNegativeInt = 0
    similar_above: float = Field(
        default=SIMILARITY_THRESHOLD, ge=-1, le=1, description="cosine that makes two layers similar"
    )
    eigenvalues: PositiveInt = 5
    loss_batches: PositiveInt = Field(default=4, description="batches whose loss surface is measured")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="of the loss ½·wd·‖w‖²")
    landscape_points: PositiveInt = 11
    module: str = Field(default="", description="whose weights the Hessian is in: blocks.3.attn; '' for all")
    corrupted: Path | None = Field(default=None, description="copies of CIFAR-C or ImageNet-C for `corruptions`")
    skip_bad: bool = Field(default=False, description="leave out images of which one of these copies is unreadable")


class MetricContext(NamedTuple):
    """What a metric is measured on."""

    source: Source
    images: ImageSet
    options: AnalysisOptions
    quiet: bool = True
    name: str = ""

    def batches(self) -> Iterator[Any]:
        """The prepared images, uint8 (B, S, S, 3), with a bar of how many were taken."""
        return self.shown(self.images.batches(self.source.preprocessing, self.options.batch_size), len(self.images))

    def shown(self, batches: Iterable[Any], images: int) -> Iterator[Any]:
        """The same batches, arrays or tuples of arrays, with a bar of how many of the images are done."""
        with progress(self.name, images, quiet=self.quiet) as bar:
            done = 0
            for batch in batches:
                yield batch
                bar.update(done := done + len(batch[0] if isinstance(batch, tuple) else batch))


# To be increased when a metric's definition changes: cached results of the older one are measured again.
DEFINITIONS_VERSION = 12


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric has either `activation`, which shares one pass over activations, or `measure`, which runs by itself.

    reading: what the figure shows, whatever the network. claim: what a paper says of networks, with the paper's name.
    precision: how its intervals were made, or why it has none. line: the result in a few words, with its intervals.
    figure: draws one network, or two beside each other; None for a table alone. streams, maps, mixed: what the shared
    pass must record for it. labels: whether it needs them. options: the fields of AnalysisOptions that it depends on,
    besides the batch size. checkpoints: whether it reads a run's other checkpoints. default: measured unless --only
    names others.
    """

    title: str
    reading: str
    claim: str = ""
    precision: str
    record: type[Record]
    line: Callable[[Any], str]
    activation: Callable[[MetricContext], ActivationMetric] | None = None
    measure: Callable[[MetricContext], Record] | None = None
    figure: Callable[[Results], "Figure"] | None = None
    streams: bool = False
    maps: bool = False
    mixed: bool = False
    labels: bool = False
    options: tuple[str, ...] = ()
    checkpoints: bool = False
    default: bool = True


def labels_missing(source: Source, images: ImageSet) -> str | None:
    """Why the images' labels cannot be held against the network's answers; None where they can."""
    if not images.class_names:
        return "the images have no labels"
    if len(images.class_names) != len(source.class_names):
        return f"the images are of {len(images.class_names)} classes, the network knows {len(source.class_names)}"
    if _are_numbers(images.class_names) or _are_numbers(source.class_names):
        return None
    for index, (here, known) in enumerate(zip(images.class_names, source.class_names, strict=True)):
        if here != known:
            return f"class {index} is '{here}' of the images, and '{known}' of the network"
    return None


def answer_names(source: Source, images: ImageSet) -> tuple[str, ...]:
    """What the network's answers are called: the images' names of the classes where it has only numbers for as many."""
    alike = len(images.class_names) == len(source.class_names)
    return images.class_names if alike and _are_numbers(source.class_names) else source.class_names


def _are_numbers(class_names: tuple[str, ...]) -> bool:
    """Whether classes have no names."""
    return class_names == tuple(map(str, range(len(class_names))))
