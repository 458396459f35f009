"""Accuracy under attack: FGSM (Goodfellow et al., arXiv 1412.6572) and PGD (Madry et al., arXiv 1706.06083), L∞."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.analyze.accuracy import Labels, Tally, numbered
from vitx.analyze.figures import ACCURACY
from vitx.analyze.metric import Measured, Metric, percent
from vitx.analyze.predictor import PixelLogits, as_pixels, pixel_logits
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, Results, panels
from vitx.core.preprocess import Preprocessing, UInt8Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = (1 / 255, 2 / 255, 4 / 255, 8 / 255)
PGD_STEPS = 10


class AdversarialRobustness(Record):
    """`fgsm[i]` and `pgd[i]` are accuracies under attacks of radius `epsilons[i]`, scale 0 to 1; `clean` under none."""

    images: int
    epsilons: tuple[float, ...]
    steps: int
    clean: float
    fgsm: tuple[float, ...]
    pgd: tuple[float, ...]


def adversarial_robustness(
    model: nn.Module,
    images: Iterable[UInt8Array],
    labels: Labels,
    preprocessing: Preprocessing,
    *,
    epsilons: Sequence[float] = EPSILONS,
    steps: int = PGD_STEPS,
    seed: int = 0,
) -> AdversarialRobustness:
    """Attack every image with the network's own gradients, each value by at most ε, and classify the result.

    FGSM is one step, PGD `steps` from a random start, so that PGD's accuracy is the lower one on most networks, and the
    one to quote; where it is far below FGSM's, gradients are masked or FGSM oversteps. Neither is a bound: a stronger
    attack may find more. images: batches uint8 (B, S, S, 3), read once; what is attacked stays in float, in [0, 1].
    Evaluation mode; modes, gradients, `requires_grad` and the global random numbers are as before afterwards.
    Raises InputError for a radius outside 0 to 1 or no steps.
    """
    if not all(0 <= epsilon <= 1 for epsilon in epsilons) or steps < 1:
        raise InputError(f"radii {tuple(epsilons)}, {steps} steps: expected radii from 0 to 1 and at least one step")
    tally = Tally()
    for first, batch, truth in numbered(images, labels):
        with pixel_logits(model, preprocessing) as logits_of:
            pixels = as_pixels(batch, model)
            classes = torch.as_tensor(truth, dtype=torch.long, device=pixels.device)
            start = random_start(pixels, seed, first)
            _count(tally, None, logits_of, pixels, truth)
            for epsilon in epsilons:
                _count(tally, ("fgsm", epsilon), logits_of, fgsm(logits_of, pixels, classes, epsilon), truth)
                attacked = pgd(logits_of, pixels, classes, epsilon, steps=steps, start=start)
                _count(tally, ("pgd", epsilon), logits_of, attacked, truth)
    return AdversarialRobustness(
        images=tally.images(None),
        epsilons=tuple(epsilons),
        steps=steps,
        clean=tally.accuracy(None),
        fgsm=tuple(tally.accuracy(("fgsm", epsilon)) for epsilon in epsilons),
        pgd=tuple(tally.accuracy(("pgd", epsilon)) for epsilon in epsilons),
    )


def fgsm(logits_of: PixelLogits, pixels: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """`clip(x + ε·sign ∇ₓ CE(f(x), y), 0, 1)` of pixels (B, 3, S, S) in [0, 1] and labels (B,)."""
    return _project(pixels + epsilon * _loss_gradient(logits_of, pixels, labels).sign(), pixels, epsilon)


def pgd(
    logits_of: PixelLogits,
    pixels: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    steps: int = PGD_STEPS,
    step_size: float | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Steps `α·sign ∇ₓ CE`, each projected into the ball of radius ε around x and into [0, 1].

    start: in [−1, 1] of ε, like `random_start`'s; without it the first step is from x itself. step_size: α, 2.5·ε/steps
    by default, which reaches any corner of the ball from any place in it.
    """
    alpha = 2.5 * epsilon / steps if step_size is None else step_size
    attacked = pixels if start is None else _project(pixels + epsilon * start, pixels, epsilon)
    for _ in range(steps):
        step = alpha * _loss_gradient(logits_of, attacked, labels).sign()
        attacked = _project(attacked + step, pixels, epsilon)
    return attacked


def random_start(pixels: Tensor, seed: int, first: int = 0) -> Tensor:
    """Uniform in [−1, 1], shaped as pixels; image i of all has its own numbers, whatever the batches and the device."""
    shape = tuple(pixels.shape[1:])
    values = [np.random.default_rng((seed, first + number)).uniform(-1, 1, shape) for number in range(len(pixels))]
    return torch.as_tensor(np.stack(values)).to(pixels)


def _project(attacked: Tensor, pixels: Tensor, epsilon: float) -> Tensor:
    return torch.minimum(torch.maximum(attacked, pixels - epsilon), pixels + epsilon).clamp(0, 1)


def _loss_gradient(logits_of: PixelLogits, pixels: Tensor, labels: Tensor) -> Tensor:
    """Of the sum, not the mean: an image's gradient does not depend on the size of its batch."""
    inputs = pixels.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = F.cross_entropy(logits_of(inputs), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, inputs)
    return gradient


def _count(tally: Tally, condition: Hashable, logits_of: PixelLogits, pixels: Tensor, truth: Labels) -> None:
    with torch.no_grad():
        tally.add(condition, logits_of(pixels).float().cpu().numpy(), truth)


def measure_adversarial(measured: Measured) -> AdversarialRobustness:
    source = measured.source
    return adversarial_robustness(
        source.model, measured.batches(), measured.images.labels, source.preprocessing, seed=measured.options.seed
    )


def draw_adversarial(results: Results) -> "Figure":
    records: Mapping[str, AdversarialRobustness] = results
    figure, (axes,) = panels(1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        radii = [0.0, *(255 * epsilon for epsilon in record.epsilons)]
        for name, values, line in (("FGSM", record.fgsm, ":"), ("PGD", record.pgd, "-")):
            points = [100 * record.clean, *(100 * value for value in values)]
            axes.plot(radii, points, label=f"{network}, {name}", markersize=4, **{**style, "linestyle": line})
    axes.set(xlabel="largest change of a pixel, ε (of 255)", ylabel=ACCURACY)
    axes.legend(fontsize="small")
    return figure


def _attack_line(found: AdversarialRobustness) -> str:
    radius = f"ε = {255 * found.epsilons[-1]:.3g}/255"
    return f"{percent(found.clean)}; {radius}: FGSM {percent(found.fgsm[-1])}, PGD {percent(found.pgd[-1])}"


ADVERSARIAL_METRIC = Metric(
    title="Adversarial images",
    reading="Accuracy when each value of an image moves by at most ε against the network. Quote PGD; neither is a "
    "bound.",
    record=AdversarialRobustness,
    line=_attack_line,
    measure=measure_adversarial,
    labels=True,
    options=("seed",),
    default=False,
    figure=draw_adversarial,
)
