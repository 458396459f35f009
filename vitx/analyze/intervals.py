"""How sure a measured number is: intervals at 95 % and exact tests (docs/analyses.md says which number has which).

Shape letters: N images, R resamples, K numbers an image.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy import stats
from torch import Tensor

from vitx.core.files import Record
from vitx.core.probabilities import Float64Array, wilson_interval

CONFIDENCE = 0.95
RESAMPLES = 1000
FEWEST = 10  # images, or batches, that are resampled: the bootstrap of fewer is far too narrow
_TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_NORMAL = float(stats.norm.ppf(_TAILS[1]))

Interval = tuple[float, float]


class Measured(Record):
    """A result with what is known about its precision.

    intervals: at 95 %, by the name of a field, then by layer or "" for a single number; a number without one is of
    fewer than ten images, or says in docs/analyses.md why it has none. per_image: numbers of each image, in the order
    of the images, by their names in a comparison of two networks.
    """

    intervals: dict[str, dict[str, Interval]] = Field(default_factory=dict)
    per_image: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    def interval(self, field: str, layer: str = "") -> Interval | None:
        return self.intervals.get(field, {}).get(layer)


def paired_change(lost: int, gained: int, n: int) -> Interval:
    """The interval of the change of a share, (gained − lost)/n, of the same n images (Agresti & Min 2005).

    It is Wald's of the counts with ½ more in each cell of the table of pairs.
    """
    change, n = (gained - lost) / (n + 2), n + 2
    width = _NORMAL * math.sqrt(max(0.0, (lost + gained + 1) / n - change**2) / n)
    return max(-1.0, change - width), min(1.0, change + width)


def resample_weights(n: int, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Float64Array]:
    """How often each of n items is drawn in every bootstrap resample, (r, n), in pieces of a few resamples."""
    generator = np.random.default_rng(seed)
    piece = max(1, min(resamples, 2_000_000 // n))
    for start in range(0, resamples, piece):
        drawn = generator.integers(0, n, (min(piece, resamples - start), n))
        rows = np.arange(len(drawn))[:, None] * n
        yield np.bincount((drawn + rows).ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)


def resampled_means(values: Float64Array) -> Float64Array:
    """Bootstrap means of values (N, …): (R, …)."""
    flat = values.reshape(len(values), -1)
    means = [weights @ flat / len(values) for weights in resample_weights(len(values))]
    return np.asarray(np.concatenate(means).reshape(-1, *values.shape[1:]))


def percentiles(resampled: Float64Array) -> list[Interval]:
    """The middle 95 % of resampled numbers (R, K), for each of the K."""
    low, high = np.quantile(resampled, _TAILS, axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def mean_interval(values: npt.ArrayLike) -> dict[str, Interval]:
    """The bootstrap interval of the mean of values (N,), as {"": interval}; empty for fewer than ten."""
    return layer_intervals({"": np.asarray(values, dtype=np.float64)})


def batch_interval(values: Sequence[float]) -> dict[str, Interval]:
    """Student's interval of the mean of a few batches' numbers, as {"": interval}; empty for one batch."""
    if len(values) < 2:
        return {}
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    width = float(stats.t.ppf(_TAILS[1], len(values) - 1)) * error
    return {"": (mean - width, mean + width)}


def sign_test(above: int, n: int) -> float:
    """One-sided p of `above` of n images being above a bound if at most half of all such images are."""
    return float(stats.binom.sf(above - 1, n, 0.5))


def few_events(seen: int, n: int, rate: float) -> float:
    """One-sided p of `seen` events or fewer in n images if their rate were `rate` or more."""
    return float(stats.binom.cdf(seen, n, rate))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted by Holm's step-down method: those up to 0.05 are all true in 95 of 100 families of tests."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(np.array(p_values), kind="stable")):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def of_images(values: Tensor, images: int) -> Tensor:
    """The mean over the windows of each image: (B·W, …) → (B, …), the windows of the first image first."""
    return values.reshape(images, -1, *values.shape[1:]).mean(dim=1)


class LayerSamples:
    """A number, or K of them, of every image by layer: their means, and bootstrap intervals."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Float64Array]] = {}

    def add(self, layer: str, values: Tensor) -> None:
        """Add a batch's values (B,) or (B, K)."""
        self._parts.setdefault(layer, []).append(values.detach().double().cpu().numpy())

    def values(self) -> dict[str, Float64Array]:
        """Layer → (N,) or (N, K), in the order of the layers."""
        return {layer: np.concatenate(parts) for layer, parts in self._parts.items()}

    def means(self) -> dict[str, float]:
        return {layer: float(values.mean()) for layer, values in self.values().items()}

    def intervals(self) -> dict[str, Interval]:
        return layer_intervals(self.values())


def layer_intervals(values: Mapping[str, Float64Array]) -> dict[str, Interval]:
    """The bootstrap interval of each layer's mean of values (N,); empty for fewer than ten images."""
    if not values or min(map(len, values.values())) < FEWEST:
        return {}
    return dict(zip(values, percentiles(resampled_means(np.stack([*values.values()], axis=1))), strict=True))


def rounded(values: npt.ArrayLike) -> tuple[float, ...]:
    """Values of images as a record keeps them: six digits."""
    return tuple(float(f"{value:.6g}") for value in np.asarray(values, dtype=np.float64).tolist())


def with_interval(value: float, interval: Interval | None, form: str = ".3g", *, scale: float = 1.0) -> str:
    """A number and its interval as text: 0.41 [0.39, 0.43]."""
    if interval is None:
        return format(scale * value, form)
    low, high = (format(scale * end, form) for end in interval)
    return f"{format(scale * value, form)} [{low}, {high}]"


def share_text(rate: float, n: int) -> str:
    """A share of n images in percent with Wilson's interval: 85.3 % [81.2, 88.6]."""
    low, high = wilson_interval(round(rate * n), n)
    return f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def ends_text(values: Mapping[str, float], intervals: Mapping[str, Interval]) -> str:
    """The first and the last of the layers' numbers, with their intervals."""
    names = list(values)
    ends = [with_interval(values[name], intervals.get(name)) for name in (names[0], names[-1])]
    return " → ".join(ends)
