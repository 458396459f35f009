"""The evaluation split through a network: accuracy, likelihood, calibration, and how alike its tokens are."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import classification_metrics
from vitx.data.image_set import ImageSet
from vitx.models.layer_metrics import layer_metrics
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.inputs.prefetch import Prefetcher


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one network on one image set.

    `cos_sim` is the token similarity of every block's output patches (docs/maths.md §1.1), `attention_std` the spread
    of every block's softmax maps (§1.2); a network without such blocks leaves them empty.
    """

    top1: float
    nll: float
    ece: float
    brier: float
    cos_sim: list[float]
    attention_std: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: nn.Module,
    images: ImageSet,
    preprocessing: Preprocessing,
    batch_size: int,
    device: torch.device,
    *,
    processes: Processes = ALONE,
) -> Evaluation:
    """Evaluate in evaluation mode and float32; the network's mode and hooks are restored afterwards.

    Of several processes each evaluates its share, none twice, and all return the metrics of the whole.
    """
    logits = []
    was_training = model.training
    model.eval()
    share = _share(images, processes)
    with torch.inference_mode(), layer_metrics(model) as layers:
        for inputs in Prefetcher(preprocessing, device).images(share.batches(preprocessing, batch_size)):
            logits.append(model(inputs).float().cpu().numpy())
    model.train(was_training)
    parts = processes.gather((np.concatenate(logits), layers.cos_sim.means(), layers.attention_std.means()))
    weights = [len(part[0]) for part in parts]
    return Evaluation(
        **classification_metrics(np.concatenate([part[0] for part in parts]), images.labels),
        cos_sim=_weighted([part[1] for part in parts], weights),
        attention_std=_weighted([part[2] for part in parts], weights),
    )


def _share(images: ImageSet, processes: Processes) -> ImageSet:
    if processes.count == 1:
        return images
    if len(images) < processes.count:
        raise InputError(
            f"{len(images)} images to evaluate are fewer than the {processes.count} processes: start fewer"
        )
    share = processes.share(len(images))
    keys = tuple(images.keys[index] for index in share)
    return replace(images, keys=keys, labels=images.labels[share], read=lambda index: images.read(int(share[index])))


def _weighted(means: list[dict[str, float]], weights: list[int]) -> list[float]:
    """Means of each layer over several parts, in the order of the layers."""
    if len(means) == 1:
        return list(means[0].values())
    return [float(np.average([part[layer] for part in means], weights=weights)) for layer in means[0]]
