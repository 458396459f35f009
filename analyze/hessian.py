"""The curvature of the loss: eigenvalues of the Hessian of NLL + ½·λ·‖w‖² in the weights (Park & Kim, arXiv
2202.06709, §2), from Hessian-vector products, which cost about as much as two gradients each.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.lanczos import (
    Density,
    Eigenvalues,
    Product,
    lanczos_quadrature,
    smoothed_density,
    top_eigenvalues,
)
from vitx.core.errors import InputError, unknown_name
from vitx.core.files import Record

# Normalised images (B, 3, S, S), and labels: classes int64 (B,) or probabilities (B, C) where augmentation mixes them.
LabelledBatch = tuple[Tensor, Tensor]


class HessianSpectrum(Record):
    """The eigenvalues of largest magnitude of the Hessian of each batch (its `values` in descending magnitude).

    `negative_share`: the share of them below 0 (NEP). `mean_positive`: the mean of those above 0 (APE); None where
    there are none. `module` is "" for the whole network, `parameters` the number of weights in the Hessian.
    """

    module: str
    parameters: int
    weight_decay: float
    images: int
    batches: list[Eigenvalues]
    negative_share: float
    mean_positive: float | None


class HessianDensity(Record):
    """The density of all eigenvalues, the mean over batches; `nodes` and `weights` as they were before smoothing."""

    module: str
    parameters: int
    weight_decay: float
    images: int
    products: int
    nodes: list[float]
    weights: list[float]
    smoothed: Density


class Hessian(NamedTuple):
    """The products v → Hv of one batch over flat vectors (size,) of `dtype` on `device`."""

    product: Product
    size: int
    dtype: torch.dtype
    device: torch.device


def hessian_eigenvalues(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    k: int = 5,
    *,
    weight_decay: float = 0.0,
    module: str = "",
    tolerance: float = 1e-3,
    max_products: int = 300,
    repeated: bool = False,
    seed: int = 0,
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude of the Hessian of one batch; see `hessian` and `top_eigenvalues`.

    Those of a network's Hessian are simple unless two of its weights do the same, so they are not looked for twice.
    """
    generator = torch.Generator().manual_seed(seed)
    with hessian(model, images, labels, weight_decay=weight_decay, module=module) as operator:
        return top_eigenvalues(
            operator.product,
            operator.size,
            k,
            tolerance=tolerance,
            max_products=max_products,
            repeated=repeated,
            generator=generator,
            dtype=operator.dtype,
            device=operator.device,
        )


def hessian_spectrum(
    model: nn.Module,
    batches: Iterable[LabelledBatch],
    k: int = 5,
    *,
    weight_decay: float = 0.0,
    module: str = "",
    tolerance: float = 1e-3,
    max_products: int = 300,
    seed: int = 0,
) -> HessianSpectrum:
    """The max-eigenvalue spectrum: `hessian_eigenvalues` of every batch.

    batches: of augmented images, as training sees them. Raises InputError for no batch, and what `hessian` and
    `top_eigenvalues` raise.
    """
    found, images = [], 0
    for pixels, labels in batches:
        images += len(pixels)
        found.append(
            hessian_eigenvalues(
                model,
                pixels,
                labels,
                k,
                weight_decay=weight_decay,
                module=module,
                tolerance=tolerance,
                max_products=max_products,
                seed=seed,
            )
        )
    if not found:
        raise InputError("the Hessian needs at least one batch of labelled images")
    values = [value for batch in found for value in batch.values]
    positive = [value for value in values if value > 0]
    return HessianSpectrum(
        module=module,
        parameters=_size(_chosen(model, module)),
        weight_decay=weight_decay,
        images=images,
        batches=found,
        negative_share=sum(value < 0 for value in values) / len(values),
        mean_positive=sum(positive) / len(positive) if positive else None,
    )


def hessian_density(
    model: nn.Module,
    batches: Iterable[LabelledBatch],
    *,
    weight_decay: float = 0.0,
    module: str = "",
    steps: int = 64,
    probes: int = 1,
    sigma: float | None = None,
    seed: int = 0,
) -> HessianDensity:
    """The density of all eigenvalues by stochastic Lanczos quadrature, `steps`·`probes` products a batch.

    Every batch has probes of its own. Raises what `hessian_spectrum` does.
    """
    generator = torch.Generator().manual_seed(seed)
    found, images = [], 0
    for pixels, labels in batches:
        images += len(pixels)
        with hessian(model, pixels, labels, weight_decay=weight_decay, module=module) as operator:
            quadrature = lanczos_quadrature(
                operator.product,
                operator.size,
                steps=steps,
                probes=probes,
                generator=generator,
                dtype=operator.dtype,
                device=operator.device,
            )
        found.append(quadrature)
    if not found:
        raise InputError("the Hessian needs at least one batch of labelled images")
    pairs = sorted(pair for batch in found for pair in zip(batch.nodes, batch.weights, strict=True))
    nodes, weights = [node for node, _ in pairs], [weight / len(found) for _, weight in pairs]
    return HessianDensity(
        module=module,
        parameters=_size(_chosen(model, module)),
        weight_decay=weight_decay,
        images=images,
        products=sum(batch.products for batch in found),
        nodes=nodes,
        weights=weights,
        smoothed=smoothed_density(nodes, weights, sigma=sigma),
    )


@contextmanager
def hessian(
    model: nn.Module, images: Tensor, labels: Tensor, *, weight_decay: float = 0.0, module: str = ""
) -> Iterator[Hessian]:
    """The Hessian of the batch's mean NLL + ½·weight_decay·‖w‖² in all parameters, or in those of one module.

    In evaluation mode. The graph of the gradient is built once and every product reuses it, with attention as plain
    products: fused kernels have no second derivative. The second term's part, weight_decay·v, is added exactly. Modes,
    `requires_grad` and gradients are as before afterwards. Raises InputError for a module that is unknown, has no
    parameters or no part in the loss, for labels that do not fit, and for a loss that is not finite.
    """
    chosen = _chosen(model, module)
    with in_evaluation_mode(model), _only_differentiated(model, chosen), torch.enable_grad():
        with sdpa_kernel(SDPBackend.MATH):
            loss = mean_nll(model, images, labels)
            if not loss.requires_grad:
                raise InputError(
                    f"the loss does not depend on module '{module}': choose another, or '' for all of them"
                )
            gradients = torch.autograd.grad(loss, chosen, create_graph=True, materialize_grads=True)
        # What the loss does not reach, such as a head for training alone, has no second derivative either.
        reached = [gradient for gradient in gradients if gradient.requires_grad]
        if not torch.isfinite(loss):
            raise InputError(f"the loss of the batch is {loss.item()}: its weights or images are not finite")

        def product(vector: Tensor) -> Tensor:
            parts = torch.split(vector, [parameter.numel() for parameter in chosen])
            directions = [
                part.view_as(gradient)
                for part, gradient in zip(parts, gradients, strict=True)
                if gradient.requires_grad
            ]
            rows = torch.autograd.grad(reached, chosen, directions, retain_graph=True, materialize_grads=True)
            return torch.cat([row.reshape(-1) for row in rows]).add_(vector, alpha=weight_decay)

        yield Hessian(product, _size(chosen), chosen[0].dtype, chosen[0].device)


def mean_nll(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The mean negative log-likelihood (nats) of a batch, a scalar; raise InputError for labels that do not fit."""
    parameter = next(model.parameters())
    logits = model(images.to(parameter))
    classes = logits.shape[-1]
    of_classes = labels.ndim == 1 and not labels.is_floating_point()
    if len(labels) != len(images) or not (of_classes or labels.shape == logits.shape):
        raise InputError(
            f"labels {tuple(labels.shape)} {labels.dtype} of {len(images)} images and {classes} classes: expected "
            f"({len(images)},) classes or ({len(images)}, {classes}) probabilities"
        )
    if of_classes and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"labels reach from {labels.min()} to {labels.max()}, but the network has {classes} classes")
    target = labels.to(parameter.device) if of_classes else labels.to(logits)
    return F.cross_entropy(logits, target)


def _chosen(model: nn.Module, module: str) -> list[nn.Parameter]:
    modules = dict(model.named_modules())
    if module not in modules:
        raise unknown_name("module", module, (name for name in modules if name))
    chosen = list(modules[module].parameters())
    if not chosen:
        raise InputError(f"module '{module}' has no parameters: choose one that has, or '' for the whole network")
    return chosen


@contextmanager
def _only_differentiated(model: nn.Module, chosen: list[nn.Parameter]) -> Iterator[None]:
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _size(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
