"""Eigenvalues of a symmetric operator from products with vectors alone, by Lanczos with full reorthogonalisation.

For the eigenvalues of largest magnitude, and for the density of all of them (docs/maths.md §5.4).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from scipy import integrate, linalg
from torch import Tensor

from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.probabilities import Float64Array

Product = Callable[[Tensor], Tensor]

# How many standard deviations the grid of the smoothed density reaches beyond the outermost nodes, and its points.
TAIL, POINTS = 6.0, 1001


class Eigenvalues(Record):
    """The eigenvalues of largest magnitude, in descending magnitude, with their signs.

    `residuals`: ‖Hv − λv‖ of each pair, v of unit length: the operator has an eigenvalue at most that far from λ.
    `products`: how often the operator was applied. `converged`: every residual met the tolerance.
    """

    values: list[float]
    residuals: list[float]
    products: int
    converged: bool


class Quadrature(Record):
    """The mean of f over all eigenvalues ≈ Σ weights·f(nodes); the weights sum to 1, the nodes ascend."""

    nodes: list[float]
    weights: list[float]
    products: int


class Density(Record):
    """A density over eigenvalues whose trapezoid integral over `grid` is 1; `sigma`: the width of its Gaussians."""

    grid: list[float]
    density: list[float]
    sigma: float


class _Krylov:
    """An orthonormal basis of a Krylov space, in which the operator is tridiagonal.

    draw: returns a random vector.
    """

    def __init__(self, product: Product, draw: Callable[[], Tensor]) -> None:
        self.product, self.draw = product, draw
        self.basis: list[Tensor] = []
        self.diagonal: list[float] = []
        self.off_diagonal: list[float] = []  # the last one couples to the vector that comes next
        self.largest_image = 0.0
        self._next = self._random_direction()

    @property
    def complete(self) -> bool:
        """The basis spans the whole space."""
        return len(self.basis) == len(self._next)

    @property
    def invariant(self) -> bool:
        """The operator maps the basis into itself."""
        return self.off_diagonal[-1] == 0.0

    def step(self) -> None:
        """Take one product and add one row. If the basis is invariant, a random direction comes next."""
        vector = self._next
        self.basis.append(vector)
        image = self.product(vector).clone()  # the operator may use its own tensor again
        length = float(image.norm())
        if not math.isfinite(length):
            what = "NaN or infinity in the weights or the images"
            overflow = (
                " or an overflow of float16, which a float32 network has not" if image.dtype == torch.half else ""
            )
            raise InputError(f"a product with the operator is not finite: {what}{overflow}")
        self.diagonal.append(float(vector @ image))
        self.largest_image = max(self.largest_image, length)
        left = self._orthogonalize(image)
        # What rounding alone leaves after the orthogonalisation.
        noise = 10 * torch.finfo(image.dtype).eps * math.sqrt(len(self.basis)) * self.largest_image
        leads_out = left > noise and not self.complete
        self.off_diagonal.append(left if leads_out else 0.0)
        if not self.complete:
            self._next = image / left if leads_out else self._random_direction()

    def ritz_pairs(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Ritz values in descending magnitude, their vectors as columns over the basis, and the pairs' residuals."""
        values, columns = linalg.eigh_tridiagonal(self.diagonal, self.off_diagonal[:-1])
        order = np.argsort(-np.abs(values), kind="stable")
        return values[order], columns[:, order], self.off_diagonal[-1] * np.abs(columns[-1, order])

    def _random_direction(self) -> Tensor:
        """A random unit vector orthogonal to the basis."""
        vector = self.draw()
        length = self._orthogonalize(vector)
        return vector.div_(length)

    def _orthogonalize(self, vector: Tensor) -> float:
        """Orthogonalise in place and return the length left. Twice: the first pass leaves errors of cancellation."""
        for _ in range(2):
            for other in self.basis:
                vector.addcmul_(other, other @ vector, value=-1)
        return float(vector.norm())


def top_eigenvalues(
    product: Product,
    size: int,
    k: int,
    *,
    tolerance: float = 1e-3,
    max_products: int = 300,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude of a symmetric operator.

    product: v → Hv over vectors (size,) of `dtype` on `device`. generator: of the CPU. A pair counts as found when
    ‖Hv − λv‖ is at most `tolerance` times the largest magnitude. One start vector finds one direction of an eigenspace:
    an eigenvalue that occurs several times is found once, unless k needs more. With k > size all `size` eigenvalues are
    returned. If `max_products` run out, `converged` is False. Holds one vector in memory for each product. Raises
    InputError for k < 1, max_products < k and products that are not finite.
    """
    if size < 1 or not 1 <= k <= max_products:
        raise InputError(
            f"{k} eigenvalues of an operator of size {size} in {max_products} products: expected 1 ≤ k ≤ products"
        )
    k = min(k, size)
    normal = partial(torch.randn, dtype=torch.float32)  # whatever the default type of the process
    krylov = _Krylov(product, _drawer(normal, size, generator, dtype, device))
    converged = False
    while not converged and len(krylov.basis) < max_products:
        krylov.step()
        values, _, residuals = krylov.ritz_pairs()
        found = len(values) >= k and bool((residuals[:k] <= tolerance * abs(values[0])).all())
        converged = found or krylov.complete
    return Eigenvalues(
        values=values.tolist()[:k], residuals=residuals.tolist()[:k], products=len(krylov.basis), converged=converged
    )


def lanczos_quadrature(
    product: Product,
    size: int,
    *,
    steps: int = 64,
    probes: int = 1,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Quadrature:
    """Stochastic Lanczos quadrature of the density of all eigenvalues (Ubaru et al., SIAM J. Matrix Anal. Appl. 2017).

    Each of `probes` random sign vectors v takes at most `steps` products and gives nodes and weights that reproduce
    vᵀHʲv/vᵀv for j < 2·steps; the mean over vectors estimates tr(Hʲ)/size. Other arguments as in `top_eigenvalues`.
    Raises InputError for counts below 1 and products that are not finite.
    """
    if min(size, steps, probes) < 1:
        raise InputError(f"{steps} steps and {probes} probes of an operator of size {size}: each must be 1 or more")
    draw = _drawer(_random_signs, size, generator, dtype, device)
    pairs: list[tuple[float, float]] = []
    products = 0
    for _ in range(probes):
        krylov = _Krylov(product, draw)
        krylov.step()
        while len(krylov.basis) < steps and not krylov.invariant:
            krylov.step()
        nodes, columns, _ = krylov.ritz_pairs()
        pairs += zip(nodes.tolist(), (columns[0] ** 2 / probes).tolist(), strict=True)
        products += len(krylov.basis)
    pairs.sort()
    return Quadrature(nodes=[node for node, _ in pairs], weights=[weight for _, weight in pairs], products=products)


def smoothed_density(nodes: Sequence[float], weights: Sequence[float]) -> Density:
    """Σ weights·N(node, sigma²) on an even grid, scaled to integrate to 1.

    sigma is a hundredth of the range of the nodes, or 1 where that is 0.
    """
    low, high = min(nodes), max(nodes)
    sigma = (high - low) / 100 or 1.0
    grid = np.linspace(low - TAIL * sigma, high + TAIL * sigma, POINTS)
    density = np.exp(-0.5 * ((grid[:, None] - np.array(nodes)) / sigma) ** 2) @ np.array(weights)
    density /= integrate.trapezoid(density, grid)
    return Density(grid=grid.tolist(), density=density.tolist(), sigma=sigma)


def _drawer(
    distribution: Callable[..., Tensor],
    size: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Callable[[], Tensor]:
    """A function that returns random vectors (size,), drawn on the CPU so that they are the same on every device."""
    return lambda: distribution(size, generator=generator).to(device, dtype)


def _random_signs(size: int, *, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size,), generator=generator) * 2 - 1
