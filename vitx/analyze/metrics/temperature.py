"""Temperature scaling (Guo et al., arXiv 1706.04599)."""

import math

import numpy as np
from scipy import optimize

from vitx.analyze.metric import Metric, NotApplicable, percent
from vitx.analyze.metrics.confidence import LabelArray, LogitArray, Logits, require_labels
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.probabilities import classification_metrics, softmax

TEMPERATURES = (0.01, 100.0)


class TemperatureScaling(Record):
    """Dividing logits by `temperature`, and what that does to images it was not fitted on.

    `temperature` is fitted on all images, `temperatures_of_halves` on the even and on the odd ones; `nll` and `ece` are
    of logits as they are, the `scaled_` ones of each half divided by the temperature of the other.
    """

    images: int
    temperature: float
    temperatures_of_halves: tuple[float, float]
    nll: float
    scaled_nll: float
    ece: float
    scaled_ece: float


def fit_temperature(logits: LogitArray, labels: LabelArray) -> float:
    """The T > 0 that minimises the NLL of softmax(logits / T), logits (N, C) and labels (N,).

    The NLL is convex in 1/T, so its derivative, mean(E_p[z] − z_y), has one root. Where that lies beyond 0.01 or 100,
    the bound is returned: a network that is never wrong would have T = 0, one worse than chance ∞. Above 1 the network
    was overconfident. Accuracy does not change. Raises InputError for labels that are no classes of the logits.
    """
    logits = np.asarray(logits, dtype=np.float64)
    require_labels(logits, labels)
    if not np.isfinite(logits).all():
        raise InputError("logits must be finite")
    of_label = logits[np.arange(len(labels)), labels]

    def slope(log_inverse: float) -> float:
        return float(((softmax(logits * math.exp(log_inverse)) * logits).sum(axis=1) - of_label).mean())

    low, high = (-math.log(bound) for bound in reversed(TEMPERATURES))
    if slope(low) >= 0:
        return TEMPERATURES[1]
    if slope(high) <= 0:
        return TEMPERATURES[0]
    return math.exp(-optimize.brentq(slope, low, high, xtol=1e-10))


def temperature_scaling(logits: LogitArray, labels: LabelArray) -> TemperatureScaling:
    """Fit a temperature on the even images and apply it to the odd ones, and the other way round.

    `scaled_ece` well below `ece` says that one number repairs the confidence; as it is, it says that the error is not
    one of scale. Raises InputError for fewer than two images.
    """
    if len(labels) < 2:
        raise InputError(
            f"{len(labels)} images: expected at least 2, one to fit a temperature on, one to measure it on"
        )
    halves = (fit_temperature(logits[::2], labels[::2]), fit_temperature(logits[1::2], labels[1::2]))
    scaled = np.array(logits, dtype=np.float64)
    scaled[::2] /= halves[1]
    scaled[1::2] /= halves[0]
    before, after = classification_metrics(logits, labels), classification_metrics(scaled, labels)
    return TemperatureScaling(
        images=len(labels),
        temperature=fit_temperature(logits, labels),
        temperatures_of_halves=halves,
        nll=before["nll"],
        scaled_nll=after["nll"],
        ece=before["ece"],
        scaled_ece=after["ece"],
    )


class TemperatureMetric(Logits):
    def result(self) -> TemperatureScaling:
        if len(self.labels) < 2:
            raise NotApplicable("one image has no second half to scale")
        return temperature_scaling(self.logits(), self.labels)


def _temperature_line(found: TemperatureScaling) -> str:
    gain = f"NLL {found.nll:.3f} → {found.scaled_nll:.3f}, ECE {percent(found.ece)} → {percent(found.scaled_ece)}"
    return f"T = {found.temperature:.3g}: {gain}"


TEMPERATURE_METRIC = Metric(
    title="Temperature scaling",
    reading="Logits divided by one number T, fitted on half of the images and judged on the other. T above 1: the "
    "network was surer than it is right; an ECE that stays is no error of scale.",
    record=TemperatureScaling,
    line=_temperature_line,
    activation=TemperatureMetric,
    labels=True,
)
