"""Lanczos against dense eigenvalues: signs, order, small and deficient operators."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitx.analyze.lanczos import Quadrature, lanczos_quadrature, smoothed_density, top_eigenvalues
from vitx.core.errors import InputError

SIZE = 120
RNG = np.random.default_rng(0)
BULK = RNG.normal(size=SIZE) * 0.3
SPECTRA: dict[str, Any] = {
    "bulk": BULK,
    "outliers": np.concatenate([[9, 5, -4, 3, 2.5], BULK[5:]]),
    "near-equal of opposite sign": np.concatenate([[5, -4.99, 4.98, -4.97, 4], BULK[5:]]),
    "repeated": np.concatenate([[5, 5, 5, -5, -5, 4], BULK[6:]]),
    "identity": np.ones(SIZE),
    "plus and minus one": np.repeat([1.0, -1.0], SIZE // 2),
    "rank two": np.concatenate([[3, -2], np.zeros(SIZE - 2)]),
    "rank two, twice the same": np.concatenate([[3, 3], np.zeros(SIZE - 2)]),
    "zero": np.zeros(SIZE),
    "one": np.array([-3.0]),
    "two": np.array([2.0, -2.5]),
    "positive and huge": 1e12 * (1 + np.abs(BULK)),
    "tiny": 1e-12 * BULK,
}


def dense(spectrum: Any, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, float64."""
    orthogonal, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(spectrum), len(spectrum))))
    matrix = (orthogonal * spectrum) @ orthogonal.T
    return torch.from_numpy((matrix + matrix.T) / 2)


def counted(matrix: Tensor) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    calls = [0]

    def product(vector: Tensor) -> Tensor:
        calls[0] += 1
        return matrix @ vector

    return product, calls


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in SPECTRA if name != "repeated"])
def test_equal_to_dense(name: str, seed: int) -> None:
    matrix = dense(SPECTRA[name], seed)
    product, calls = counted(matrix)
    found = top_eigenvalues(product, len(matrix), 5, tolerance=1e-9, generator=seeded(seed), dtype=torch.float64)
    values = np.linalg.eigvalsh(matrix.numpy())
    expected = values[np.argsort(-np.abs(values))][:5]
    scale = np.abs(expected[0])
    assert found.converged
    assert found.products == calls[0] <= 2 * SIZE
    np.testing.assert_allclose(np.abs(found.values), np.abs(expected), atol=1e-8 * scale)
    assert list(np.abs(found.values)) == sorted(np.abs(found.values), reverse=True)
    assert max(found.residuals) <= 1e-7 * scale
    left = values.tolist()  # every one found is one of the matrix, signs included, and none is counted too often
    for value in found.values:
        nearest = min(left, key=lambda eigenvalue: abs(eigenvalue - value))
        assert abs(nearest - value) <= 1e-8 * scale
        left.remove(nearest)


def test_a_repeated_eigenvalue_is_found_once() -> None:
    matrix = dense(SPECTRA["repeated"])
    found = top_eigenvalues(matrix.__matmul__, SIZE, 3, tolerance=1e-9, generator=seeded(), dtype=torch.float64)
    assert sorted(found.values) == pytest.approx([-5, 4, 5])


def test_residuals_bound_the_errors() -> None:
    matrix = dense(SPECTRA["near-equal of opposite sign"])
    values = np.linalg.eigvalsh(matrix.numpy())
    for tolerance in (1e-1, 1e-2, 1e-3):
        found = top_eigenvalues(
            matrix.__matmul__, SIZE, 5, tolerance=tolerance, generator=seeded(), dtype=torch.float64
        )
        for value, residual in zip(found.values, found.residuals, strict=True):
            assert np.abs(values - value).min() <= residual + 1e-12


def test_float32_and_determinism() -> None:
    matrix = dense(SPECTRA["outliers"])
    single = matrix.float()
    first, again, other = (top_eigenvalues(single.__matmul__, SIZE, 5, generator=seeded(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first.values != other.values
    np.testing.assert_allclose(first.values, [9, 5, -4, 3, 2.5], rtol=1e-4)
    torch.set_default_dtype(torch.float64)  # a notebook's
    try:
        assert top_eigenvalues(single.__matmul__, SIZE, 5, generator=seeded(0)) == first
    finally:
        torch.set_default_dtype(torch.float32)


def test_more_asked_for_than_there_are() -> None:
    matrix = dense(SPECTRA["two"])
    found = top_eigenvalues(matrix.__matmul__, 2, 7, generator=seeded(), dtype=torch.float64)
    np.testing.assert_allclose(found.values, [-2.5, 2.0], atol=1e-12)
    assert found.converged


def test_products_run_out() -> None:
    product, calls = counted(dense(BULK))
    found = top_eigenvalues(product, SIZE, 5, tolerance=1e-9, max_products=20, generator=seeded(), dtype=torch.float64)
    assert calls[0] == found.products == 20
    assert not found.converged
    assert len(found.values) == 5
    assert max(found.residuals) > 1e-9


def test_the_operators_own_tensors_are_left_alone() -> None:
    matrix = dense(BULK)
    kept = torch.zeros(SIZE, dtype=torch.float64)

    def product(vector: Tensor) -> Tensor:
        before = vector.clone()
        torch.mv(matrix, vector, out=kept)
        assert torch.equal(vector, before)
        return kept

    found = top_eigenvalues(product, SIZE, 1, generator=seeded(), dtype=torch.float64)
    assert abs(abs(found.values[0]) - np.abs(np.linalg.eigvalsh(matrix.numpy())).max()) < 1e-3


@pytest.mark.parametrize("name", ["outliers", "repeated", "identity", "rank two", "zero", "one"])
def test_quadrature_has_the_moments(name: str) -> None:
    """vᵀHʲv/vᵀv of the sign vector itself, then of many: tr(Hʲ)/n."""
    matrix = dense(SPECTRA[name])
    size = len(matrix)
    one = lanczos_quadrature(matrix.__matmul__, size, steps=6, generator=seeded(), dtype=torch.float64)
    sign = torch.randint(0, 2, (size,), generator=seeded()).double() * 2 - 1
    power = sign
    for j in range(2 * 6):
        assert math.isclose(moment(one, j), float(sign @ power) / size, rel_tol=1e-9, abs_tol=1e-9)
        power = matrix @ power
    many = lanczos_quadrature(matrix.__matmul__, size, steps=6, probes=64, generator=seeded(), dtype=torch.float64)
    second = float((matrix @ matrix).trace()) / size
    assert math.isclose(moment(many, 0), 1.0, rel_tol=1e-12)
    assert math.isclose(moment(many, 2), second, rel_tol=0.1, abs_tol=1e-12)


def moment(quadrature: Quadrature, power: int) -> float:
    return sum(weight * node**power for node, weight in zip(quadrature.nodes, quadrature.weights, strict=True))


def test_quadrature_of_all_steps_has_the_eigenvalues() -> None:
    matrix = dense(BULK)
    found = lanczos_quadrature(matrix.__matmul__, SIZE, steps=500, generator=seeded(), dtype=torch.float64)
    assert found.products == SIZE
    np.testing.assert_allclose(found.nodes, np.sort(BULK), atol=1e-10)


def test_no_product_is_made_beyond_those_allowed() -> None:
    product, calls = counted(dense(BULK))
    found = lanczos_quadrature(product, SIZE, steps=6, probes=3, generator=seeded(), dtype=torch.float64)
    assert (found.products, calls[0], len(found.nodes)) == (18, 18, 18)
    few = top_eigenvalues(product, SIZE, 4, max_products=4, generator=seeded(), dtype=torch.float64)
    assert (few.converged, few.products, calls[0], len(few.values)) == (False, 4, 22, 4)


def test_a_density_needs_no_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = smoothed_density([0.0, 1.0], [0.5, 0.5])
    monkeypatch.delattr(np, "trapezoid")
    assert smoothed_density([0.0, 1.0], [0.5, 0.5]) == expected


def test_density_integrates_to_one() -> None:
    nodes, weights = [-1.0, 0.0, 3.0], [0.25, 0.5, 0.25]
    found = smoothed_density(nodes, weights)
    grid, density = np.array(found.grid), np.array(found.density)
    assert abs(np.trapezoid(density, grid) - 1) < 1e-12
    assert abs(np.trapezoid(density * grid, grid) - 0.5) < 1e-6  # the mean of the nodes
    assert found.sigma == 0.04
    found = smoothed_density([2.0], [1.0])
    normal = np.exp(-0.5 * (np.array(found.grid) - 2) ** 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(found.density, normal, atol=1e-6)
    assert smoothed_density([0.0, 0.0], [0.5, 0.5]).sigma == 1.0


def test_bad_input_is_refused() -> None:
    matrix = dense(SPECTRA["two"])
    with pytest.raises(InputError, match="0 eigenvalues of an operator of size 2 in 300 products"):
        top_eigenvalues(matrix.__matmul__, 2, 0, generator=seeded())
    with pytest.raises(InputError, match="expected 1 ≤ k ≤ products"):
        top_eigenvalues(matrix.__matmul__, 2, 5, max_products=4, generator=seeded())
    with pytest.raises(InputError, match="a product with the operator is not finite"):
        top_eigenvalues(lambda vector: vector * math.nan, 2, 1, generator=seeded())
    with pytest.raises(InputError, match="in the weights or the images or an overflow of float16, which a float32"):
        top_eigenvalues(lambda vector: vector * 60000 * 60000, 2, 1, generator=seeded(), dtype=torch.float16)
    with pytest.raises(InputError, match="0 steps and 1 probes"):
        lanczos_quadrature(matrix.__matmul__, 2, steps=0, generator=seeded())
