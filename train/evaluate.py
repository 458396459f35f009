"""The evaluation split through a network: accuracy, likelihood, calibration, and how alike its tokens are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.core.images import ImageSet
from vitx.core.preprocess import Preprocessing
from vitx.models import attention_std, image_tensor, token_similarity

ECE_BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one network on one image set.

    `cos_sim` is the token similarity of every block's output patches (MATHS §1), `attention_std` the spread of every
    block's softmax maps; a network without such blocks leaves them empty.
    """

    top1: float
    nll: float
    ece: float
    cos_sim: list[float]
    attention_std: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, batch_size: int, device: torch.device
) -> Evaluation:
    """Evaluate in evaluation mode and float32; the network's mode and hooks are restored afterwards."""
    logits: list[Tensor] = []
    was_training = model.training
    model.eval()
    with torch.inference_mode(), layer_probe(model) as probe:
        for pixels in images.batches(preprocessing, batch_size):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            logits.append(model(inputs).float().cpu())
    model.train(was_training)
    logits_NC, labels_N = torch.cat(logits), torch.from_numpy(images.labels)
    probabilities_NC = logits_NC.double().softmax(dim=-1)
    return Evaluation(
        top1=(logits_NC.argmax(dim=-1) == labels_N).double().mean().item(),
        nll=F.cross_entropy(logits_NC.double(), labels_N).item(),
        ece=expected_calibration_error(probabilities_NC, labels_N),
        cos_sim=probe.cos_sim.means(),
        attention_std=probe.attention_std.means(),
    )


def expected_calibration_error(probabilities_NC: Tensor, labels_N: Tensor, bins: int = ECE_BINS) -> float:
    """Return Σ_b (n_b/N)·|accuracy_b − confidence_b| over equal bins (lo, hi], the first including 0 (MATHS §5)."""
    confidence_N, predicted_N = probabilities_NC.max(dim=-1)
    correct_N = (predicted_N == labels_N).to(confidence_N.dtype)
    bin_N = (confidence_N * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=confidence_N.dtype).index_add_(0, bin_N, correct_N - confidence_N)
    return gaps.abs().sum().item() / len(labels_N)


class LayerMeans:
    """A mean for every layer over all images, however they are batched."""

    def __init__(self) -> None:
        self.sums: dict[int, float] = {}
        self.images: dict[int, int] = {}

    def add(self, layer: int, value: float, images: int) -> None:
        self.sums[layer] = self.sums.get(layer, 0.0) + value * images
        self.images[layer] = self.images.get(layer, 0) + images

    def means(self) -> list[float]:
        return [self.sums[layer] / self.images[layer] for layer in sorted(self.sums)]


class LayerProbe:
    """What `layer_probe` collects."""

    def __init__(self) -> None:
        self.cos_sim, self.attention_std = LayerMeans(), LayerMeans()

    def block_hook(self, layer: int, prefix_tokens: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, tokens: Tensor) -> None:
            if tokens.ndim == 3 and tokens.shape[1] > prefix_tokens + 1:
                patches_BnD = tokens[:, prefix_tokens:].float()
                self.cos_sim.add(layer, token_similarity(patches_BnD).item(), len(tokens))

        return hook

    def map_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, maps: Tensor) -> None:
            if maps.ndim == 4:
                self.attention_std.add(layer, attention_std(maps.float()).item(), len(maps))

        return hook


@contextmanager
def layer_probe(model: nn.Module) -> Iterator[LayerProbe]:
    """Watch the blocks of a timm-style transformer; fused attention is off meanwhile, since it hides its maps."""
    probe, handles, fused = LayerProbe(), [], []
    prefix_tokens = getattr(model, "num_prefix_tokens", 0)
    try:
        for layer, block in enumerate(getattr(model, "blocks", ())):
            handles.append(block.register_forward_hook(probe.block_hook(layer, prefix_tokens)))
            attention: Any = getattr(block, "attn", None)
            if not isinstance(getattr(attention, "attn_drop", None), nn.Module):
                continue
            handles.append(attention.attn_drop.register_forward_hook(probe.map_hook(layer)))
            if getattr(attention, "fused_attn", False):
                fused.append(attention)
                attention.fused_attn = False
        yield probe
    finally:
        for handle in handles:
            handle.remove()
        for attention in fused:
            attention.fused_attn = True
