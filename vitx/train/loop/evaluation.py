"""Evaluation of a network on an image set: accuracy, likelihood, calibration, and how similar its tokens are."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vitx.core.console import counted, progress
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import classification_metrics
from vitx.data.image_set import ImageSet
from vitx.models.layer_metrics import layer_metrics
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.inputs.prefetch import Prefetcher


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one network on one image set; docs/maths.md §5.2 defines `nll`, `ece` and `brier`.

    `cos_sim` is the token similarity of each block's output patches (§1.1), `attention_std` the spread of each block's
    softmax maps (§1.2); both are empty for a network without transformer blocks.
    """

    top1: float
    top5: float
    nll: float
    ece: float
    brier: float
    cos_sim: list[float]
    attention_std: list[float]


class EvaluationStopped(Exception):
    """An evaluation was asked to stop."""


def evaluate(
    model: nn.Module,
    images: ImageSet,
    preprocessing: Preprocessing,
    batch_size: int,
    device: torch.device,
    processes: Processes = ALONE,
    stop_asked: Callable[[], int] = int,
    *,
    quiet: bool = True,
) -> Evaluation:
    """Evaluate in evaluation mode and float32; the network's mode and hooks are restored afterwards.

    Several processes evaluate disjoint parts of `images`, and all return the metrics of the whole set. Before a batch
    `stop_asked` is called, equally often in each of them; raises EvaluationStopped if it is not 0.
    """
    logits = []
    was_training = model.training
    model.eval()
    own_images = _images_of_process(images, processes)
    batches = Prefetcher(preprocessing, device).images(own_images.batches(preprocessing, batch_size))
    shown = progress("evaluation", len(own_images), quiet=quiet)
    with torch.inference_mode(), layer_metrics(model) as layers, shown as bar:
        for number, inputs in enumerate(batches):
            if number < len(images) // processes.count // batch_size and stop_asked():
                raise EvaluationStopped
            bar.update(number * batch_size)
            logits.append(model(inputs).float().cpu().numpy())  # (B, C)
    model.train(was_training)
    # Parts are contiguous and come by rank, so the logits (N, C) are in the order of `images.labels`.
    parts = processes.gather((np.concatenate(logits), layers.cos_sim.means(), layers.attention_std.means()))
    weights = [len(part[0]) for part in parts]
    return Evaluation(
        **classification_metrics(np.concatenate([part[0] for part in parts]), images.labels),
        cos_sim=_weighted_means([part[1] for part in parts], weights),
        attention_std=_weighted_means([part[2] for part in parts], weights),
    )


def check_finite_evaluation(epoch: int, values: Evaluation) -> None:
    """Raise CheckFailed for a network whose logits are not finite: its steps may have been, up to the last."""
    if not math.isfinite(values.nll):
        raise CheckFailed(
            f"the network's predictions after epoch {epoch} are not finite: lower optimizer.lr; what was saved before "
            "is kept"
        )


def _images_of_process(images: ImageSet, processes: Processes) -> ImageSet:
    if processes.count == 1:
        return images
    if len(images) < processes.count:
        raise InputError(
            f"{counted(len(images), 'image')} to evaluate, fewer than the {processes.count} processes: start fewer"
        )
    return images.subset(processes.indices(len(images)))


def _weighted_means(means: list[dict[str, float]], weights: list[int]) -> list[float]:
    """The mean of each layer over several parts, in the order of the layers; `weights` are the images of a part."""
    if len(means) == 1:
        return list(means[0].values())
    return [float(np.average([part[layer] for part in means], weights=weights)) for layer in means[0]]
