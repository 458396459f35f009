"""Accuracy when patches are painted over (PatchDrop of Naseer et al., arXiv 2105.10497, §3.1)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vitx.analyze.accuracy import Labels, Predict, Tally, numbered
from vitx.analyze.figures import ACCURACY
from vitx.analyze.metric import Measured, Metric, percent
from vitx.analyze.predictor import as_pixels, pixel_logits, predictor
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import Results, panels
from vitx.core.preprocess import Preprocessing, UInt8Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# uint8 (B, S, S, 3), patch size P → how much each patch matters, (B, (S/P)²), patches row by row.
Saliency = Callable[[UInt8Array, int], npt.NDArray[np.floating]]


class Occlusion(Record):
    """`random[i]`, … is the accuracy with the share `ratios[i]` of the patches painted over; `clean` with none.

    `random` drops patches by chance, `most_salient` the ones that matter most first, `least_salient` last; the latter
    two are None where saliency was not given.
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
    """Classify every image with a share of its patches painted in the mean colour, which normalisation maps to 0.

    The smaller share contains no patch that the larger lacks. A network that keeps its accuracy while random patches
    vanish relies on no single part; one that falls fast when the most salient vanish, and slowly when the least salient
    do, looks at the object. images: batches uint8 (B, S, S, 3), read once; mean: `Preprocessing.mean`, 0 to 1.
    saliency: `gradient_saliency(model, preprocessing)`. Raises InputError when patches do not tile the image, or for
    ratios outside 0 to 1.
    """
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise InputError(f"ratios {tuple(ratios)}: expected shares of the patches, 0 to 1")
    colour = np.rint(np.array(mean) * 255).astype(np.uint8)
    tally = Tally()
    for first, pixels, truth in numbered(images, labels):
        _require_tiles(pixels.shape[1], patch_size)
        tally.add(None, predict(pixels), truth)
        for order, ranking in _rankings(pixels, patch_size, saliency, seed, first).items():
            for ratio in ratios:
                dropped = drop_patches(pixels, ranking[:, : round(ratio * ranking.shape[1])], patch_size, colour)
                tally.add((order, ratio), predict(dropped), truth)

    def curve(order: str) -> tuple[float, ...]:
        return tuple(tally.accuracy((order, ratio)) for ratio in ratios)

    return Occlusion(
        images=tally.images(None),
        patch_size=patch_size,
        ratios=tuple(ratios),
        clean=tally.accuracy(None),
        random=curve("random"),
        most_salient=curve("most_salient") if saliency is not None else None,
        least_salient=curve("least_salient") if saliency is not None else None,
    )


def drop_patches(
    images: UInt8Array, patches: npt.NDArray[np.integer], patch_size: int, colour: UInt8Array
) -> UInt8Array:
    """Paint `patches` (B, M), numbers row by row, of images (B, S, S, 3) in `colour` (3,)."""
    count, side = images.shape[:2]
    grid = side // patch_size
    dropped = np.zeros((count, grid * grid), dtype=np.bool_)
    np.put_along_axis(dropped, patches, True, axis=1)
    pixels = dropped.reshape(count, grid, grid).repeat(patch_size, axis=1).repeat(patch_size, axis=2)
    return np.where(pixels[..., None], colour, images)


def gradient_saliency(model: nn.Module, preprocessing: Preprocessing) -> Saliency:
    """Saliency of any network: ‖∂z/∂x ⊙ x‖₂ over each patch, z the logit of the predicted class, x normalised.

    Since x = 0 is the mean colour, it is the first-order effect of painting the patch, value by value. The paper ranks
    patches by the attention of DINO, a second network; this ranks them by the network that is measured, and needs no
    attention. Evaluation mode; modes, gradients and `requires_grad` are restored.
    """

    def saliency(images: UInt8Array, patch_size: int) -> npt.NDArray[np.floating]:
        _require_tiles(images.shape[1], patch_size)
        with pixel_logits(model, preprocessing) as logits_of:
            pixels = as_pixels(images, model).requires_grad_(True)
            (gradient,) = torch.autograd.grad(logits_of(pixels).amax(dim=1).sum(), pixels)
            mean = pixels.new_tensor(preprocessing.mean).view(1, 3, 1, 1)
            effect = (gradient * (pixels.detach() - mean)).square().sum(dim=1, keepdim=True)
            power = torch.nn.functional.avg_pool2d(effect, patch_size)
        return (power.sqrt() * patch_size).flatten(1).float().cpu().numpy()

    return saliency


def default_patch_size(model: nn.Module, image_size: int) -> int:
    """The network's own patches where at most 16 a side tile the image, else a fourteenth, eighth, … of its side."""
    own = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    own = own[0] if isinstance(own, tuple) else own
    if isinstance(own, int) and image_size % own == 0 and image_size // own <= 16:
        return own
    return next((image_size // grid for grid in (14, 8, 7, 4) if image_size % grid == 0), image_size)


def _rankings(
    images: UInt8Array, patch_size: int, saliency: Saliency | None, seed: int, first: int
) -> dict[str, npt.NDArray[np.integer]]:
    """By order: patches (B, n), those dropped first in front."""
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


def measure_occlusion(measured: Measured) -> Occlusion:
    source = measured.source
    return occlusion(
        predictor(source.model, source.preprocessing),
        measured.batches(),
        measured.images.labels,
        patch_size=default_patch_size(source.model, source.preprocessing.image_size),
        mean=source.preprocessing.mean,
        saliency=gradient_saliency(source.model, source.preprocessing),
        seed=measured.options.seed,
    )


def draw_occlusion(results: Results) -> "Figure":
    records: Mapping[str, Occlusion] = results
    figure, axes_of = panels(len(records))
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        shares = [0.0, *(100 * ratio for ratio in record.ratios)]
        curves = {"random": record.random, "most salient": record.most_salient, "least salient": record.least_salient}
        for (name, values), mark in zip(curves.items(), ("o-k", "v--k", "^:k"), strict=True):
            if values is not None:
                points = [100 * record.clean, *(100 * value for value in values)]
                axes.plot(shares, points, mark, markersize=4, linewidth=1.2, label=name)
        axes.set(title=network, xlabel="patches painted over (%)", ylabel=ACCURACY)
        axes.legend(fontsize="small")
    return figure


def _occlusion_line(found: Occlusion) -> str:
    half = min(range(len(found.ratios)), key=lambda index: abs(found.ratios[index] - 0.5))
    parts = {"random": found.random, "most salient": found.most_salient, "least salient": found.least_salient}
    named = (f"{name} {percent(values[half])}" for name, values in parts.items() if values is not None)
    return f"{percent(found.clean)}; without {found.ratios[half]:.0%} of the patches: {', '.join(named)}"


OCCLUSION_METRIC = Metric(
    title="Occlusion",
    reading="Accuracy while patches are painted over: random, most salient or least salient ones first.",
    record=Occlusion,
    line=_occlusion_line,
    measure=measure_occlusion,
    labels=True,
    options=("seed",),
    default=False,
    figure=draw_occlusion,
)
