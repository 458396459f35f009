"""The evaluation split through a network: accuracy, likelihood, calibration, and how alike its tokens are."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vitx.core.calibration import classification_metrics
from vitx.core.images import ImageSet
from vitx.core.preprocess import Preprocessing
from vitx.models import image_tensor
from vitx.models.layer_metrics import layer_metrics


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one network on one image set.

    `cos_sim` is the token similarity of every block's output patches (MATHS §1), `attention_std` the spread of every
    block's softmax maps; a network without such blocks leaves them empty.
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
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, batch_size: int, device: torch.device
) -> Evaluation:
    """Evaluate in evaluation mode and float32; the network's mode and hooks are restored afterwards."""
    logits = []
    was_training = model.training
    model.eval()
    with torch.inference_mode(), layer_metrics(model) as layers:
        for pixels in images.batches(preprocessing, batch_size):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            logits.append(model(inputs).float().cpu().numpy())
    model.train(was_training)
    return Evaluation(
        **classification_metrics(np.concatenate(logits), images.labels),
        cos_sim=list(layers.cos_sim.means().values()),
        attention_std=list(layers.attention_std.means().values()),
    )
