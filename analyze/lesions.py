"""Lesion study: how much accuracy hangs on each unit (Veit et al., arXiv 1605.06431; Park & Kim, 2202.06709)."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitx.analyze.accuracy import Tally, numbered
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
    tally = Tally()
    batches = -(-len(images) // batch_size)
    pixels_of = images.batches(preprocessing, batch_size)
    with in_evaluation_mode(model), torch.inference_mode(), progress("lesions", batches, quiet=quiet) as bar:
        for done, (_, pixels, labels) in enumerate(numbered(pixels_of, images.labels), 1):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            tally.add(None, model(inputs).cpu().numpy(), labels)
            for unit in units:
                with ExitStack() as restore:
                    restore.callback(unit.branch.register_forward_hook(_nothing).remove)
                    tally.add(unit.name, model(inputs).cpu().numpy(), labels)
            bar.update(done)
    return Lesions(
        images=len(images),
        accuracy=tally.accuracy(None),
        units={unit.name: Lesion(kind=unit.kind, accuracy=tally.accuracy(unit.name)) for unit in units},
    )


def _nothing(_branch: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)
