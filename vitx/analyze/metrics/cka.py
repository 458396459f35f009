"""Centred kernel alignment: how alike two layers represent the same images, whatever their widths (docs/maths.md §5.1).

Kornblith et al. (arXiv 1905.00414); over mini-batches with the unbiased HSIC₁ of Song et al. (Journal of Machine
Learning Research 13, 2012), after Nguyen et al. (arXiv 2010.15327, eq. 3): the expected value does not depend on the
batch size. Shape letters: B batch, L and M layers of one network and of another, P, Q features of an image.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitx.analyze.activations import stream_activations, stream_order
from vitx.analyze.intervals import FEWEST, resampled_means
from vitx.analyze.metric import AnalysisOptions, Metric, MetricContext, NotApplicable
from vitx.analyze.metric_figures import draw_matrices
from vitx.analyze.similarity_matrix import SimilarityMatrix, matrix_line
from vitx.core.console import progress
from vitx.core.errors import InputError
from vitx.data.image_set import ImageSet
from vitx.models.source import Source

# HSIC₁ divides by n − 3.
SMALLEST_BATCH = 4
# Of a layer that is the same for all images, centring leaves what rounding made: up to this many roundings of its mean.
ROUNDINGS = 64
# HSIC₁ of a layer with itself over its squared kernel is 0 of images equally far from each other, but for rounding.
EQUALLY_FAR = 1e-10


def linear_cka(x_BP: Tensor, y_BQ: Tensor, *, unbiased: bool = True) -> Tensor:
    """HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) of two representations of the same B images, K = XXᵀ, L = YYᵀ; a scalar.

    1: the same up to rotation and scale; nan where a side is the same for all images. `unbiased` uses HSIC₁, which
    leaves out the diagonals and may be negative, and is nan too where a side has all images equally far from each
    other; without it HSIC₀ of centred kernels. Raises InputError for another number of images, or fewer than 4 with
    `unbiased`.
    """
    if unbiased:
        cka = MinibatchCKA()
        cka.add([x_BP], [y_BQ])
        return cka.result()[0, 0]
    _require_same_images([x_BP, y_BQ])
    grams = torch.stack([_gram(x_BP), _gram(y_BQ)])
    hsic = torch.einsum("lij,mij->lm", grams, grams)
    return _alignment(hsic, hsic.diagonal(), hsic.diagonal())[0, 1]


def grams_of(features: Sequence[Tensor]) -> Tensor:
    """x·xᵀ of each layer's features (B, …), flattened, without the diagonal: (L, B, B), float64.

    Raises InputError for fewer than 4 images.
    """
    if len(features[0]) < SMALLEST_BATCH:
        raise InputError(f"CKA of {len(features[0])} images: the unbiased estimator needs {SMALLEST_BATCH} or more")
    grams = torch.stack([_gram(layer) for layer in features])
    grams.diagonal(dim1=-2, dim2=-1).zero_()
    return grams


def hsic_1(k_LBB: Tensor, l_MBB: Tensor) -> Tensor:
    """The unbiased HSIC₁ of every pair of kernels with zero diagonals: (L, M).

    [tr(KL) + (1ᵀK1)(1ᵀL1)/((n−1)(n−2)) − 2/(n−2)·1ᵀKL1] / (n(n−3)) (Nguyen et al., eq. 3).
    """
    n = k_LBB.shape[-1]
    rows_k, rows_l = k_LBB.sum(dim=2), l_MBB.sum(dim=2)
    trace = k_LBB.flatten(1) @ l_MBB.flatten(1).T
    totals = torch.outer(rows_k.sum(dim=-1), rows_l.sum(dim=-1))
    return (trace + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows_k @ rows_l.T) / (n * (n - 3))


class MinibatchCKA:
    """CKA between all layers of one network, or of two, one batch at a time: sums of w·HSIC₁ over batches.

    Σ w·HSIC₁(K, L) / √(Σ w·HSIC₁(K, K) · Σ w·HSIC₁(L, L)), w = n(n−3) of a batch of n images: HSIC₁ is a mean over
    pairs of images, and the smaller last batch counts by how many it has. For batches of one size this is eq. 2 of
    Nguyen et al. (arXiv 2010.15327), who have no others.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, first: Sequence[Tensor], second: Sequence[Tensor] | None = None) -> None:
        """Add a batch of at least 4 images: each layer's features (B, …); `second`: another network's on the same.

        Raises InputError for fewer images, and for features of different numbers of images.
        """
        _require_same_images([*first, *(second or ())])
        k = grams_of(first)
        l = k if second is None else grams_of(second)  # noqa: E741 - the letters of the literature
        weight = len(first[0]) * (len(first[0]) - 3)
        self._batches.append((weight * hsic_1(k, l), weight * _own(k), weight * _own(l)))

    def result(self) -> Tensor:
        """(L, M), float64; nan where a layer is the same for all images, or has all equally far from each other."""
        if not self._batches:
            raise InputError(f"CKA saw no batch of {SMALLEST_BATCH} images or more: give more images")
        cross, own_k, own_l = (torch.stack(parts).sum(dim=0) for parts in zip(*self._batches, strict=True))
        return _alignment(cross, own_k, own_l)

    @property
    def batches(self) -> int:
        return len(self._batches)

    def widest(self) -> float | None:
        """Half the width of the widest bootstrap interval of an entry, over batches; None for fewer than ten."""
        if len(self._batches) < FEWEST:
            return None
        comparable = self.result().isfinite()
        if not comparable.any():
            return None
        parts = (torch.stack(parts).cpu().numpy() for parts in zip(*self._batches, strict=True))
        resampled = _alignment(*(torch.from_numpy(resampled_means(part)) for part in parts))
        low, high = np.nanquantile(resampled[:, comparable.cpu()].numpy(), (0.025, 0.975), axis=0)
        return float(np.max(high - low)) / 2


def _alignment(cross_LM: Tensor, own_L: Tensor, own_M: Tensor) -> Tensor:
    """HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) over the last two axes; nan where a layer has none with itself."""
    first, second = own_L.unsqueeze(-1), own_M.unsqueeze(-2)
    return torch.where((first > 0) & (second > 0), cross_LM / (first * second).sqrt(), math.nan)


def _own(grams_LBB: Tensor) -> Tensor:
    """HSIC₁ of each layer with itself: (L,); 0 where only rounding keeps it from 0."""
    own = torch.stack([hsic_1(gram[None], gram[None])[0, 0] for gram in grams_LBB])
    return torch.where(own > EQUALLY_FAR * grams_LBB.square().mean(dim=(1, 2)), own, 0.0)


def _require_same_images(features: Sequence[Tensor]) -> None:
    counts = [*dict.fromkeys(map(len, features))]
    if len(counts) > 1:
        raise InputError(f"CKA of {' and '.join(map(str, counts))} images: all layers must be of the same images")


def _gram(features: Tensor) -> Tensor:
    """XXᵀ of the centred, flattened features: (B, B), float64; 0 where they are the same for all images."""
    flat = features.flatten(1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    # Centring changes K only by what HSIC subtracts anyway; done first, float32 does not spend its digits on the mean.
    mean = flat.mean(dim=0)
    centred = flat - mean
    gram = (centred @ centred.T).double()
    rounding = ROUNDINGS * torch.finfo(flat.dtype).eps * torch.linalg.vector_norm(mean).double()
    return torch.where(gram.trace() > len(flat) * rounding.square(), gram, 0.0)


def measure_cka(context: MetricContext) -> SimilarityMatrix:
    source, images, options, quiet, name = context
    return cka_of_networks([source], images, options, name, quiet=quiet)


def cka_of_networks(
    sources: Sequence[Source], images: ImageSet, options: AnalysisOptions, title: str, *, quiet: bool
) -> SimilarityMatrix:
    """CKA between the outputs (B, …) of all units of one network, or of two; no unit, at most 1 (docs/maths.md §5.1).

    A pass of its own, in an order drawn from the seed: between images of one or two classes, which a batch holds where
    images are listed by class, layers are alike in another degree. Batches of fewer than 4 images are left out: HSIC₁
    is not defined for them.
    """
    orders = [stream_order(source.model) for source in sources]
    if min(map(len, orders)) < 2:
        raise NotApplicable("the network has no residual units whose outputs can be read")
    shuffled, cka = images.shuffled(options.seed), MinibatchCKA()
    passes = [
        stream_activations(source.model, shuffled, source.preprocessing, batch_size=options.batch_size, maps=False)
        for source in sources
    ]
    with progress(title, len(images), quiet=quiet) as bar:
        done = 0
        for batches in zip(*passes, strict=True):
            if batches[0].images >= SMALLEST_BATCH:
                cka.add(*([each.streams[unit] for unit in order] for each, order in zip(batches, orders, strict=True)))
            bar.update(done := done + batches[0].images)
    if not cka.batches:
        raise NotApplicable(f"no batch of {SMALLEST_BATCH} images or more")
    return cka_matrix(cka, orders[0], orders[-1])


def cka_matrix(cka: MinibatchCKA, layers: Sequence[str], columns: Sequence[str]) -> SimilarityMatrix:
    matrix = tuple(tuple(_number(value) for value in row) for row in cka.result().tolist())
    return SimilarityMatrix(layers=tuple(layers), columns=tuple(columns), matrix=matrix, widest=cka.widest())


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


CKA_METRIC = Metric(
    title="CKA between units",
    reading="Whether two layers tell images apart in the same way (1), whatever their widths and rotations.",
    precision="bootstrap over batches; entries share the widest",
    record=SimilarityMatrix,
    line=matrix_line,
    measure=measure_cka,
    options=("seed",),
    figure=draw_matrices,
)
