"""The largest eigenvalues of the loss's Hessian, batch by batch (docs/maths.md §5.4)."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vitx.analyze.curvature import LabelledBatch, augmented_batches, hessian_eigenvalues, parameters_of
from vitx.analyze.intervals import batch_interval, with_interval
from vitx.analyze.lanczos import Eigenvalues
from vitx.analyze.metric import Metric, MetricContext
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import Results, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HessianSpectrum(Record):
    """The eigenvalues of largest magnitude of the Hessian of each batch, in nats per squared weight.

    `negative_share`: the share of them below 0 (NEP). `mean_positive`: the mean of those above 0 (APE); None if there
    are none. `module` is "" for the whole network, `parameters` the number of weights in the Hessian.
    """

    module: str
    parameters: int
    weight_decay: float
    images: int
    batches: list[Eigenvalues]
    negative_share: float
    mean_positive: float | None


def hessian_spectrum(
    model: nn.Module,
    batches: Iterable[LabelledBatch],
    k: int = 5,
    *,
    weight_decay: float = 0.0,
    module: str = "",
    seed: int = 0,
) -> HessianSpectrum:
    """The k eigenvalues of largest magnitude of ∇²(mean NLL + ½·λ·‖w‖²) of every batch, λ the weight decay.

    (Park & Kim, arXiv 2202.06709, §2; docs/maths.md §5.4.) batches: augmented as in training, images (B, 3, S, S)
    normalised and labels (B,) or (B, C). Raises InputError for no batch, and what `hessian` and
    `top_eigenvalues` raise.
    """
    found, images = [], 0
    for pixels, labels in batches:
        images += len(pixels)
        found.append(hessian_eigenvalues(model, pixels, labels, k, weight_decay=weight_decay, module=module, seed=seed))
    if not found:
        raise InputError("the Hessian needs at least one batch of labelled images")
    values = [value for batch in found for value in batch.values]
    positive = [value for value in values if value > 0]
    return HessianSpectrum(
        module=module,
        parameters=sum(map(torch.numel, parameters_of(model, module))),
        weight_decay=weight_decay,
        images=images,
        batches=found,
        negative_share=sum(value < 0 for value in values) / len(values),
        mean_positive=sum(positive) / len(positive) if positive else None,
    )


def measure_hessian(context: MetricContext) -> HessianSpectrum:
    options = context.options
    return hessian_spectrum(
        context.source.model,
        augmented_batches(context),
        options.eigenvalues,
        weight_decay=options.weight_decay,
        module=options.module,
        seed=options.seed,
    )


def draw_hessian(results: Results) -> "Figure":
    records: Mapping[str, HessianSpectrum] = results
    figure, (axes,) = panels(1)
    values = {
        network: [value for batch in record.batches for value in batch.values] for network, record in records.items()
    }
    edges = np.histogram_bin_edges(np.concatenate([np.array(part) for part in values.values()]), bins=20)
    for (network, part), hatch in zip(values.items(), ("", "///"), strict=False):
        axes.hist(
            part,
            bins=edges.tolist(),
            histtype="stepfilled",
            alpha=0.6,
            color="0.7",
            edgecolor="black",
            hatch=hatch,
            label=network,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="largest eigenvalues of each batch", ylabel="count")
    axes.legend(fontsize="small")
    return figure


def _hessian_line(found: HessianSpectrum) -> str:
    """The numbers of the record, and the mean over batches of the largest, with Student's intervals over batches."""
    values = [np.array(batch.values) for batch in found.batches]
    numbers = {
        "largest {}": [float(each.max()) for each in values],
        "mean of the positive {}": _mean_positive_by_batch(found),
        "negative {} %": [100 * float((each < 0).mean()) for each in values],
    }
    parts = []
    for name, each in numbers.items():
        interval = batch_interval(each).get("")
        if interval is not None and name != "largest {}":  # Student's of two batches reaches beyond what can be
            interval = max(0.0, interval[0]), min(100.0 if name.endswith("%") else math.inf, interval[1])
        parts.append(name.format(with_interval(float(np.mean(each)), interval)))
    if rough := sum(not batch.converged for batch in found.batches):
        parts.append(f"{rough} of {len(found.batches)} batches did not converge")
    return ", ".join(parts)


def _mean_positive_by_batch(found: HessianSpectrum) -> list[float]:
    """Numbers of the batches whose mean is `mean_positive`, a ratio R of sums over them, and whose spread is its own.

    R + (s − R·n)/mean(n), s the sum of a batch's n positive values: the linear estimate of a ratio's variance
    (Cochran, Sampling Techniques, 1977, §6.4). 0 where no batch has any.
    """
    ratio = found.mean_positive or 0.0
    positive = [[value for value in batch.values if value > 0] for batch in found.batches]
    mean_count = sum(map(len, positive)) / len(positive) or 1.0
    return [ratio + (sum(each) - ratio * len(each)) / mean_count for each in positive]


HESSIAN_METRIC = Metric(
    title="Largest eigenvalues of the Hessian",
    reading="Of the loss of each batch. Large ones mean a sharp loss, negative ones that it is not convex there.",
    claim="Park & Kim (2202.06709): attention makes fewer large and more negative ones than convolutions.",
    precision="Student's over the few batches; none for one batch",
    record=HessianSpectrum,
    line=_hessian_line,
    measure=measure_hessian,
    labels=True,
    options=("seed", "eigenvalues", "loss_batches", "weight_decay", "module"),
    default=False,
    figure=draw_hessian,
)
