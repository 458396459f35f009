"""Is a graph of lower precision still the same classifier? Measured against the float32 graph on real images.

Three bounds: the largest logit error, the top-1 agreement on these images, and the probability that a certificate on
other images will pass (docs/precision.md).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from vitx.core.console import Progress
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import margins
from vitx.data.image_set import evenly_spaced
from vitx.export.graph.execution import Float32Array, logits_in_parts, logits_of

# A graph must be expected to pass its certificate four times out of five, or more of it goes back to float32.
MIN_PROBABILITY = 0.8
# A verdict that is clear on so many images is not measured on the others; that a graph fails may be clear on fewer.
FIRST_IMAGES, SCREENED_IMAGES = 64, 16
# It is clear that a graph passes where one with errors so many times as large would pass on the first images. Of 600
# simulated graphs (docs/precision.md) 210 passed early and none of them failed on all images; with 2, 3 of 238 did. 212
# were refused on SCREENED_IMAGES, and none of them passed on all.
RESERVE = 3
# So many of the smallest margins are spread evenly; the loss of margin is measured on at least twice as many images.
LOW_MARGINS = 8


@dataclass(frozen=True)
class Lowered:
    """A graph of lower precision.

    islands: nodes left in float32, of those that could have been lowered (for fp16 and bf16 also those whose
    operator has no such type). details: JSON for the manifest, how they were found and every trial with its numbers.
    """

    graph: onnx.ModelProto
    islands: tuple[str, ...]
    details: dict[str, Any]


@dataclass(frozen=True)
class SamplingPlan:
    """The certificate to come: at most `flips` flips among `images` images, which the search must not look at.

    A single sampling plan (n, c) of acceptance sampling: sample size and acceptance number.
    """

    images: int
    flips: int

    def acceptance_probability(self, flip_rate: float) -> float:
        """The probability that a graph of this flip rate meets the plan: P(X ≤ flips), X Poisson.

        The Poisson limit of the binomial, because flips are rare; terms in logarithms, because k! overflows.
        """
        expected = flip_rate * self.images
        if expected == 0:
            return 1.0
        terms = (k * math.log(expected) - expected - math.lgamma(k + 1) for k in range(self.flips + 1))
        return min(1.0, math.fsum(map(math.exp, terms)))


@dataclass(frozen=True)
class Bounds:
    """How far a graph may differ: largest logit error, in standard deviations of the logits, and top-1 agreement.

    With a `sampling_plan`, the graph must also be expected to meet the plan with MIN_PROBABILITY.
    """

    logit_error: float
    agreement: float = 0.99
    sampling_plan: SamplingPlan | None = None

    def as_json(self) -> dict[str, Any]:
        plan = self.sampling_plan and asdict(self.sampling_plan)
        return {"logit_error": self.logit_error, "agreement": self.agreement, "plan": plan}

    def __str__(self) -> str:
        allowed = f"{self.logit_error:g} and {1 - self.agreement:.3g} of the images"
        if self.sampling_plan is None:
            return allowed
        return (
            f"{allowed}, and {self.sampling_plan.flips} of the {self.sampling_plan.images} images of the certificate, "
            f"to be met with probability {MIN_PROBABILITY:g}"
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
        """Whether all bounds hold."""
        plan = bounds.sampling_plan
        likely = plan is None or plan.acceptance_probability(self.flip_rate) >= MIN_PROBABILITY
        return likely and not self.fails_among(self.images, bounds)

    def fails_among(self, images: int, bounds: Bounds) -> bool:
        """Whether what was found on these images breaks a bound for `images`, of which these are a part.

        The number of flips allowed is rounded up, so that 1 % of 32 images is one flip.
        """
        allowed = math.ceil((1 - bounds.agreement) * images - 1e-9)  # 1 - 0.99 is a little more than 0.01
        return bool(self.not_finite) or not self.max_error <= bounds.logit_error or self.flips > allowed

    def __str__(self) -> str:
        return (
            f"{self.flips} of {self.images} images in another class, largest logit error {self.max_error:.3g} and mean "
            f"{self.mean_error:.3g} standard deviations, {self.not_finite} not finite"
        )

    def as_json(self) -> dict[str, Any]:
        return {name: _number(value) for name, value in asdict(self).items()}


def agreement_of(expected: Float32Array, found: Float32Array, std: float | None = None) -> Agreement:
    """Compare logits (n, C); a row that is not finite counts as a flip and makes the errors infinite.

    std: of the logits, by default of these.
    """
    finite = np.isfinite(found).all(axis=1)
    # In standard deviations of the logits the same bound serves networks of any logit scale.
    std = max(float(expected.std()) if std is None else std, 1e-12)
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected) / std
    return Agreement(
        images=len(expected),
        flips=int(((expected.argmax(axis=1) != found.argmax(axis=1)) | ~finite).sum()),
        max_error=float(error.max()) if finite.all() else math.inf,
        mean_error=float(error.mean()) if finite.all() else math.inf,
        not_finite=int((~finite).sum()),
        flip_rate=expected_flip_rate(expected, found) if finite.all() else 1.0,
    )


def expected_flip_rate(expected: Float32Array, found: Float32Array) -> float:
    """The share of other images like these, logits (n, C), that a graph is expected to flip; 0 for one class.

    An image flips when it loses more margin (largest logit less the next) than it has. Flips are few, so counting them
    says little. Instead the loss of every image of small margin is held against the margin of every image:
    `mean over losses l of F(l)`, F the share of margins below l. Losses are those of the tenth of the images with the
    smallest margins, where errors are larger than elsewhere. The LOW_MARGINS smallest margins are spread evenly from 0
    to the largest of them: two near ties, which any rounding may flip, must not decide.
    """
    if expected.shape[1] < 2:
        return 0.0
    margin = margins(expected)
    low = np.argsort(margin)[: max(2 * LOW_MARGINS, len(margin) // 10)]
    # The margin after lowering is that of the class the float32 graph chose: negative where the image flipped.
    loss = margin[low] - margins(found[low], expected[low].argmax(axis=1))
    ordered = np.sort(margin)
    smallest = ordered[:LOW_MARGINS]  # a view: `ordered` changes with it
    smallest[:] = smallest[-1] * (np.arange(len(smallest)) + 1) / len(smallest)
    # F is linear between margins; a loss below 0 (a margin that grew) flips nothing.
    below = np.interp(loss, np.append(0, ordered), np.arange(len(ordered) + 1), left=0)
    return float((below / len(margin)).mean())


def judging_order(images: int) -> npt.NDArray[np.int64]:
    """The indices of all images: FIRST_IMAGES evenly spaced ones, of which SCREENED_IMAGES come first, then the others.

    The images of a folder are sorted by class, so the first are spread over the set.
    """
    first = evenly_spaced(images, FIRST_IMAGES)
    stride = FIRST_IMAGES // SCREENED_IMAGES
    return np.concatenate([*(first[start::stride] for start in range(stride)), np.delete(np.arange(images), first)])


@dataclass
class Judge:
    """Measures candidates against the float32 graph and records every trial.

    `runnable` turns a candidate into a graph that the CPU runs with the same arithmetic (a float32 twin, for a half
    type). `accept` has the last word on a candidate within the bounds. `fused`: as in `logits_of`.

    A sequential test: images are looked at in `judging_order`, and the next only if the verdict is open. A bound that
    is broken stays so; one that fails with a RESERVE-th of the errors is taken to fail on all images, and of
    FIRST_IMAGES one that holds with RESERVE times the errors to hold.
    """

    graph: onnx.ModelProto
    images: UInt8Array
    bounds: Bounds
    accept: Callable[[onnx.ModelProto], bool] | None = None
    runnable: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda candidate: candidate
    fused: bool = True
    trials: list[dict[str, Any]] = field(default_factory=list)
    bar: Progress | None = None

    def __post_init__(self) -> None:
        self.images = self.images[judging_order(len(self.images))]
        self.expected = self._exact(self.images[:FIRST_IMAGES])

    @property
    def std(self) -> float:
        """Of the logits, those of FIRST_IMAGES or more if there are as many: that of few images is off by a tenth."""
        return float(self.expected.std())

    def _exact(self, images: UInt8Array) -> Float32Array:
        logits = logits_of(self.graph, images)
        if not np.isfinite(logits).all():
            raise CheckFailed("the float32 graph itself gives logits that are not finite: look at the checkpoint")
        return logits

    def _expected(self, images: int) -> Float32Array:
        """The float32 graph's logits of the first `images` images, computed when they are first asked for."""
        if len(self.expected) < images:
            self.expected = np.concatenate([self.expected, self._exact(self.images[len(self.expected) :])])
        return self.expected[:images]

    def measure(self, candidate: onnx.ModelProto, images: int | None = None) -> Agreement:
        """Agreement on the first `images` of the images, or on all."""
        found = logits_of(self.runnable(candidate), self.images[:images], fused=self.fused)
        return agreement_of(self._expected(len(found)), found, self.std)

    def _judged(self, candidate: onnx.ModelProto) -> Agreement:
        """Agreement on the first images if the verdict is clear there, else on all."""
        images = np.split(self.images, (SCREENED_IMAGES, FIRST_IMAGES))
        parts = logits_in_parts(self.runnable(candidate), images, fused=self.fused)
        found = next(parts)
        while len(found) < len(self.images) and not self._is_clear(found):
            found = np.concatenate([found, next(parts)])
        return agreement_of(self._expected(len(found)), found, self.std)

    def _is_clear(self, found: Float32Array) -> bool:
        """Whether these logits of the first images decide: a bound is broken for good, a graph fails with a RESERVE-th
        of the errors too, or, on FIRST_IMAGES or more, passes with RESERVE times the errors too.
        """
        expected = self._expected(len(found))
        agreement = agreement_of(expected, found, self.std)
        if agreement.fails_among(len(self.images), self.bounds):
            return True
        passes = agreement.within(self.bounds)
        scaled = expected + (RESERVE if passes else 1 / RESERVE) * (found - expected)
        same = agreement_of(expected, scaled, self.std).within(self.bounds) is passes
        return same and not (passes and len(found) < FIRST_IMAGES)

    def passes(self, candidate: onnx.ModelProto, what: str) -> bool:
        """Whether a candidate is within the bounds and accepted; the trial is recorded under the name `what`."""
        agreement = self._judged(candidate)
        verdict = agreement.within(self.bounds)
        trial: dict[str, Any] = {"what": what, **agreement.as_json(), "within_bounds": verdict}
        if self.bounds.sampling_plan is not None:
            trial["chance"] = self.bounds.sampling_plan.acceptance_probability(agreement.flip_rate)
        if verdict and self.accept is not None:
            verdict = trial["accepted"] = bool(self.accept(candidate))
        self.trials.append(trial)
        if self.bar is not None:
            self.bar.update(len(self.trials), what)
        return verdict


def minimal_subset(ordered: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A small subset for which `passes` is true and from which no single element can be left out (1-minimal).

    The empty subset is known to fail: it is not tried again. `ordered` begins with the element that helps most. Delta
    debugging (Zeller & Hildebrandt, IEEE TSE 28, 2002) with that order as a hint, because each call measures a graph:
    the shortest passing prefix is found by doubling and bisection; then parts of the prefix, halves first and single
    elements last, the least helpful first, are left out for good if the rest still passes. Raises CheckFailed when not
    even all elements pass.
    """
    size, failed = 1, 0  # the prefix to try, and the longest that is known to fail
    while not passes(ordered[:size]):
        if size >= len(ordered):
            raise CheckFailed(
                "even with every node left in float32 the graph is not accepted: is it the caller's check that fails?"
            )
        failed, size = size, min(2 * size, len(ordered))
    while size - failed > 1:
        middle = (size + failed) // 2
        size, failed = (middle, failed) if passes(ordered[:middle]) else (size, middle)
    kept = list(ordered[:size])
    part = len(kept) // 2
    while part:
        # The last element of a shortest prefix is needed: without it the prefix failed.
        for end in range(len(kept) - 1, 0, -part):
            without = kept[: max(0, end - part)] + kept[end:]
            if passes(without):
                kept = without
        part //= 2
    return tuple(kept)


def _number(value: float) -> float | str:
    """The value for JSON, which has no infinity."""
    return value if math.isfinite(value) else str(value)
