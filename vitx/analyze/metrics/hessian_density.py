"""The density of all eigenvalues of the loss's Hessian (docs/maths.md §5.4)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vitx.analyze.curvature import LabelledBatch, augmented_batches, hessian, parameters_of
from vitx.analyze.lanczos import Density, lanczos_quadrature, smoothed_density
from vitx.analyze.metric import Metric, MetricContext
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, WIDTH, Results, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HessianDensity(Record):
    """The density of all eigenvalues (nats per squared weight), mean over batches; it integrates to 1.

    nodes, weights: the quadrature before smoothing; the weights sum to 1.
    """

    module: str
    parameters: int
    weight_decay: float
    images: int
    products: int
    nodes: list[float]
    weights: list[float]
    smoothed: Density


def hessian_density(
    model: nn.Module,
    batches: Iterable[LabelledBatch],
    *,
    weight_decay: float = 0.0,
    module: str = "",
    steps: int = 64,
    probes: int = 1,
    seed: int = 0,
) -> HessianDensity:
    """The density of all eigenvalues by stochastic Lanczos quadrature, `steps`·`probes` products for each batch.

    Nodes θ and weights ω with Σ ω·f(θ) ≈ tr f(H)/size (Ubaru et al., SIAM J. Matrix Anal. Appl. 2017; docs/maths.md
    §5.4), smoothed as by `smoothed_density`. batches: as for `hessian_spectrum`; each draws its own sign vectors.
    Raises what `hessian_spectrum` does.
    """
    generator = torch.Generator().manual_seed(seed)
    found, images = [], 0
    for pixels, labels in batches:
        images += len(pixels)
        with hessian(model, pixels, labels, weight_decay=weight_decay, module=module) as operator:
            found.append(lanczos_quadrature(**operator._asdict(), steps=steps, probes=probes, generator=generator))
    if not found:
        raise InputError("the Hessian needs at least one batch of labelled images")
    pairs = sorted(pair for batch in found for pair in zip(batch.nodes, batch.weights, strict=True))
    nodes, weights = [node for node, _ in pairs], [weight / len(found) for _, weight in pairs]
    return HessianDensity(
        module=module,
        parameters=sum(map(torch.numel, parameters_of(model, module))),
        weight_decay=weight_decay,
        images=images,
        products=sum(batch.products for batch in found),
        nodes=nodes,
        weights=weights,
        smoothed=smoothed_density(nodes, weights),
    )


def measure_hessian_density(context: MetricContext) -> HessianDensity:
    options = context.options
    return hessian_density(
        context.source.model,
        augmented_batches(context),
        weight_decay=options.weight_decay,
        module=options.module,
        seed=options.seed,
    )


def draw_hessian_density(results: Results) -> "Figure":
    records: Mapping[str, HessianDensity] = results
    figure, (axes,) = panels(1, width=1.2 * WIDTH)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        density = np.maximum(record.smoothed.density, 1e-12)
        axes.plot(record.smoothed.grid, density, label=network, linewidth=1.2, **{**style, "marker": ""})
    axes.set(xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(1e-9, None))
    axes.legend(fontsize="small")
    return figure


def _density_line(found: HessianDensity) -> str:
    return f"nodes from {min(found.nodes):.3g} to {max(found.nodes):.3g}, {found.products} products"


HESSIAN_DENSITY_METRIC = Metric(
    title="Density of all eigenvalues",
    reading="By stochastic Lanczos quadrature, on a logarithmic axis, smoothed by a hundredth of the range.",
    precision="none: the quadrature of one random vector a batch has no distribution to resample",
    record=HessianDensity,
    line=_density_line,
    measure=measure_hessian_density,
    labels=True,
    options=("seed", "loss_batches", "weight_decay", "module"),
    default=False,
    figure=draw_hessian_density,
)
