"""Lesion study: how much accuracy hangs on each unit (Veit et al., arXiv 1605.06431; Park & Kim, 2202.06709)."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitx.analyze.activation_metrics import NotApplicable
from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.units import Kind, residual_units
from vitx.core.console import progress
from vitx.core.files import Record
from vitx.core.images import ImageSet
from vitx.core.preprocess import Preprocessing
from vitx.models import image_tensor


class Lesion(Record):
    """Accuracy without one unit, and what kind of unit it is."""

    kind: Kind
    accuracy: float


class Lesions(Record):
    """Accuracy of the whole network, and with each unit removed alone: only its shortcut is left."""

    images: int
    accuracy: float
    units: dict[str, Lesion]


def lesion_study(
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, *, batch_size: int = 64, quiet: bool = False
) -> Lesions:
    """Classify `images` once with the whole network and once without each unit; NotApplicable without known units.

    Each batch is decoded once. Modes and hooks are restored.
    """
    units = residual_units(model)
    if not units:
        raise NotApplicable("the network has no residual units that are known")
    device = next(model.parameters()).device
    correct = [0] * (1 + len(units))
    batches = -(-len(images) // batch_size)
    with in_evaluation_mode(model), torch.inference_mode(), progress("lesions", batches, quiet=quiet) as bar:
        for index, pixels in enumerate(images.batches(preprocessing, batch_size)):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            labels = torch.as_tensor(images.labels[index * batch_size :][: len(pixels)], device=device)
            for place, unit in enumerate([None, *units]):
                with ExitStack() as restore:
                    if unit is not None:
                        restore.callback(unit.branch.register_forward_hook(_nothing).remove)
                    correct[place] += int((model(inputs).argmax(dim=1) == labels).sum())
            bar.update(index + 1)
    whole, *without = (count / len(images) for count in correct)
    return Lesions(
        images=len(images),
        accuracy=whole,
        units={unit.name: Lesion(kind=unit.kind, accuracy=left) for unit, left in zip(units, without, strict=True)},
    )


def _nothing(_branch: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)
