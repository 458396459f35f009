"""How alike a network's tokens are, layer by layer, in one pass over the images that holds one batch at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from timm.models.crossvit import CrossVit
from torch import Tensor, nn

from vitx.models.attention_maps import attention_layers, attention_maps
from vitx.models.similarity import attention_std, token_similarity


class LayerMeans:
    """The mean over all images of one number a layer; batches may differ in size."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._images: dict[str, int] = {}

    def add(self, layer: str, value: float, images: int) -> None:
        """Add `value`, the mean over a batch of `images` images."""
        self._sums[layer] = self._sums.get(layer, 0.0) + value * images
        self._images[layer] = self._images.get(layer, 0) + images

    def means(self) -> dict[str, float]:
        """Layer name → mean, in the order of the layers."""
        return {layer: total / self._images[layer] for layer, total in self._sums.items()}


class LayerMetrics:
    """What `layer_metrics` collects: token similarity of each block's output, attention std of each attention."""

    def __init__(self) -> None:
        self.cos_sim, self.attention_std = LayerMeans(), LayerMeans()


@contextmanager
def layer_metrics(model: nn.Module) -> Iterator[LayerMetrics]:
    """Measure every block of a timm-style transformer during the forward passes inside the `with` block.

    A network without such blocks, or without observable attention, leaves the metrics empty. Everything is restored.
    """
    metrics = LayerMetrics()
    with ExitStack() as restore:
        for index, block in enumerate(getattr(model, "blocks", ())):
            hook = _similarity_hook(metrics.cos_sim, f"blocks.{index}", model)
            restore.callback(block.register_forward_hook(hook).remove)
        if attention_layers(model):
            collected = restore.enter_context(attention_maps(model, of=_std_and_images))
            restore.callback(model.register_forward_hook(_std_hook(metrics.attention_std, collected)).remove)
        yield metrics


def tokens_before_patches(model: nn.Module, stream: Tensor) -> int:
    """How many tokens of a stream (B, N, D) are no patches: CaiT, XCiT and ConViT add theirs behind some blocks."""
    if isinstance(model, CrossVit):
        return 1  # each branch has a class token of its own
    if stream.shape[1] == getattr(getattr(model, "patch_embed", None), "num_patches", None):
        return 0
    return int(getattr(model, "num_prefix_tokens", getattr(model, "num_tokens", 0)))  # the latter is PiT's


def _similarity_hook(means: LayerMeans, layer: str, model: nn.Module) -> Callable[..., None]:
    def hook(_block: nn.Module, _inputs: Any, tokens_BND: Any) -> None:
        if not isinstance(tokens_BND, Tensor) or tokens_BND.ndim != 3:  # TNT's blocks give two streams
            return
        patches_BnD = tokens_BND[:, tokens_before_patches(model, tokens_BND) :].float()
        if patches_BnD.shape[1] > 1:
            means.add(layer, token_similarity(patches_BnD).item(), len(tokens_BND))

    return hook


def _std_and_images(maps_BHNN: Tensor) -> tuple[float, int]:
    return attention_std(maps_BHNN.float()).item(), len(maps_BHNN)


def _std_hook(means: LayerMeans, collected: dict[str, tuple[float, int]]) -> Callable[..., None]:
    def hook(*_ignored: Any) -> None:
        for layer, (value, images) in collected.items():
            means.add(layer, value, images)

    return hook
