"""Accuracy under attack in L∞: FGSM (Goodfellow et al.) and PGD (Madry et al.), docs/maths.md §5.3.

Shape letters: B batch, S side of an image, C classes.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.analyze.accuracy import AccuracyCounter, Labels, labelled_batches
from vitx.analyze.intervals import share_text
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import ACCURACY, Curve, draw_curve
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
    """Accuracies, 0 to 1, under attacks of radius `epsilons[i]` on pixels of 0 to 1; `clean` without an attack."""

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
    """Top-1 accuracy when each value of an image moves by at most ε along the network's own gradients.

    FGSM (Goodfellow et al., arXiv 1412.6572, §4) is one step, PGD (Madry et al., arXiv 1706.06083, §2.1) `steps` steps
    from a random start; formulas in docs/maths.md §5.3. PGD's accuracy is the lower one on most networks, and the one
    to quote; if it is far below FGSM's, gradients are masked or FGSM oversteps. Neither is a bound: a stronger attack
    may find more. images: batches uint8 (B, S, S, 3), read once; labels (N,). Attacked images stay float, in [0, 1].
    Evaluation mode; modes, gradients, `requires_grad` and the global random numbers are as before afterwards. Raises
    InputError for a radius outside 0 to 1 or no steps.
    """
    if not all(0 <= epsilon <= 1 for epsilon in epsilons) or steps < 1:
        raise InputError(f"radii {tuple(epsilons)}, {steps} steps: expected radii from 0 to 1 and at least one step")
    counter = AccuracyCounter()
    for first, batch, truth in labelled_batches(images, labels):
        with pixel_logits(model, preprocessing) as logits_of:
            pixels = as_pixels(batch, model)
            classes = torch.as_tensor(truth, dtype=torch.long, device=pixels.device)
            start = random_start(pixels, seed, first)
            _count(counter, None, logits_of, pixels, truth)
            for epsilon in epsilons:
                _count(counter, ("fgsm", epsilon), logits_of, fgsm(logits_of, pixels, classes, epsilon), truth)
                attacked = pgd(logits_of, pixels, classes, epsilon, steps=steps, start=start)
                _count(counter, ("pgd", epsilon), logits_of, attacked, truth)
    return AdversarialRobustness(
        images=counter.images(None),
        epsilons=tuple(epsilons),
        steps=steps,
        clean=counter.accuracy(None),
        fgsm=tuple(counter.accuracy(("fgsm", epsilon)) for epsilon in epsilons),
        pgd=tuple(counter.accuracy(("pgd", epsilon)) for epsilon in epsilons),
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
    start: Tensor | None = None,
) -> Tensor:
    """Steps `α·sign ∇ₓ CE` of pixels (B, 3, S, S), each projected into the ball of radius ε around x and into [0, 1].

    start: in units of ε, like `random_start`'s; without it the first step is from x itself.
    """
    alpha = 2.5 * epsilon / steps  # so that any corner of the ball can be reached from anywhere in it
    attacked = pixels if start is None else _project(pixels + epsilon * start, pixels, epsilon)
    for _ in range(steps):
        step = alpha * _loss_gradient(logits_of, attacked, labels).sign()
        attacked = _project(attacked + step, pixels, epsilon)
    return attacked


def random_start(pixels: Tensor, seed: int, first: int = 0) -> Tensor:
    """Uniform in [−1, 1], shaped as pixels (B, 3, S, S) whose first image has the index `first` among all.

    An image's numbers depend on its index and the seed, not on batches or device.
    """
    shape = tuple(pixels.shape[1:])
    values = [np.random.default_rng((seed, first + index)).uniform(-1, 1, shape) for index in range(len(pixels))]
    return torch.as_tensor(np.stack(values)).to(pixels)


def _project(attacked: Tensor, pixels: Tensor, epsilon: float) -> Tensor:
    return torch.minimum(torch.maximum(attacked, pixels - epsilon), pixels + epsilon).clamp(0, 1)


def _loss_gradient(logits_of: PixelLogits, pixels: Tensor, labels: Tensor) -> Tensor:
    """∂CE/∂pixels of the summed loss: with the mean, an image's gradient would depend on the size of its batch."""
    inputs = pixels.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = F.cross_entropy(logits_of(inputs), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, inputs)
    return gradient


def _count(
    counter: AccuracyCounter, condition: Hashable, logits_of: PixelLogits, pixels: Tensor, truth: Labels
) -> None:
    with torch.no_grad():
        counter.add(condition, logits_of(pixels).float().cpu().numpy(), truth)


def measure_adversarial(context: MetricContext) -> AdversarialRobustness:
    source = context.source
    return adversarial_robustness(
        source.model, context.batches(), context.images.labels, source.preprocessing, seed=context.options.seed
    )


def draw_adversarial(results: Results) -> "Figure":
    records: Mapping[str, AdversarialRobustness] = results
    figure, (axes,) = panels(1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        radii = [0.0, *(255 * epsilon for epsilon in record.epsilons)]
        for name, values, line in (("FGSM", record.fgsm, ":"), ("PGD", record.pgd, "-")):
            curve = Curve.of_shares([record.clean, *values], record.images)
            draw_curve(axes, radii, curve, f"{network}, {name}", {**style, "linestyle": line})
    axes.set(xlabel="largest change of a pixel, ε (of 255)", ylabel=ACCURACY)
    axes.legend(fontsize="small")
    return figure


def _attack_line(found: AdversarialRobustness) -> str:
    radius = f"ε = {255 * found.epsilons[-1]:.3g}/255"
    clean, fgsm, pgd = (share_text(share, found.images) for share in (found.clean, found.fgsm[-1], found.pgd[-1]))
    return f"{clean}; {radius}: FGSM {fgsm}, PGD {pgd}"


ADVERSARIAL_METRIC = Metric(
    title="Adversarial images",
    reading="Accuracy when each value of an image moves by at most ε along the network's gradients. Quote PGD; neither "
    "is a bound.",
    precision="Wilson's, of the images; not of the attack, which may not find the worst change",
    record=AdversarialRobustness,
    line=_attack_line,
    measure=measure_adversarial,
    labels=True,
    options=("seed",),
    default=False,
    figure=draw_adversarial,
)
