"""Is a graph of lower precision still the same classifier? Measured against the float32 graph on real images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx

from vitx.core.console import Progress
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import margins
from vitx.export.precision.calibration import Float32Array, logits_of

# A graph is searched further if its certificate would fail more often than once in five times.
MIN_CHANCE = 0.8
# The smallest margins; their loss is measured on at least twice as many images.
LOW_MARGINS = 8


@dataclass(frozen=True)
class Lowered:
    """A graph of lower precision.

    islands: nodes left in float32, of those that could have been lowered (for fp16 and bf16 also those whose
    operator has no such type). details: JSON, how it was found and every trial with its numbers.
    """

    graph: onnx.ModelProto
    islands: tuple[str, ...]
    details: dict[str, Any]


@dataclass(frozen=True)
class SamplingPlan:
    """What the certificate will ask of images that the search must not look at: at most `flips` flips of `images`."""

    images: int
    flips: int

    def chance(self, flip_rate: float) -> float:
        """The probability that a graph of this flip rate meets the plan: P(X ≤ flips), X Poisson."""
        expected = flip_rate * self.images
        if expected == 0:
            return 1.0
        terms = (k * math.log(expected) - expected - math.lgamma(k + 1) for k in range(self.flips + 1))
        return min(1.0, math.fsum(map(math.exp, terms)))


@dataclass(frozen=True)
class Bounds:
    """What a graph may differ by: largest logit error, in standard deviations of the logits, and top-1 agreement.

    With a `plan`, the graph must also be expected to meet it in MIN_CHANCE of the cases.
    """

    logit_error: float
    agreement: float = 0.99
    plan: SamplingPlan | None = None

    def __str__(self) -> str:
        allowed = f"{self.logit_error:g} and {1 - self.agreement:.3g} of the images"
        if self.plan is None:
            return allowed
        return (
            f"{allowed}, and {self.plan.flips} of the {self.plan.images} images of the certificate, to be met with "
            f"probability {MIN_CHANCE:g}"
        )


@dataclass(frozen=True)
class Agreement:
    """A graph against the float32 graph on the same images. Errors are in standard deviations of the float32 logits.

    flip_rate: the share of other images that is expected to flip (`expected_flip_rate`).
    """

    images: int
    flips: int
    max_error: float
    mean_error: float
    not_finite: int
    flip_rate: float

    @property
    def agreement(self) -> float:
        return 1 - self.flips / self.images

    def within(self, bounds: Bounds) -> bool:
        """A single flip among a few images proves no rate: it is allowed as many as it takes to reach the rate."""
        allowed = math.ceil((1 - bounds.agreement) * self.images - 1e-9)
        likely = bounds.plan is None or bounds.plan.chance(self.flip_rate) >= MIN_CHANCE
        return not self.not_finite and self.max_error <= bounds.logit_error and self.flips <= allowed and likely

    def __str__(self) -> str:
        return (
            f"{self.flips} of {self.images} images in another class, largest logit error {self.max_error:.3g} and mean "
            f"{self.mean_error:.3g} standard deviations, {self.not_finite} not finite"
        )

    def as_json(self) -> dict[str, Any]:
        return {name: _number(value) for name, value in asdict(self).items()}


def agreement_of(expected: Float32Array, found: Float32Array) -> Agreement:
    """Compare logits (n, C); what is not finite is an infinite error and a flip."""
    finite = np.isfinite(found).all(axis=1)
    spread = max(float(expected.std()), 1e-12)
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected) / spread
    return Agreement(
        images=len(expected),
        flips=int(((expected.argmax(axis=1) != found.argmax(axis=1)) | ~finite).sum()),
        max_error=float(error.max()) if finite.all() else math.inf,
        mean_error=float(error.mean()) if finite.all() else math.inf,
        not_finite=int((~finite).sum()),
        flip_rate=expected_flip_rate(expected, found) if finite.all() else 1.0,
    )


def expected_flip_rate(expected: Float32Array, found: Float32Array) -> float:
    """The share of images like these, logits (n, C), that a graph puts into another class; 0 for one class.

    An image flips when its margin (largest logit less the next) loses more than there is. Flips are few, so counting
    them says little. Here every margin is held against the loss of every image whose own margin is among the smallest
    tenth, where errors are larger than elsewhere. The smallest margins are spread evenly up to the LOW_MARGINS-th: two
    near ties, which any rounding may flip, must not decide.
    """
    if expected.shape[1] < 2:
        return 0.0
    held = margins(expected)
    low = np.argsort(held)[: max(2 * LOW_MARGINS, len(held) // 10)]
    lost = held[low] - margins(found[low], expected[low].argmax(axis=1))
    spread = np.sort(held)
    smallest = spread[:LOW_MARGINS]
    smallest[:] = smallest[-1] * (np.arange(len(smallest)) + 1) / len(smallest)
    return float((np.interp(lost, np.append(0, spread), np.arange(len(spread) + 1), left=0) / len(held)).mean())


@dataclass
class Judge:
    """Measures candidates against the float32 graph and remembers every trial.

    `prepared` makes of a candidate what the CPU can run (a twin of the same arithmetic); `accept` has the last word
    on a candidate within the bounds.
    """

    graph: onnx.ModelProto
    images: UInt8Array
    bounds: Bounds
    accept: Callable[[onnx.ModelProto], bool] | None = None
    prepared: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda candidate: candidate
    fused: bool = True
    trials: list[dict[str, Any]] = field(default_factory=list)
    bar: Progress | None = None

    def __post_init__(self) -> None:
        self.expected = logits_of(self.graph, self.images)
        if not np.isfinite(self.expected).all():
            raise CheckFailed("the float32 graph itself gives logits that are not finite: look at the checkpoint")

    def measure(self, candidate: onnx.ModelProto, images: int | None = None) -> Agreement:
        """Agreement on the first `images` of the images, or on all."""
        found = logits_of(self.prepared(candidate), self.images[:images], fused=self.fused)
        return agreement_of(self.expected[:images], found)

    def passes(self, candidate: onnx.ModelProto, what: str) -> bool:
        """Whether a candidate is within the bounds and accepted; the trial is remembered as `what`."""
        agreement = self.measure(candidate)
        verdict = agreement.within(self.bounds)
        trial: dict[str, Any] = {"what": what, **agreement.as_json(), "within_bounds": verdict}
        if self.bounds.plan is not None:
            trial["chance"] = self.bounds.plan.chance(agreement.flip_rate)
        if verdict and self.accept is not None:
            verdict = trial["accepted"] = bool(self.accept(candidate))
        self.trials.append(trial)
        if self.bar is not None:
            self.bar.update(len(self.trials), what)
        return verdict


def fewest_exceptions(ordered: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The smallest set of exceptions found with which `passes`: none of it can be left out.

    `ordered` has the one that helps most first. The shortest passing head of it is found by doubling and bisection;
    then parts of it, halves first and single ones last, the least helpful first, are left out in turn and stay out
    if it still passes. Raises CheckFailed when not even all of them pass.
    """
    size, failed = 0, -1
    while not passes(ordered[:size]):
        if size == len(ordered):
            raise CheckFailed(
                "even with every node left in float32 the graph is not accepted: is it the caller's check that fails?"
            )
        failed, size = size, min(max(1, 2 * size), len(ordered))
    while size - failed > 1:
        middle = (size + failed) // 2
        size, failed = (middle, failed) if passes(ordered[:middle]) else (size, middle)
    kept = list(ordered[:size])
    part = len(kept) // 2
    while part:
        # The last of a shortest head is needed: without it the head was too short.
        for end in range(len(kept) - 1, 0, -part):
            without = kept[: max(0, end - part)] + kept[end:]
            if passes(without):
                kept = without
        part //= 2
    return tuple(kept)


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
