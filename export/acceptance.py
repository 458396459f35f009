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
from vitx.export.calibration import Float32Array, logits_of


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
class Bounds:
    """What a graph may differ by: largest logit error, in standard deviations of the logits, and top-1 agreement."""

    logit_error: float
    agreement: float = 0.99


@dataclass(frozen=True)
class Agreement:
    """A graph against the float32 graph on the same images. Errors are in standard deviations of the float32 logits."""

    images: int
    flips: int
    max_error: float
    mean_error: float
    not_finite: int

    @property
    def agreement(self) -> float:
        return 1 - self.flips / self.images

    def within(self, bounds: Bounds) -> bool:
        """A single flip among a few images proves no rate: it is allowed as many as it takes to reach the rate."""
        allowed = math.ceil((1 - bounds.agreement) * self.images - 1e-9)
        return not self.not_finite and self.max_error <= bounds.logit_error and self.flips <= allowed

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
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected) / max(float(expected.std()), 1e-12)
    return Agreement(
        images=len(expected),
        flips=int(((expected.argmax(axis=1) != found.argmax(axis=1)) | ~finite).sum()),
        max_error=float(error.max()) if finite.all() else math.inf,
        mean_error=float(error.mean()) if finite.all() else math.inf,
        not_finite=int((~finite).sum()),
    )


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
        if verdict and self.accept is not None:
            verdict = trial["accepted"] = bool(self.accept(candidate))
        self.trials.append(trial)
        if self.bar is not None:
            self.bar.update(len(self.trials), what)
        return verdict


def fewest_exceptions(ordered: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The smallest set of exceptions found with which `passes`: none of it can be left out.

    `ordered` has the one that helps most first. The shortest passing head of it is found by doubling and bisection;
    then each of the head is left out in turn, the least helpful first, and stays out if it still passes. Raises
    CheckFailed when not even all of them pass.
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
    # The last of a shortest head is needed: without it the head was too short.
    for name in reversed(kept[:-1]):
        without = [other for other in kept if other != name]
        if passes(without):
            kept = without
    return tuple(kept)


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
