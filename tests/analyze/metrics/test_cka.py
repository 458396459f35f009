"""CKA: reference numbers, the U-statistic written out, and what it must not depend on."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from reference import seq
from vitx.analyze.metrics.cka import MinibatchCKA, grams_of, hsic_1, linear_cka
from vitx.core.errors import InputError

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


def test_float32_of_large_means_keeps_its_digits() -> None:
    shifted = (X + 1000).float()
    assert linear_cka(shifted, Y.float()).item() == pytest.approx(linear_cka(X, Y).item(), abs=2e-3)


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


def test_two_networks() -> None:
    cka = MinibatchCKA()
    cka.add([X], [Y, X])
    assert cka.result().tolist()[0] == pytest.approx([-0.408332, 1], abs=1e-6)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(InputError, match="needs 4 or more"):
        linear_cka(X[:3], Y[:3])
    with pytest.raises(InputError, match="6 and 5 images"):
        linear_cka(X, Y[:5])
    with pytest.raises(InputError, match="no batch of 4"):
        MinibatchCKA().result()
