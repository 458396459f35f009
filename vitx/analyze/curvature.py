"""The Hessian of the loss NLL + ½·λ·‖w‖² in the weights, through products with vectors alone (docs/maths.md §5.4).

Park & Kim (arXiv 2202.06709). Shape letters: B batch, S side of an image, C classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitx.analyze.accuracy import labelled_batches
from vitx.analyze.activations import differentiating_only, in_evaluation_mode
from vitx.analyze.lanczos import Eigenvalues, Product, top_eigenvalues
from vitx.analyze.metric import MetricContext
from vitx.core.errors import InputError, unknown_name
from vitx.models import image_tensor

# Normalised images (B, 3, S, S), and labels: classes int64 (B,) or probabilities (B, C) where augmentation mixes them.
LabelledBatch = tuple[Tensor, Tensor]


class Hessian(NamedTuple):
    """The Hessian of one batch as v → Hv over vectors (size,): all chosen parameters flattened, one after the other."""

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
    seed: int = 0,
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude of the Hessian of one batch; see `hessian` and `top_eigenvalues`.

    Unit: nats per squared weight. A network's eigenvalues are simple unless two of its weights have the same effect.
    """
    generator = torch.Generator().manual_seed(seed)
    with hessian(model, images, labels, weight_decay=weight_decay, module=module) as operator:
        return top_eigenvalues(
            **operator._asdict(), k=k, tolerance=tolerance, max_products=max_products, generator=generator
        )


@contextmanager
def hessian(
    model: nn.Module, images: Tensor, labels: Tensor, *, weight_decay: float = 0.0, module: str = ""
) -> Iterator[Hessian]:
    """The Hessian of the batch's mean NLL + ½·weight_decay·‖w‖² in all parameters, or in those of one module.

    images: normalised, (B, 3, S, S). labels: classes (B,), or probabilities (B, C). In evaluation mode. The graph of
    the gradient is built once and every product reuses it, with attention as plain matrix products: fused kernels have
    no second derivative. The second term's part of Hv is weight_decay·v. Modes, `requires_grad` and gradients are as
    before afterwards. Raises InputError for a module that is unknown, has no parameters or no part in the loss, for
    labels that do not fit, and for a loss that is not finite.
    """
    chosen = parameters_of(model, module)
    with in_evaluation_mode(model), differentiating_only(model, chosen):
        with sdpa_kernel(SDPBackend.MATH):
            # Copies: what was made in inference mode cannot be kept for the backward pass.
            loss = mean_nll(model, images.clone(), labels.clone())
            if not loss.requires_grad:
                raise InputError(
                    f"the loss does not depend on module '{module}': choose another, or '' for all of them"
                )
            gradients = torch.autograd.grad(loss, chosen, create_graph=True, materialize_grads=True)
        # A parameter that the loss does not depend on, such as a head for training alone, has no second derivative.
        reached = [gradient for gradient in gradients if gradient.requires_grad]
        if not torch.isfinite(loss):
            raise InputError(f"the loss of the batch is {loss.item()}: its weights or images are not finite")

        def product(vector: Tensor) -> Tensor:
            parts = torch.split(vector, [*map(torch.numel, chosen)])
            directions = [
                part.view_as(gradient)
                for part, gradient in zip(parts, gradients, strict=True)
                if gradient.requires_grad
            ]
            rows = torch.autograd.grad(reached, chosen, directions, retain_graph=True, materialize_grads=True)
            return torch.cat([row.reshape(-1) for row in rows]).add_(vector, alpha=weight_decay)

        yield Hessian(product, sum(map(torch.numel, chosen)), chosen[0].dtype, chosen[0].device)


def mean_nll(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The mean negative log-likelihood of a batch, a scalar in nats.

    images: normalised, (B, 3, S, S). labels: classes (B,), or probabilities (B, C). Raises InputError for labels that
    do not fit.
    """
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
    target = labels.to(parameter.device, torch.long) if of_classes else labels.to(logits)
    return F.cross_entropy(logits, target)


def parameters_of(model: nn.Module, module: str) -> list[nn.Parameter]:
    """The parameters of the module of that name, "" for all; raise InputError if it is unknown or has none."""
    modules = dict(model.named_modules())
    if module not in modules:
        raise unknown_name("module", module, (name for name in modules if name))
    chosen = list(modules[module].parameters())
    if not chosen:
        raise InputError(f"module '{module}' has no parameters: choose one that has, or '' for the whole network")
    return chosen


def augmented_batches(context: MetricContext) -> Iterator[LabelledBatch]:
    """`loss_batches` batches, shifted by up to an eighth of the side: (images (B, 3, S, S), labels (B,)).

    A shift, drawn from the seed, with a mirrored border is the augmentation that all recipes share. Images are
    normalised. They are evenly spaced over the set and in an order drawn from the seed: a batch of one or two classes,
    as the images are mostly listed, has another loss and another Hessian than one of all.
    """
    source, images, options, *_ = context
    chosen = images.evenly_spaced(options.batch_size * options.loss_batches).shuffled(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    device = next(source.model.parameters()).device
    max_shift = max(1, source.preprocessing.image_size // 8)
    # Sizes that differ by a few at most: the Hessian of a last batch of one image would count like that of a whole one.
    size = -(-len(chosen) // -(-len(chosen) // options.batch_size))
    batches = chosen.batches(source.preprocessing, size)
    for _, pixels, labels in labelled_batches(context.shown(batches, len(chosen)), chosen.labels):
        inputs = image_tensor(pixels, source.preprocessing.mean, source.preprocessing.std)
        padded, side = F.pad(inputs, (max_shift,) * 4, mode="reflect"), inputs.shape[-1]
        offsets = torch.randint(0, 2 * max_shift + 1, (len(pixels), 2), generator=generator).tolist()
        shifted = [
            image[:, top : top + side, left : left + side] for image, (top, left) in zip(padded, offsets, strict=True)
        ]
        yield torch.stack(shifted).to(device), torch.as_tensor(labels).to(device)
