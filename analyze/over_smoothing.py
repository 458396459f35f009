"""Over-smoothing: how alike the tokens of each layer are, and how peaked its attention is (Gong et al., §3)."""

import torch
from torch import nn

from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.images import ImageSet
from vitx.core.preprocess import Preprocessing
from vitx.models import image_tensor
from vitx.models.layer_metrics import layer_metrics


class OverSmoothing(Record):
    """By layer name: mean cosine of different patches (1: all alike), and the spread of attention over keys."""

    images: int
    cos_sim: dict[str, float]
    attention_std: dict[str, float]


def over_smoothing(
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, *, batch_size: int = 64
) -> OverSmoothing:
    """Measure `model` on `images` in evaluation mode, which is restored; raise InputError when it has no blocks."""
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode(), layer_metrics(model) as metrics:
        for pixels in images.batches(preprocessing, batch_size):
            model(image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device))
    model.train(was_training)
    cos_sim = metrics.cos_sim.means()
    if not cos_sim:
        raise InputError(f"{type(model).__name__} has no transformer blocks: token similarity does not apply to it")
    return OverSmoothing(images=len(images), cos_sim=cos_sim, attention_std=metrics.attention_std.means())
