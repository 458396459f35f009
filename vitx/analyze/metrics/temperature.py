"""Temperature scaling: one number that divides the logits (Guo et al., arXiv 1706.04599, §4.2; docs/maths.md §5.2)."""

import math

import numpy as np
from scipy import optimize

from vitx.analyze.accuracy import Labels
from vitx.analyze.intervals import FEWEST, Interval, Measured, mean_interval, with_interval
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metrics.confidence import LogitArray, LogitCollector, ece_interval, require_labels
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.core.probabilities import Float64Array, below_largest, classification_metrics, log_softmax, softmax

TEMPERATURES = (0.01, 100.0)  # the bounds of T


class TemperatureScaling(Measured):
    """The fitted temperature, and NLL (nats) and ECE (0 to 1) before and after scaling.

    `temperature` is fitted on all images, `temperatures_of_halves` on those of even and of odd index. `nll` and `ece`
    are of the logits as they are; for `scaled_nll` and `scaled_ece` each half is divided by the temperature that was
    fitted on the other.
    """

    images: int
    temperature: float
    temperatures_of_halves: tuple[float, float]
    nll: float
    scaled_nll: float
    ece: float
    scaled_ece: float


def fit_temperature(logits: LogitArray, labels: Labels) -> float:
    """The T > 0 that minimises the NLL of softmax(logits / T), logits (N, C) and labels (N,).

    The NLL is convex in 1/T, so its derivative, mean(E_p[z] − z_y), has one root (docs/maths.md §5.2). If the root is
    below 0.01 or above 100, that bound is returned: a network that is never wrong would have T = 0, one worse than
    chance T = ∞. 1 where T changes nothing: all logits of an image are equal. T above 1: the network was overconfident.
    Accuracy does not change. Raises InputError for labels that are no classes of the logits.
    """
    logits = np.asarray(logits)
    require_labels(logits, labels)
    if not np.isfinite(logits).all():
        raise InputError("logits must be finite")
    z = below_largest(logits)  # where all are equal they are 0 exactly
    of_label = z[np.arange(len(labels)), labels]

    def slope(log_inverse: float) -> float:
        return float(((softmax(z * math.exp(log_inverse)) * z).sum(axis=1) - of_label).mean())

    low, high = (-math.log(bound) for bound in reversed(TEMPERATURES))
    if slope(low) >= 0:
        return TEMPERATURES[1] if slope(high) > 0 else 1.0
    if slope(high) <= 0:
        return TEMPERATURES[0]
    return math.exp(-optimize.brentq(slope, low, high, xtol=1e-10))


def temperature_scaling(logits: LogitArray, labels: Labels) -> TemperatureScaling:
    """Fit a temperature on images of even index and apply it to those of odd index, and the other way round.

    logits (N, C), labels (N,). A `scaled_ece` well below `ece`: one number repairs the confidence. A `scaled_ece` near
    `ece`: the error is not one of scale. Raises InputError for fewer than two images.
    """
    if len(labels) < 2:
        raise InputError(
            f"{counted(len(labels), 'image')}: expected at least 2, one to fit a temperature on, one to measure it on"
        )
    halves = (fit_temperature(logits[::2], labels[::2]), fit_temperature(logits[1::2], labels[1::2]))
    scaled = np.array(logits, dtype=np.float64)
    scaled[::2] /= halves[1]
    scaled[1::2] /= halves[0]
    fitted = fit_temperature(logits, labels)
    before, after = classification_metrics(logits, labels), classification_metrics(scaled, labels)
    return TemperatureScaling(
        images=len(labels),
        temperature=fitted,
        temperatures_of_halves=halves,
        nll=before["nll"],
        scaled_nll=after["nll"],
        ece=before["ece"],
        scaled_ece=after["ece"],
        intervals={"temperature": _temperature_interval(logits, labels, fitted), **_intervals(scaled, labels, after)},
    )


def _intervals(scaled: Float64Array, labels: Labels, after: dict[str, float]) -> dict[str, dict[str, Interval]]:
    probabilities = softmax(scaled)
    top, correct = probabilities.max(axis=1), scaled.argmax(axis=1) == labels
    nll = 0.0 - log_softmax(scaled)[np.arange(len(labels)), labels]
    return {"scaled_nll": mean_interval(nll), "scaled_ece": ece_interval(top, correct, after["ece"])}


def _temperature_interval(logits: LogitArray, labels: Labels, temperature: float) -> dict[str, Interval]:
    """Of the root 1/T of mean(E_p[z] − z_y) = 0: its variance is that of the terms over the squared slope."""
    n = len(labels)
    if n < FEWEST or not TEMPERATURES[0] < temperature < TEMPERATURES[1]:
        return {}
    z = below_largest(logits)
    p = softmax(z / temperature)
    mean = (p * z).sum(axis=1)
    slope = float(((p * z**2).sum(axis=1) - mean**2).mean())
    if slope <= 0:
        return {}
    error = float(np.std(mean - z[np.arange(n), labels])) / slope / math.sqrt(n)
    # T = 1/β is taken on a logarithmic scale, where it is positive: the error of log T is that of β over β.
    # Logits that say nothing of the classes have an error of hundreds, whose exponential overflows.
    low, high = TEMPERATURES
    factor = math.exp(min(1.96 * error * temperature, math.log(high / low)))
    return {"": (max(low, temperature / factor), min(high, temperature * factor))}


class TemperatureMetric(LogitCollector):
    """`temperature_scaling` of the logits (N, C)."""

    def result(self) -> TemperatureScaling:
        if len(self.labels) < 2:
            raise NotApplicable("one image has no second half to scale")
        return temperature_scaling(self.logits(), self.labels)


def _temperature_line(found: TemperatureScaling) -> str:
    nll = with_interval(found.scaled_nll, found.interval("scaled_nll"), ".3f")
    ece = with_interval(found.scaled_ece, found.interval("scaled_ece"), ".1f", scale=100)
    gain = f"NLL {found.nll:.3f} → {nll}, ECE {100 * found.ece:.1f} % → {ece} %"
    return f"T = {with_interval(found.temperature, found.interval('temperature'))}: {gain}"


TEMPERATURE_METRIC = Metric(
    title="Temperature scaling",
    reading="Logits divided by one number T, fitted on half of the images and judged on the other. T above 1: the "
    "network was surer than it is right; an ECE that stays is no error of scale.",
    precision="bootstrap over images; large-sample (sandwich) for T, none where T is at its bound; before scaling: see "
    "Confidence and calibration",
    record=TemperatureScaling,
    line=_temperature_line,
    activation=TemperatureMetric,
    labels=True,
)
