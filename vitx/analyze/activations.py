"""One pass over the images that all metrics of activations share: memory is that of one batch.

Shape letters: B batch, N tokens, n patches, D width, H heads, C classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from timm.models.hiera import Hiera
from timm.models.nest import Nest
from torch import Tensor, nn

from vitx.analyze.spectrum import square_map
from vitx.analyze.units import Kind, Unit, residual_units, units_with_streams
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import require_finite
from vitx.data.image_set import ImageSet
from vitx.models import image_tensor
from vitx.models.attention_maps import attention_layers, attention_maps, mixes_heads
from vitx.models.layer_metrics import tokens_before_patches

EMBEDDING = "embedding"


class Layout(NamedTuple):
    """How a network's activations are laid out: which are NHWC maps, and whether its tokens are a square in rows."""

    model: nn.Module
    channels_last: frozenset[str]  # names of streams
    in_rows: bool
    layers: Mapping[str, str]  # stream → the block that it stands behind

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        units = units_with_streams(model)
        last = {unit.name for unit in units if unit.channels_last}
        if units and units[0].channels_last:
            last.add(EMBEDDING)
        layers = {EMBEDDING: EMBEDDING} | {unit.name: unit.layer for unit in units if unit.layer is not None}
        # Hiera's tokens follow its windows, and Nest's (B, windows, tokens, D) stay in them. Patches that are no
        # squares may be 8 rows of 2: as many as a square has.
        rows, columns = getattr(getattr(model, "patch_embed", None), "grid_size", None) or (1, 1)
        return cls(model, frozenset(last), rows == columns and not isinstance(model, Hiera | Nest), layers)

    def feature_map(self, name: str, stream: Tensor) -> Tensor | None:
        """The stream `name` as a map (B, D, S, S); None where its patches form no square."""
        if not self.in_rows:
            return None
        prefix = tokens_before_patches(self.model, stream)
        return square_map(stream, prefix, channels_last=name in self.channels_last)

    def patches(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Block → the patch tokens (B, n, D) behind it, of (B, N, D) or of a NHWC map; the embedding's first.

        Without NCHW maps, and fewer than two patches.
        """
        found = {}
        for name, layer in self.layers.items():
            stream = streams.get(name)
            if stream is not None and stream.ndim == 4 and name in self.channels_last:
                found[layer] = stream.flatten(1, 2)
            elif stream is not None and stream.ndim == 3:
                found[layer] = stream[:, tokens_before_patches(self.model, stream) :]
        return {layer: patches for layer, patches in found.items() if patches.shape[1] > 1}


class Activations(NamedTuple):
    """Float32 activations of one batch of `images` images.

    streams: the residual stream after each unit, by the unit's name. maps: softmax maps (B·W, H, N, N) by attention
    layer, with W windows an image, those of the first image first; `of_images` takes their mean. Maps of another form
    are left out. mixed: the maps that meet V, after the mix over heads and its norm; empty where no layer mixes.
    logits: (B, C). before: by the name of the first unit of a block, the block's input where something stands between
    it and the stream after the unit before: MaxViT's MBConv, Twins' position encoding, the merging of a new stage.
    """

    images: int
    streams: dict[str, Tensor]
    maps: dict[str, Tensor]
    mixed: dict[str, Tensor]
    logits: Tensor
    before: Mapping[str, Tensor] = MappingProxyType({})

    def stream_before(self, unit: str, previous: str) -> Tensor | None:
        """The stream that the first unit of a block adds to; previous: the name of the stream before it."""
        return self.before.get(unit, self.streams.get(previous))


def stream_activations(
    model: nn.Module,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    batch_size: int = 16,
    streams: bool = True,
    maps: bool = True,
    mixed: bool = False,
) -> Iterator[Activations]:
    """Run `model` over `images` in evaluation mode without gradients and yield each batch's float32 activations.

    The tensors are the network's own: a caller reads them and does not write. Modes and hooks are as before
    afterwards, also when the loop is left early.
    """
    parameter = next(model.parameters())  # pixels are of its device and dtype
    found: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    with ExitStack() as restore:
        restore.enter_context(in_evaluation_mode(model))
        if streams:
            _watch_streams(model, found, before, restore)
        layers = attention_layers(model).values()
        softmax = restore.enter_context(attention_maps(model)) if maps and layers else {}
        mixes = mixed and any(map(mixes_heads, layers))
        after_mix = restore.enter_context(attention_maps(model, stage="mixed")) if mixes else {}
        for pixels in images.batches(preprocessing, batch_size):
            found.clear()
            before.clear()
            with torch.inference_mode():
                logits = model(image_tensor(pixels, preprocessing.mean, preprocessing.std).to(parameter))
            require_finite(logits.float().cpu().numpy())
            maps_of = _whole_maps(softmax, len(pixels)), _whole_maps(after_mix, len(pixels))
            yield Activations(len(pixels), _as_float(found), *maps_of, logits.float(), _as_float(before))


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without autocast inside the block; modes and a caller's autocast are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def differentiating_only(model: nn.Module, chosen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside the block gradients are taken, whatever mode the caller is in, and of the chosen parameters alone.

    Afterwards `requires_grad` is what it was.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with torch.inference_mode(False), torch.enable_grad():
        try:
            for parameter, _ in before:
                parameter.requires_grad_(False)
            for parameter in chosen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter, required in before:
                parameter.requires_grad_(required)


def stream_order(model: nn.Module) -> list[str]:
    """The names of `Activations.streams`, in the order of the network."""
    return [EMBEDDING, *(unit.name for unit in units_with_streams(model))]


def _watch_streams(model: nn.Module, found: dict[str, Tensor], before: dict[str, Tensor], restore: ExitStack) -> None:
    units = units_with_streams(model)
    if not units:
        return

    def keep_embedding(_block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[EMBEDDING] = inputs[0]

    first = units[0].block
    assert first is not None, "the first unit of a block adds to the block's input"
    restore.callback(first.register_forward_pre_hook(keep_embedding).remove)
    previous = EMBEDDING
    for unit in units:
        assert unit.stream_module is not None, "of a unit with a stream"
        if unit.block is not None:
            keep_input = _input_recorder(unit.name, previous, found, before)
            restore.callback(unit.block.register_forward_pre_hook(keep_input).remove)
        previous = unit.name
        keep = _recorder(unit, found)
        if unit.stream_from == "input":
            restore.callback(unit.stream_module.register_forward_pre_hook(keep).remove)
        else:
            restore.callback(unit.stream_module.register_forward_hook(keep).remove)


def _recorder(unit: Unit, found: dict[str, Tensor]) -> Callable[..., None]:
    """A hook that keeps the stream after `unit`: a forward pre-hook if it is a module's input, else a forward hook."""

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Any = None) -> None:
        stream = inputs[0] if unit.stream_from == "input" else output
        found[unit.name] = stream if unit.scale == 1.0 else stream / unit.scale

    return keep


def _input_recorder(
    name: str, previous: str, found: dict[str, Tensor], before: dict[str, Tensor]
) -> Callable[..., None]:
    """A forward pre-hook that keeps a block's input, unless it is the stream `previous` itself, already kept."""

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is not found.get(previous):
            before[name] = inputs[0]

    return keep


def _as_float(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in tensors.items()}


def _whole_maps(maps: dict[str, Tensor], images: int) -> dict[str, Tensor]:
    return _as_float({name: value for name, value in maps.items() if value.ndim == 4 and len(value) % images == 0})


def unit_kinds(model: nn.Module) -> dict[str, Kind | None]:
    """The kind of each unit in the order of the network; None for the embedding."""
    return {EMBEDDING: None, **{unit.name: unit.kind for unit in residual_units(model)}}
