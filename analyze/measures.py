"""How each metric that runs passes of its own is measured on the images of an analysis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from vitx.analyze.accuracy import numbered
from vitx.analyze.activation_metrics import SIMILAR, NotApplicable
from vitx.analyze.activations import Activations
from vitx.analyze.adversarial import AdversarialRobustness, adversarial_robustness
from vitx.analyze.confidence import Confidence, TemperatureScaling, confidence, temperature_scaling
from vitx.analyze.corrupted_copies import open_corrupted_copies
from vitx.analyze.hessian import HessianDensity, HessianSpectrum, hessian_density, hessian_spectrum
from vitx.analyze.landscape import LossLandscape, loss_landscape
from vitx.analyze.lesions import Lesions, lesion_study
from vitx.analyze.noise import FrequencyRobustness, frequency_robustness
from vitx.analyze.occlusion import Occlusion, default_patch_size, gradient_saliency, occlusion
from vitx.analyze.predictor import predictor
from vitx.analyze.robustness import CorruptionRobustness, copies_robustness, corruption_robustness
from vitx.analyze.trajectory import Trajectory, run_trajectory
from vitx.core.calibration import softmax
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.images import ImageSet
from vitx.core.run import RunFolder
from vitx.models import image_tensor
from vitx.models.source import Source


class Options(Record):
    """What metrics depend on besides the network and the images."""

    batch_size: PositiveInt = 16
    seed: int = 0
    similar_above: float = Field(default=SIMILAR, ge=-1, le=1, description="cosine that makes two layers similar")
    eigenvalues: PositiveInt = 5
    loss_batches: PositiveInt = Field(default=4, description="batches whose loss surface is measured")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="of the loss ½·wd·‖w‖²")
    landscape_points: PositiveInt = 11
    module: str = Field(default="", description="whose weights the Hessian is in: blocks.3.attn; '' for all")
    corrupted: Path | None = Field(default=None, description="copies of CIFAR-C or ImageNet-C for `corruptions`")


class Measured(NamedTuple):
    """What is measured, and how."""

    source: Source
    images: ImageSet
    options: Options
    quiet: bool = True

    def batches(self) -> Iterator[Any]:
        return self.images.batches(self.source.preprocessing, self.options.batch_size)


class Logits:
    """Collects logits of the shared pass."""

    def __init__(self, measured: Measured) -> None:
        self.labels, self._parts = measured.images.labels, list[Any]()

    def add(self, batch: Activations) -> None:
        self._parts.append(batch.logits.cpu().numpy())

    def logits(self) -> Any:
        return np.concatenate(self._parts)


class ConfidenceMetric(Logits):
    def result(self) -> Confidence:
        return confidence(softmax(self.logits()), self.labels)


class TemperatureMetric(Logits):
    def result(self) -> TemperatureScaling:
        if len(self.labels) < 2:
            raise NotApplicable("one image has no second half to scale")
        return temperature_scaling(self.logits(), self.labels)


def lesions(measured: Measured) -> Lesions:
    source, images, options, quiet = measured
    return lesion_study(source.model, images, source.preprocessing, batch_size=options.batch_size, quiet=quiet)


def corruptions(measured: Measured) -> CorruptionRobustness:
    source, images, options, _ = measured
    predict = predictor(source.model, source.preprocessing)
    if options.corrupted is None:
        return corruption_robustness(predict, measured.batches(), images.labels, seed=options.seed)
    copies = open_corrupted_copies(options.corrupted, source.class_names)
    return copies_robustness(predict, copies, source.preprocessing, batch_size=options.batch_size, limit=len(images))


def frequency_noise(measured: Measured) -> FrequencyRobustness:
    source = measured.source
    predict = predictor(source.model, source.preprocessing)
    bands = min(10, source.preprocessing.image_size // 2)
    return frequency_robustness(
        predict, measured.batches(), measured.images.labels, bands=bands, seed=measured.options.seed
    )


def occluded(measured: Measured) -> Occlusion:
    source = measured.source
    return occlusion(
        predictor(source.model, source.preprocessing),
        measured.batches(),
        measured.images.labels,
        patch_size=default_patch_size(source.model, source.preprocessing.image_size),
        mean=source.preprocessing.mean,
        saliency=gradient_saliency(source.model, source.preprocessing),
        seed=measured.options.seed,
    )


def attacked(measured: Measured) -> AdversarialRobustness:
    source = measured.source
    return adversarial_robustness(
        source.model, measured.batches(), measured.images.labels, source.preprocessing, seed=measured.options.seed
    )


def spectrum(measured: Measured) -> HessianSpectrum:
    options = measured.options
    return hessian_spectrum(
        measured.source.model,
        augmented_batches(measured),
        options.eigenvalues,
        weight_decay=options.weight_decay,
        module=options.module,
        seed=options.seed,
    )


def density(measured: Measured) -> HessianDensity:
    options = measured.options
    return hessian_density(
        measured.source.model,
        augmented_batches(measured),
        weight_decay=options.weight_decay,
        module=options.module,
        seed=options.seed,
    )


def landscape(measured: Measured) -> LossLandscape:
    options = measured.options
    return loss_landscape(
        measured.source.model,
        list(augmented_batches(measured)),
        points=options.landscape_points | 1,  # odd: the middle is the network itself
        weight_decay=options.weight_decay,
        seed=options.seed,
    )


def trajectory(measured: Measured) -> Trajectory:
    if measured.source.recipe is None:
        raise NotApplicable("a network without a training run has no trajectory")
    try:
        return run_trajectory(RunFolder.open(measured.source.name))
    except InputError as error:
        raise NotApplicable(str(error)) from None


def augmented_batches(measured: Measured) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `loss_batches` batches, normalised and shifted by up to an eighth of the side, with their labels.

    Shifts are drawn from the seed, the border is mirrored: what all recipes have in common. Images are evenly spaced
    over the set already, so the first ones are of all classes.
    """
    source, images, options, _ = measured
    size = options.batch_size * options.loss_batches
    chosen = images.subset(np.linspace(0, len(images) - 1, min(size, len(images))).astype(np.int64))
    generator = torch.Generator().manual_seed(options.seed)
    device = next(source.model.parameters()).device
    reach = max(1, source.preprocessing.image_size // 8)
    batches = chosen.batches(source.preprocessing, options.batch_size)
    for _, pixels, labels in numbered(batches, chosen.labels):
        inputs = image_tensor(pixels, source.preprocessing.mean, source.preprocessing.std)
        padded, side = F.pad(inputs, (reach,) * 4, mode="reflect"), inputs.shape[-1]
        offsets = torch.randint(0, 2 * reach + 1, (len(pixels), 2), generator=generator).tolist()
        shifted = [
            image[:, top : top + side, left : left + side] for image, (top, left) in zip(padded, offsets, strict=True)
        ]
        yield torch.stack(shifted).to(device), torch.as_tensor(labels).to(device)
