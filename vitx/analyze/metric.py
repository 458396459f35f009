"""What a metric is: what it reads, what it depends on, how it is told and drawn."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pydantic import Field, NonNegativeFloat, PositiveInt

from vitx.analyze.activations import Activations
from vitx.core.files import Record
from vitx.core.panels import Results
from vitx.data.image_set import ImageSet
from vitx.models.source import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Neighbouring blocks whose maps are more alike than this count as similar (DeepViT, §3.2).
SIMILAR = 0.9


class NotApplicable(Exception):
    """Why a metric says nothing of this network or these images."""


class ActivationMetric(Protocol):
    """Reads batches, then gives its result or raises NotApplicable."""

    def add(self, batch: Activations) -> None: ...

    def result(self) -> Record: ...


class Options(Record):
    """What metrics depend on besides the network and the images."""

    batch_size: PositiveInt = 16
    seed: int = 0
    similar_above: float = Field(default=SIMILAR, ge=-1, le=1, description="cosine that makes two layers similar")
    eigenvalues: PositiveInt = 5
    loss_batches: PositiveInt = Field(default=4, description="batches whose loss surface is measured")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="of the loss ½·wd·‖w‖²")
    landscape_points: PositiveInt = 11
    module: str = Field(default="", description="whose weights the Hessian is in: blocks.3.attn; '' for all")
    corrupted: Path | None = Field(default=None, description="copies of CIFAR-C or ImageNet-C for `corruptions`")


class Measured(NamedTuple):
    """What is measured, and how."""

    source: Source
    images: ImageSet
    options: Options
    quiet: bool = True

    def batches(self) -> Iterator[Any]:
        return self.images.batches(self.source.preprocessing, self.options.batch_size)


# Raised when a metric's definition changes: kept results of older ones are measured again.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One of `activation` (shares the pass over `streams` and `maps`) and `measure` is given.

    reading: how to read the figure. line: the result in a few words. figure: draws one network, or two beside each
    other; None: a table alone. options: names of Options' fields that it depends on, besides the batch size. default:
    measured unless others are asked for.
    """

    title: str
    reading: str
    record: type[Record]
    line: Callable[[Any], str]
    activation: Callable[[Measured], ActivationMetric] | None = None
    measure: Callable[[Measured], Record] | None = None
    figure: Callable[[Results], "Figure"] | None = None
    streams: bool = False
    maps: bool = False
    labels: bool = False
    options: tuple[str, ...] = ()
    default: bool = True

    def collector(self, measured: Measured) -> ActivationMetric:
        assert self.activation is not None, "only of a metric that shares the pass"
        return self.activation(measured)


def ends(values: Iterable[float]) -> str:
    """The first and the last of some values along the network."""
    first, *_, last = [*values] * 2
    return f"{first:.3g} → {last:.3g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
