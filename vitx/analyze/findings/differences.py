"""What differs significantly between two networks: numbers of the same images, paired."""

from collections.abc import Mapping

import numpy as np
from scipy import stats

from vitx.analyze.findings.finding import RISK
from vitx.analyze.intervals import FEWEST, Interval, Measured, holm, paired_change, percentiles, resampled_means
from vitx.core.files import Record
from vitx.core.probabilities import ECE_BINS, Float64Array, confidence_bins


class Difference(Record):
    """One number of both networks, means over the same images: the second's less the first's, and its interval.

    p: adjusted by Holm's method for all numbers compared. significant: p up to 0.05.
    """

    quantity: str
    first: float
    second: float
    difference: float
    interval: Interval
    p: float
    significant: bool


def differences(first: Mapping[str, Record], second: Mapping[str, Record]) -> list[Difference]:
    """Compare every number that both networks' results have of the same images; empty for fewer than ten images.

    p and interval are those of the bootstrap of the paired difference; of accuracy those of McNemar's exact test and
    of Agresti and Min. The caller sees to it that both are of the same images.
    """
    of_first, of_second = _per_image(first), _per_image(second)
    columns = {
        name: (np.array(one), np.array(of_second[name]))
        for name, one in of_first.items()
        if len(one) == len(of_second.get(name, ())) >= FEWEST
    }
    found = [_compared(name, one, other) for name, (one, other) in columns.items() if name != "confidence"]
    if {"confidence", "accuracy"} <= set(columns):
        found.append(_ece_compared(*columns["confidence"], *columns["accuracy"]))
    adjusted = holm([each.p for each in found])
    return [each.model_copy(update={"p": p, "significant": p <= RISK}) for each, p in zip(found, adjusted, strict=True)]


def _per_image(results: Mapping[str, Record]) -> dict[str, tuple[float, ...]]:
    measured = (result.per_image for result in results.values() if isinstance(result, Measured))
    return {name: values for per_image in measured for name, values in per_image.items()}


def _compared(name: str, one: Float64Array, other: Float64Array) -> Difference:
    if name == "accuracy":
        return _accuracy_compared(one, other)
    resampled = resampled_means(other - one)
    (interval,) = percentiles(resampled[:, None])
    return _difference(name, float(one.mean()), float(other.mean()), interval, _bootstrap_p(resampled))


def _accuracy_compared(one: Float64Array, other: Float64Array) -> Difference:
    """Whether each answer was right: a resample of few answers that differ, or of none, says too little of the rest."""
    lost, gained = int((one > other).sum()), int((other > one).sum())
    p = float(stats.binomtest(min(lost, gained), lost + gained, 0.5).pvalue) if lost + gained else 1.0
    interval = paired_change(lost, gained, len(one))
    return _difference("accuracy", float(one.mean()), float(other.mean()), interval, p)


def _ece_compared(*columns: Float64Array) -> Difference:
    """confidence of both networks, then whether each answer was right, of both."""
    tops, rights = columns[:2], columns[2:]
    gaps = [
        (confidence_bins(top)[:, None] == np.arange(ECE_BINS)) * (right - top)[:, None]
        for top, right in zip(tops, rights, strict=True)
    ]
    one, other = (float(np.abs(gap.mean(axis=0)).sum()) for gap in gaps)
    resampled = np.diff([np.abs(resampled_means(gap)).sum(axis=1) for gap in gaps], axis=0)[0]  # of the same resamples
    (interval,) = percentiles(resampled[:, None])
    return _difference("ECE", one, other, interval, _bootstrap_p(resampled))


def _bootstrap_p(resampled: Float64Array) -> float:
    """Two-sided: how often the resampled difference has the other sign; from the normal law where it never has.

    Counting 1,000 resamples cannot tell 0.002 from 0, and Holm's method multiplies it by the number of comparisons.
    """
    spread = float(resampled.std())
    if spread == 0:
        return 1.0 if resampled[0] == 0 else 0.0
    counted = 2 * min(float((resampled <= 0).mean()), float((resampled >= 0).mean()))
    return min(1.0, max(counted, 2 * float(stats.norm.sf(abs(float(resampled.mean())) / spread))))


def _difference(name: str, one: float, other: float, interval: Interval, p: float) -> Difference:
    return Difference(
        quantity=name,
        first=one,
        second=other,
        difference=other - one,
        interval=interval,
        p=p,
        significant=False,
    )
