"""Attention rollout on real images: where the classifier's token looks, through all blocks (docs/maths.md §7)."""

import heapq

import numpy as np
from torch import Tensor

from vitx.analyze.activations import Activations
from vitx.analyze.intervals import Measured, mean_interval, with_interval
from vitx.analyze.metric import Metric, MetricContext, NotApplicable, labels_missing
from vitx.analyze.metrics.confidence import MISTAKES, Mistake
from vitx.core.errors import InputError
from vitx.core.probabilities import softmax
from vitx.models.outputs import PooledTokens, attention_rollout, pooled_tokens

EXAMPLES = 6  # evenly spaced images that are shown besides the mistakes


class LookedAt(Mistake):
    """An answer, right or wrong; shares: of each patch, row by row, sum 1 with the tokens before the patches.

    label is −1 without labels.
    """

    shares: tuple[float, ...]


class Rollout(Measured):
    """grid: rows and columns of patches. examples: evenly spaced images; mistakes: the surest wrong answers, none where
    the images' classes are not the network's.

    largest: mean over all images of the largest share of a patch, times the number of patches: 1 is an even look.
    """

    grid: tuple[int, int]
    images: int
    largest: float
    examples: tuple[LookedAt, ...]
    mistakes: tuple[LookedAt, ...]


class RolloutMetric:
    """The pooled row of Π ½(A + I) over the blocks, A the softmax maps' mean over heads (Abnar & Zuidema 2020)."""

    def __init__(self, context: MetricContext) -> None:
        self._pooled: PooledTokens | None = None
        self._reason = ""
        try:
            self._pooled = pooled_tokens(context.source.model)
        except InputError as error:
            self._reason = str(error).partition(";")[0]
        self._labels = context.images.labels
        self._judged = labels_missing(context.source, context.images) is None
        self._shown = set(np.linspace(0, len(context.images) - 1, EXAMPLES).round().astype(int).tolist())
        self._examples: list[LookedAt] = []
        self._mistakes: list[tuple[float, int, LookedAt]] = []
        self._largest: list[float] = []

    def add(self, batch: Activations) -> None:
        if self._pooled is None:
            return
        try:
            shares = attention_rollout([*batch.maps.values()], self._pooled)
        except InputError as error:
            self._pooled, self._reason = None, str(error).partition(";")[0]
            return
        first = len(self._largest)
        self._largest += (shares.amax(dim=1).double() * self._pooled.patches).tolist()
        probabilities = softmax(batch.logits.cpu().numpy())  # float32 has one number for all beyond 1 - 2⁻²⁵
        sure, classes = probabilities.max(axis=1), probabilities.argmax(axis=1)
        for row in range(batch.images):
            index, label = first + row, int(self._labels[first + row])
            wrong = self._judged and 0 <= label != int(classes[row])
            if not wrong and index not in self._shown:
                continue
            seen = _seen(index, label, int(classes[row]), float(sure[row]), shares[row])
            if index in self._shown:
                self._examples.append(seen)
            if wrong:
                heapq.heappush(self._mistakes, (seen.confidence, -index, seen))
                if len(self._mistakes) > MISTAKES:
                    heapq.heappop(self._mistakes)

    def result(self) -> Rollout:
        if self._pooled is None:
            raise NotApplicable(self._reason)
        return Rollout(
            grid=self._pooled.grid,
            images=len(self._largest),
            largest=float(np.mean(self._largest)),
            intervals={"largest": mean_interval(self._largest)},
            examples=tuple(self._examples),
            mistakes=tuple(seen for *_, seen in sorted(self._mistakes, reverse=True)),
        )


def _seen(index: int, label: int, predicted: int, confidence: float, shares: Tensor) -> LookedAt:
    rounded = tuple(float(f"{share:.3g}") for share in shares.tolist())
    return LookedAt(image=index, label=label, predicted=predicted, confidence=confidence, shares=rounded)


def _rollout_line(found: Rollout) -> str:
    largest = with_interval(found.largest, found.interval("largest"))
    rows, columns = found.grid
    return f"the largest share of a patch is {largest} times that of an even look over {rows} × {columns} patches"


ROLLOUT_METRIC = Metric(
    title="Attention rollout",
    reading="Each image as the network gets it, and beside it where the classifier's token looks, from blue (nowhere) "
    "to yellow (the image's largest share): the product over all blocks of half the attention, mean over heads, and "
    "half the identity.",
    claim="Abnar & Zuidema (2005.00928): rollout follows where information comes from better than the attention of one "
    "layer.",
    precision="bootstrap over images; of the pictures none: they are single images",
    record=Rollout,
    line=_rollout_line,
    activation=RolloutMetric,
    maps=True,
)
