"""CKA: reference numbers, the U-statistic written out, and what it must not depend on."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.resnet import BasicBlock
from torch import Tensor, nn

from reference import seq
from run_fixture import ColourMean, digits_source, trained_deepvit
from vitx.analyze import AnalysisOptions, analyze, compare_representations
from vitx.analyze.activations import stream_activations
from vitx.analyze.images import open_analysis_images
from vitx.analyze.intervals import resampled_means
from vitx.analyze.metric import MetricContext, NotApplicable
from vitx.analyze.metrics.cka import (
    MinibatchCKA,
    cka_matrix,
    cka_of_networks,
    grams_of,
    hsic_1,
    linear_cka,
    measure_cka,
)
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.errors import InputError
from vitx.data.image_set import ImageSet
from vitx.models.source import Source

X, Y = seq(0, 6, 5), seq(1.3, 6, 4).square()


def test_reference_numbers() -> None:
    assert linear_cka(X, Y).item() == pytest.approx(-0.408332, abs=1e-6)
    assert linear_cka(X, Y, unbiased=False).item() == pytest.approx(0.039170, abs=1e-6)


def u_statistic(k: Tensor, l: Tensor) -> float:  # noqa: E741 - the letters of the literature
    """HSIC as the mean over all quadruples of different images."""
    n = len(k)
    terms = [k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in permutations(range(n), 4)]
    return float(torch.stack(terms).mean())


def test_hsic_is_the_mean_over_quadruples() -> None:
    grams = grams_of([X, Y])
    expected = [[u_statistic(X @ X.T, X @ X.T), u_statistic(X @ X.T, Y @ Y.T)]]
    assert hsic_1(grams[:1], grams).tolist()[0] == pytest.approx(expected[0], rel=1e-9)


def test_rotation_scale_and_shift_change_nothing() -> None:
    rotation = torch.linalg.qr(seq(0.4, 5, 5))[0]
    assert linear_cka(X, 3 * X @ rotation + 7).item() == pytest.approx(1, abs=1e-9)
    centred = X - X.mean(dim=0)  # of so small a mean nothing is taken for its rounding
    assert linear_cka(centred, Y).item() == pytest.approx(linear_cka(X, Y).item(), abs=1e-9)


def test_float16_is_widened_before_its_products_overflow() -> None:
    assert linear_cka((1000 * X).half(), Y).item() == pytest.approx(linear_cka(X, Y).item(), abs=2e-3)


def test_float32_of_large_means_keeps_its_digits() -> None:
    shifted = (X + 1000).float()
    assert linear_cka(shifted, Y.float()).item() == pytest.approx(linear_cka(X, Y).item(), abs=2e-3)


@pytest.mark.parametrize("images", [5, 6, 7, 9, 10, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_is_the_same_for_all_images_is_like_none(images: int, dtype: torch.dtype) -> None:
    """Also where the mean of equal numbers is not the number, and centring leaves roundings."""
    same, other = (seq(k, 1, 64).expand(images, 64).to(dtype) for k in (0.3, 1.1))
    layer = seq(2.0, images, 32).to(dtype)
    for unbiased in (True, False):
        assert linear_cka(same, layer, unbiased=unbiased).isnan()
        assert linear_cka(1000 * same, other, unbiased=unbiased).isnan()
        assert linear_cka(layer, layer, unbiased=unbiased).item() == pytest.approx(1)
    assert linear_cka(same + 1e-3 * seq(0.9, images, 64).to(dtype), layer).isfinite()
    cka = MinibatchCKA()
    for _ in range(10):
        cka.add([layer, same])
    ((own, cross), (again, alone)) = cka_matrix(cka, "ab", "ab").matrix
    assert own == pytest.approx(1)
    assert (cross, again, alone) == (None, None, None)
    assert cka.widest() == pytest.approx(0, abs=1e-9)
    constant = MinibatchCKA()
    for _ in range(10):
        constant.add([same])
    assert constant.widest() is None


@pytest.mark.parametrize("images", [4, 5, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_has_all_images_equally_far_from_each_other_is_like_none(images: int, dtype: torch.dtype) -> None:
    """HSIC₁ of such a layer with itself is 0; what rounding leaves of it gave an alignment of 2.4."""
    layer, rotation = seq(2.0, images, 32).to(dtype), torch.linalg.qr(seq(0.4, 40, 40))[0]
    apart = (3 * torch.eye(images, 40, dtype=torch.float64) @ rotation + 1).to(dtype)
    one_other = torch.cat([seq(0.2, 1, 64).expand(images - 1, 64), seq(1.2, 1, 64)]).to(dtype)
    for equally_far in (apart, one_other):
        assert linear_cka(equally_far, layer).isnan()
        assert linear_cka(equally_far, equally_far).isnan()
        assert linear_cka(equally_far, equally_far, unbiased=False).item() == pytest.approx(1)
        moved = equally_far + 1e-2 * seq(0.9, *equally_far.shape).to(dtype)
        assert linear_cka(moved, moved).item() == pytest.approx(1)
        assert abs(linear_cka(moved, layer).item()) <= 1


def test_batches_add_up() -> None:
    layers = [seq(k, 24, 3, 2) for k in (0.0, 1.0, 2.5)]
    whole = MinibatchCKA()
    for start in (0, 8, 16):
        whole.add([layer[start : start + 8] for layer in layers])
    matrix = whole.result()
    sums = sum(hsic_1(grams, grams) for grams in (grams_of([x[s : s + 8] for x in layers]) for s in (0, 8, 16)))
    assert isinstance(sums, Tensor)
    expected = sums / (sums.diagonal()[:, None] * sums.diagonal()).sqrt()
    assert torch.allclose(matrix, expected)
    assert matrix.diagonal().tolist() == pytest.approx([1, 1, 1])


def test_a_small_last_batch_counts_by_its_pairs() -> None:
    """With the weight of a whole one a last batch of 4 images would widen the estimate of 164 images by 1.9."""

    def drawn(seed: int, *sizes: int) -> float:
        cka, generator = MinibatchCKA(), torch.Generator().manual_seed(seed)
        for size in sizes:
            x, noise = torch.randn(2, size, 64, generator=generator)
            cka.add([x, x + noise])
        return cka.result()[0, 1].item()

    spreads = [np.std([drawn(seed, *[16] * 10, *last) for seed in range(60)]) for last in ([], [4])]
    assert spreads[1] < 1.05 * spreads[0]


def test_two_networks() -> None:
    cka = MinibatchCKA()
    cka.add([X], [Y, X])
    assert cka.result().tolist()[0] == pytest.approx([-0.408332, 1], abs=1e-6)


def test_images_that_are_listed_by_class_give_what_all_of_them_give_at_once() -> None:
    """Batches of 16 as listed would hold one class or two, and entries would be up to 0.12 too large."""
    source, images = digits_source("trained", trained_deepvit()), open_analysis_images("digits", 200)
    by_class = images.subset(np.argsort(images.labels, kind="stable"))
    listed = analyze(source, by_class, ("cka",), AnalysisOptions(batch_size=16), quiet=True).results["cka"]
    assert isinstance(listed, SimilarityMatrix)
    (batch,) = stream_activations(source.model, images, source.preprocessing, batch_size=200, maps=False)
    grams = grams_of([batch.streams[name] for name in listed.layers])
    hsic = np.array([[u_statistic_by_rows(k, l) for l in grams] for k in grams])  # noqa: E741
    at_once = hsic / np.sqrt(np.outer(hsic.diagonal(), hsic.diagonal()))
    assert np.abs(np.array(listed.matrix, dtype=float) - at_once).max() < 0.05


def u_statistic_by_rows(k: Tensor, l: Tensor) -> float:  # noqa: E741 - the letters of the literature
    """HSIC as the product of the two kernels, each less its U-centred rows and columns (Székely & Rizzo 2014)."""
    n = len(k)

    def centred(gram: Tensor) -> Tensor:
        rows = gram.sum(dim=1, keepdim=True) / (n - 2)
        inner = gram - rows - rows.T + gram.sum() / ((n - 1) * (n - 2))
        return inner.fill_diagonal_(0)

    return float((centred(k) * centred(l)).sum()) / (n * (n - 3))


def test_units_are_compared_over_shuffled_batches_of_four_images_or_more() -> None:
    size: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 6, "depth": 1, "num_heads": 1}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **size)
    source, images = digits_source("small", model), open_analysis_images("digits", 23)
    names: Any = ("embedding", "blocks.0.attn", "blocks.0.mlp")
    by_hand = MinibatchCKA()
    passed = stream_activations(model, images.shuffled(3), source.preprocessing, batch_size=5, maps=False)
    for batch in [*passed][:-1]:
        by_hand.add([batch.streams[name] for name in names])

    def measured(batch_size: int) -> SimilarityMatrix:
        return measure_cka(MetricContext(source, images, AnalysisOptions(batch_size=batch_size, seed=3)))

    assert measured(5) == cka_matrix(by_hand, names, names)
    assert measured(4).matrix[0][0] == pytest.approx(1)
    with pytest.raises(NotApplicable, match=r"^no batch of 4 images or more$"):
        measured(3)
    colours = replace(source, model=ColourMean(10))
    for sources in ([colours], [source, colours], [colours, source]):
        with pytest.raises(NotApplicable, match=r"^the network has no residual units whose outputs can be read$"):
            cka_of_networks(sources, images, AnalysisOptions(), "CKA", quiet=True)


def test_a_network_of_one_unit_has_its_embedding_beside_it() -> None:
    class OneUnit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(3, 4, 8, 8), BasicBlock(4, 4), nn.Linear(4, 10)

        def forward(self, images: Tensor) -> Any:
            return self.head(self.block(self.stem(images)).mean(dim=(2, 3)))

    context = MetricContext(digits_source("one", OneUnit()), open_analysis_images("digits", 6), AnalysisOptions())
    found = measure_cka(context)
    assert found.layers == ("embedding", "block")
    assert found.matrix[0][1] is not None


def test_the_bar_is_of_all_images_and_the_order_one_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    @contextmanager
    def recorded(title: str, total: int, *, quiet: bool) -> Any:
        shown.append((title, total, quiet))
        yield SimpleNamespace(update=shown.append)

    monkeypatch.setattr("vitx.analyze.metrics.cka.progress", recorded)
    size: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 6, "depth": 1, "num_heads": 1}
    source = digits_source("small", timm.create_model("vit_tiny_patch16_224", num_classes=10, **size))
    images = open_analysis_images("digits", 23)

    def measured(seed: int) -> Any:
        options = AnalysisOptions(batch_size=5, seed=seed)
        return analyze(source, images, ("cka",), options, cache=tmp_path, quiet=True).results["cka"]

    first = measured(3)
    assert shown == [("cka", 23, True), 5, 10, 15, 20, 23]
    assert measured(4) != first
    assert measured(3) == first
    assert shown[6:] == [("cka", 23, True), 5, 10, 15, 20, 23]  # the third is kept


def test_the_widest_interval_is_of_ten_batches_or_more() -> None:
    """Half the distance of the quantiles of the ratio of resampled sums, where it is largest."""
    cka, layers = MinibatchCKA(), [seq(k, 60, 3) for k in (0.0, 1.0)]
    hsic = []
    for batch in range(12):
        part = [layer[5 * batch : 5 * batch + 5] for layer in layers]
        assert cka.widest() is None or batch >= 10
        cka.add(part)
        hsic.append(hsic_1(grams_of(part), grams_of(part)).numpy())
    resampled = resampled_means(np.array(hsic))
    ratios = resampled[:, 0, 1] / np.sqrt(resampled[:, 0, 0] * resampled[:, 1, 1])
    low, high = np.quantile(ratios, (0.025, 0.975))
    assert cka.widest() == pytest.approx((high - low) / 2)
    assert cka_matrix(cka, "ab", "ab").widest == cka.widest()


def test_what_was_measured_between_two_networks_is_kept(tmp_path: Path) -> None:
    """A second call takes it from its file; of other images, or the other way round, it is another result."""
    images, (first, second) = open_analysis_images("digits", 12), (digits_source(n, trained_deepvit()) for n in "ab")
    calls: list[int] = []
    first.model.register_forward_hook(lambda *_: calls.append(1))

    def between(one: Source, other: Source, images: ImageSet = images) -> tuple[SimilarityMatrix, int]:
        calls.clear()
        found = compare_representations(one, other, images, AnalysisOptions(), cache=tmp_path, quiet=True)
        return found, len(calls)

    second = replace(second, checkpoint_sha256="1" * 64)
    measured, passes = between(first, second)
    assert passes
    assert between(first, second) == (measured, 0)
    assert between(second, first)[1]
    assert between(first, second, images.first(8))[1]
    assert len(list(tmp_path.glob("cka-between-*.json"))) == 3
    for path in tmp_path.iterdir():
        path.write_text("{}")
    assert between(first, second) == (measured, passes)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(InputError, match="needs 4 or more"):
        linear_cka(X[:3], Y[:3])
    for unbiased in (True, False):
        with pytest.raises(InputError, match=r"^CKA of 6 and 5 images: all layers must be of the same images$"):
            linear_cka(X, Y[:5], unbiased=unbiased)
    for layers in ([[X, Y[:5]]], [[X], [Y[:5]]], [[X], [Y, X[:5]]]):
        with pytest.raises(InputError, match="6 and 5 images"):
            MinibatchCKA().add(*layers)
    with pytest.raises(InputError, match="no batch of 4"):
        MinibatchCKA().result()
