"""Accuracy when patches are painted over (PatchDrop of Naseer et al., arXiv 2105.10497, §3.1; docs/maths.md §5.3)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vitx.analyze.accuracy import AccuracyCounter, Labels, Predict, labelled_batches
from vitx.analyze.intervals import share_text
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import ACCURACY, Curve, draw_curve
from vitx.analyze.predictor import as_pixels, pixel_logits, predictor
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, Results, panels
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.models.similarity import at_least_float32

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Images uint8 (B, S, S, 3), patch size P → the saliency of each patch, (B, (S/P)²), patches row by row.
Saliency = Callable[[UInt8Array, int], npt.NDArray[np.floating]]


class Occlusion(Record):
    """Accuracies, 0 to 1: `random[i]`, … with the share `ratios[i]` of the patches painted over, `clean` with none.

    `random` paints over random patches, `most_salient` those of largest saliency first, `least_salient` those of
    smallest first; the latter two are None without a saliency. `patch_size` is in pixels.
    """

    images: int
    patch_size: int
    ratios: tuple[float, ...]
    clean: float
    random: tuple[float, ...]
    most_salient: tuple[float, ...] | None
    least_salient: tuple[float, ...] | None


def occlusion(
    predict: Predict,
    images: Iterable[UInt8Array],
    labels: Labels,
    *,
    patch_size: int,
    mean: tuple[float, float, float],
    saliency: Saliency | None = None,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
) -> Occlusion:
    """Top-1 accuracy with a share of the patches painted in the mean colour, which normalisation maps to 0.

    The patches of a smaller share are among those of a larger one. A network that keeps its accuracy without random
    patches relies on no single part; one that loses it fast without the most salient patches, and slowly without the
    least salient, looks at the object. images: batches uint8 (B, S, S, 3), read once; labels (N,); mean:
    `Preprocessing.mean`, 0 to 1. saliency: `gradient_saliency(model, preprocessing)`. Raises InputError when patches do
    not tile the image, or for ratios outside 0 to 1.
    """
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise InputError(f"ratios {tuple(ratios)}: expected shares of the patches, 0 to 1")
    colour = np.rint(np.array(mean) * 255).astype(np.uint8)
    counter = AccuracyCounter()
    for first, pixels, truth in labelled_batches(images, labels):
        _require_tiles(pixels.shape[1], patch_size)
        counter.add(None, predict(pixels), truth)
        for order, ranking in _rankings(pixels, patch_size, saliency, seed, first).items():
            for ratio in ratios:
                dropped = drop_patches(pixels, ranking[:, : round(ratio * ranking.shape[1])], patch_size, colour)
                counter.add((order, ratio), predict(dropped), truth)

    def curve(order: str) -> tuple[float, ...]:
        return tuple(counter.accuracy((order, ratio)) for ratio in ratios)

    return Occlusion(
        images=counter.images(None),
        patch_size=patch_size,
        ratios=tuple(ratios),
        clean=counter.accuracy(None),
        random=curve("random"),
        most_salient=curve("most_salient") if saliency is not None else None,
        least_salient=curve("least_salient") if saliency is not None else None,
    )


def drop_patches(
    images: UInt8Array, patches: npt.NDArray[np.integer], patch_size: int, colour: UInt8Array
) -> UInt8Array:
    """Paint `patches` (B, M), indices counted row by row, of images uint8 (B, S, S, 3) in `colour` (3,)."""
    count, side = images.shape[:2]
    grid = side // patch_size
    dropped = np.zeros((count, grid * grid), dtype=np.bool_)
    np.put_along_axis(dropped, patches, True, axis=1)
    pixels = dropped.reshape(count, grid, grid).repeat(patch_size, axis=1).repeat(patch_size, axis=2)
    return np.where(pixels[..., None], colour, images)


def gradient_saliency(model: nn.Module, preprocessing: Preprocessing) -> Saliency:
    """Saliency of any network: ‖∂z/∂x ⊙ x‖₂ over each patch, z the logit of the predicted class, x normalised.

    x = 0 is the mean colour, so ∂z/∂x ⊙ x is the first-order effect of painting each value. The paper ranks patches by
    the attention of DINO, a second network; this ranks them by the measured network, which needs no attention.
    Evaluation mode; modes, gradients and `requires_grad` are restored.
    """

    def saliency(images: UInt8Array, patch_size: int) -> npt.NDArray[np.floating]:
        _require_tiles(images.shape[1], patch_size)
        with pixel_logits(model, preprocessing) as logits_of:
            pixels = as_pixels(images, model).requires_grad_(True)
            (gradient,) = torch.autograd.grad(logits_of(pixels).amax(dim=1).sum(), pixels)
            # In pixels: dividing by std in x and multiplying by it in the gradient cancel.
            mean = pixels.new_tensor(preprocessing.mean).view(1, 3, 1, 1)
            # In float16 the square of what is below 1/5800 is 0.
            effect = at_least_float32(gradient) * (pixels.detach() - mean)
            power = torch.nn.functional.avg_pool2d(effect.square().sum(dim=1), patch_size)
        return (power.sqrt() * patch_size).flatten(1).float().cpu().numpy()

    return saliency


def default_patch_size(model: nn.Module, image_size: int) -> int:
    """The network's own patch size if 16 × 16 patches or fewer tile the image, else 1/14, 1/8, 1/7 or 1/4 of it."""
    own = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    own = own[0] if isinstance(own, tuple) else own
    if isinstance(own, int) and image_size % own == 0 and image_size <= 16 * own:
        return own
    return next((image_size // grid for grid in (14, 8, 7, 4) if image_size % grid == 0), image_size)


def _rankings(
    images: UInt8Array, patch_size: int, saliency: Saliency | None, seed: int, first: int
) -> dict[str, npt.NDArray[np.integer]]:
    """The indices of the patches, (B, n), in the order of painting; by the name of the order."""
    patches = (images.shape[1] // patch_size) ** 2
    random = [np.random.default_rng((seed, first + number)).permutation(patches) for number in range(len(images))]
    rankings: dict[str, npt.NDArray[np.integer]] = {"random": np.stack(random)}
    if saliency is not None:
        ascending = np.argsort(saliency(images, patch_size), axis=1, kind="stable")
        rankings |= {"most_salient": ascending[:, ::-1], "least_salient": ascending}
    return rankings


def _require_tiles(side: int, patch_size: int) -> None:
    if patch_size < 1 or side % patch_size:
        raise InputError(f"patches of {patch_size} pixels do not tile an image of {side}: expected a divisor of {side}")


def measure_occlusion(context: MetricContext) -> Occlusion:
    source = context.source
    return occlusion(
        predictor(source.model, source.preprocessing),
        context.batches(),
        context.images.labels,
        patch_size=default_patch_size(source.model, source.preprocessing.image_size),
        mean=source.preprocessing.mean,
        saliency=gradient_saliency(source.model, source.preprocessing),
        seed=context.options.seed,
    )


def draw_occlusion(results: Results) -> "Figure":
    records: Mapping[str, Occlusion] = results
    figure, axes_of = panels(len(records))
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        shares = [0.0, *(100 * ratio for ratio in record.ratios)]
        curves = {"random": record.random, "most salient": record.most_salient, "least salient": record.least_salient}
        for (name, values), style in zip(curves.items(), LINES, strict=True):
            if values is not None:
                draw_curve(axes, shares, Curve.of_shares([record.clean, *values], record.images), name, style)
        axes.set(title=network, xlabel="patches painted over (%)", ylabel=ACCURACY)
        axes.legend(fontsize="small")
    return figure


def _occlusion_line(found: Occlusion) -> str:
    half = min(range(len(found.ratios)), key=lambda index: abs(found.ratios[index] - 0.5))
    parts = {"random": found.random, "most salient": found.most_salient, "least salient": found.least_salient}
    named = (f"{name} {share_text(values[half], found.images)}" for name, values in parts.items() if values is not None)
    return (
        f"{share_text(found.clean, found.images)}; without {found.ratios[half]:.0%} of the patches: {', '.join(named)}"
    )


OCCLUSION_METRIC = Metric(
    title="Occlusion",
    reading="Accuracy while patches are painted over: random, most salient or least salient ones first.",
    claim="Naseer et al. (2105.10497): vision transformers keep their accuracy without many of the patches.",
    precision="Wilson's",
    record=Occlusion,
    line=_occlusion_line,
    measure=measure_occlusion,
    labels=True,
    options=("seed",),
    default=False,
    figure=draw_occlusion,
)
