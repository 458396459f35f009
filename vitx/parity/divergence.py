"""Which layer diverges first: the residual stream of a graph against the network's, block by block.

A layer's *error* is ‖candidate − network‖ / ‖network‖ of its output; it grows through all layers that follow. Its *own*
error is what the layer adds itself: the network's block is run on the input of the candidate's block, so that a layer
is not blamed for an error in its input.

Shape letters: B batch, T tokens, D width, C classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor, nn

from vitx.core.bundle import Base, Precision
from vitx.core.certificate import TokenSimilarity
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.tolerance import SHARE_OF_STD, SIMILARITY_ALLOWED, allowed_logit_error
from vitx.export.graph.block_names import EMBEDDING, block_name
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import batches, logits_of, run_with_outputs
from vitx.export.options import Target
from vitx.export.precision.acceptance import Agreement, Bounds, agreement_of
from vitx.export.precision.half import HALVES, LARGEST, cpu_twin
from vitx.export.precision.lower import LowerPrecision, lower_precision
from vitx.models import image_tensor
from vitx.models.layer_metrics import tokens_before_patches
from vitx.models.similarity import token_similarity

LOGITS = "logits"
BATCH = 8
# A mistake in one weight explains a layer's own error if it leaves at most this share of it; and an earlier layer with
# as large a share of the largest own error has one too.
EXPLAINED = 0.1
NODES_NAMED = 5


@dataclass(frozen=True)
class LayerError:
    """One layer of a trace: relative errors, and CosSim of both models' patch tokens.

    own: None for the first layer and for one that cannot be run alone. CosSim: None for fewer than two patch tokens.
    """

    name: str
    error: float
    own: float | None
    similarity_reference: float | None = None
    similarity_candidate: float | None = None


@dataclass(frozen=True)
class Trace:
    """Error by layer on `images` images.

    culprit: the layer of the largest own error; None where the logits and CosSim are within the limits of a
    certificate. cause: the one weight that explains it, if one does.
    """

    images: int
    layers: tuple[LayerError, ...]
    culprit: str | None
    cause: str | None = None

    def __str__(self) -> str:
        named = self.culprit or max(_own_errors(self.layers))[1]
        layer = next(layer for layer in self.layers if layer.name == named)
        own = "" if layer.own is None else f", {layer.own:.3g} of it its own"
        numbers = f"relative error {layer.error:.3g}{own}"
        if self.culprit is None:
            images = counted(self.images, "image")
            return f"the layers agree on {images}, {BATCH} at a time: {named} adds most ({numbers})"
        most = layer.error if layer.own is None else layer.own
        before = _own_errors(self.layers) if math.isfinite(layer.error) else []  # else it is the first of those
        first = next((name for error, name in before if error >= EXPLAINED * most), named)
        how = "diverges first" if first == named else f"diverges most, {first} first"
        return f"{named} {how} ({numbers})" + ("" if self.cause is None else f": {self.cause}")


@dataclass(frozen=True)
class NodeError:
    """A node of a graph: the relative error of its result, and by how much that exceeds the error of its inputs."""

    name: str
    tensor: str
    error: float
    growth: float


@dataclass(frozen=True)
class Repair:
    """The smallest set of float32 islands found with which a lower precision passes, and the graph without and with."""

    islands: tuple[str, ...]
    before: Agreement
    after: Agreement


def graph_on_cpu(graph: onnx.ModelProto, precision: Precision) -> onnx.ModelProto:
    """What rounds on this CPU as `graph` says: of a half type its twin, for ONNX Runtime's CPU does not round."""
    halves = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    lowered = precision in HALVES or any(tensor.data_type in halves for tensor in graph.graph.initializer)
    return cpu_twin(graph) if lowered else graph


def require_block_names(graph: onnx.ModelProto, model: nn.Module) -> None:
    """Raise InputError unless the graph names the tensors between the network's blocks."""
    made = {name for node in graph.graph.node for name in node.output}
    missing = [name for name in _layer_names(model)[:-1] if name not in made]
    if missing:
        raise InputError(
            f"the graph has no tensor '{missing[0]}': it was exported before vitx named the tensors between blocks, or "
            "by another tool; export the run again to trace it"
        )


def check_layers(model: nn.Module, preprocessing: Preprocessing, graph: onnx.ModelProto, images: UInt8Array) -> None:
    """Raise the InputError of `trace_layers`, if it would, on few images uint8 (n, S, S, 3)."""
    require_block_names(graph, model)
    _Network(model, preprocessing).tensors(images)


def trace_layers(
    model: nn.Module,
    preprocessing: Preprocessing,
    graph: onnx.ModelProto,
    images: UInt8Array,
    *,
    precision: Precision = "fp32",
    own: bool = True,
) -> Trace:
    """Compare a graph with the network it was exported from, on prepared images uint8 (n, S, S, 3).

    Without `own` only errors and CosSim are measured: one pass of each model. Raises InputError for a network without
    `blocks`, and for a graph whose tensors between blocks have no names.
    """
    network = _Network(model, preprocessing)
    require_block_names(graph, model)
    sums = {name: _ErrorSums() for name in network.names}
    logits = []
    for expected, found in _tensors_of_both(network, graph, images, precision):
        logits.append((expected[LOGITS], found[LOGITS]))
        for name, value in found.items():
            sums[name].add(expected[name], value, tokens_before_patches(model, expected[name]))
        if own:
            for before, name in pairwise(network.names):
                sums[name].add_own(network.output(name, found[before]), found[name])
    layers = tuple(sums[name].result(name) for name in network.names)
    of_network, of_graph = (torch.cat(values) for values in zip(*logits, strict=True))
    culprit = None if _agree(layers, of_network, of_graph, precision) else _culprit(layers)
    cause = _weight_mistake(network, culprit, images, graph, precision) if own and culprit else None
    return Trace(len(images), layers, culprit, cause)


def compare_token_similarity(
    model: nn.Module,
    preprocessing: Preprocessing,
    graph: onnx.ModelProto,
    images: UInt8Array,
    *,
    precision: Precision = "fp32",
) -> TokenSimilarity:
    """CosSim by layer of a graph's patch tokens and of the network's (docs/maths.md §1.1).

    Raises what `trace_layers` does.
    """
    trace = trace_layers(model, preprocessing, graph, images, precision=precision, own=False)
    measured = [
        (layer.name, layer.similarity_reference, layer.similarity_candidate)
        for layer in trace.layers
        if layer.similarity_reference is not None and layer.similarity_candidate is not None
    ]
    return TokenSimilarity(
        images=len(images),
        layers=tuple(name for name, _, _ in measured),
        reference=tuple(before for _, before, _ in measured),
        candidate=tuple(after if math.isfinite(after) else 1.0 for _, _, after in measured),
        allowed=SIMILARITY_ALLOWED[precision],
    )


def has_blocks(model: nn.Module) -> bool:
    """Whether the network is a list of blocks, as timm's transformers are; Twins is a list of lists of them."""
    blocks = getattr(model, "blocks", None)
    nested = isinstance(blocks, nn.ModuleList) and any(isinstance(block, nn.ModuleList) for block in blocks)
    return isinstance(blocks, nn.Sequential | nn.ModuleList) and not nested


def node_errors(
    exact: onnx.ModelProto, candidate: onnx.ModelProto, images: UInt8Array, precision: Precision
) -> tuple[NodeError, ...]:
    """The five nodes of a lowered graph that add most error, worst first: it has the float32 graph's tensor names.

    images: uint8 (n, S, S, 3). A result that is not finite is an infinite error; of several such nodes the first in the
    graph's order leads, for a node that reads an infinite error adds none.
    """
    flow = Dataflow(exact)
    twin = graph_on_cpu(candidate, precision)
    made = {name for node in twin.graph.node for name in node.output}
    tensors = [name for node in flow.nodes for name in node.output if flow.is_float(name) and name in made]
    sums = {name: _ErrorSums() for name in tensors}
    for expected, found in zip(
        run_with_outputs(exact, tensors, images),
        run_with_outputs(twin, tensors, images, fused=precision != "fp8"),
        strict=True,
    ):
        for name in tensors:
            sums[name].add(torch.from_numpy(expected[name]), torch.from_numpy(found[name].astype(np.float32)))
    error = {name: sums[name].error for name in tensors}
    nodes = []
    for node in flow.nodes:
        for name in node.output:
            if name in error:
                error_read = max((error.get(source, 0.0) for source in node.input), default=0.0)
                growth = 0.0 if math.isinf(error_read) else error[name] - error_read
                nodes.append(NodeError(node.name, name, error[name], growth))
    return tuple(sorted(nodes, key=lambda node: -node.growth)[:NODES_NAMED])


def overflow_text(exact: onnx.ModelProto, tensor: str, images: UInt8Array, precision: Precision) -> str | None:
    """A sentence with a tensor's largest magnitude in float32, if the half type cannot hold it; None otherwise."""
    if precision not in HALVES:
        return None
    largest = max(float(np.abs(found[tensor]).max()) for found in run_with_outputs(exact, [tensor], images))
    limit = LARGEST[HALVES[precision]]
    if largest <= limit:
        return None
    return f"{precision} overflow: '{tensor}' reaches {largest:g} in float32 and {precision} ends at {limit:g}"


def repair(
    exact: onnx.ModelProto,
    candidate: onnx.ModelProto,
    precision: LowerPrecision,
    images: UInt8Array,
    evaluation: UInt8Array,
    *,
    target: Target = "cpu",
    base: Base = "fp32",
    quiet: bool = False,
) -> Repair:
    """The smallest set of float32 islands found that makes the float32 graph `exact` pass in `precision`.

    Searched on `images` (training), verified on `evaluation`: the search tests on those only graphs that passed on its
    own. Both uint8 (n, S, S, 3). Raises CheckFailed when nothing passes, with the numbers.
    """
    bounds = Bounds(SHARE_OF_STD[precision])
    expected = logits_of(exact, evaluation)

    def agreement(graph: onnx.ModelProto) -> Agreement:
        return agreement_of(expected, logits_of(graph_on_cpu(graph, precision), evaluation, fused=precision != "fp8"))

    lowered = lower_precision(
        exact,
        precision,
        images,
        target=target,
        base=base,
        accept=lambda graph: agreement(graph).within(bounds),
        quiet=quiet,
    )
    return Repair(lowered.islands, agreement(candidate), agreement(lowered.graph))


@dataclass
class _ErrorSums:
    """Sums over batches of a layer's squared error and squared norm, and of its images' CosSim of patch tokens."""

    squared_error: float = 0.0
    squared_own: float | None = None
    squared_norm: float = 0.0
    images: int = 0
    similarity: Tensor | None = None  # (2,): of the network and of the graph

    @property
    def error(self) -> float:
        return _ratio(self.squared_error, self.squared_norm)

    def add(self, expected: Tensor, found: Tensor, prefix_tokens: int | None = None) -> None:
        """Add a batch, both (B, T, D) or both of any other one shape.

        A last block that computes the class token alone has fewer tokens: the first ones are compared.
        prefix_tokens: how many tokens are no patches; None for no CosSim.
        """
        kept = expected[:, : found.shape[1]] if expected.ndim == 3 else expected
        self.squared_error += _squared(found.double() - kept)
        self.squared_norm += _squared(kept.double())
        if prefix_tokens is not None and found.ndim == 3 and found.shape[1] > prefix_tokens + 1:
            means = [float(token_similarity(tokens[:, prefix_tokens:])) for tokens in (expected, found)]
            total = len(found) * torch.tensor(means, dtype=torch.float64)
            self.similarity = total if self.similarity is None else self.similarity + total
        self.images += len(found)

    def add_own(self, exact: Tensor | None, found: Tensor) -> None:
        """Add a batch. exact: the network's layer on the input of the candidate's; None if it cannot be run alone."""
        if exact is not None:
            self.squared_own = (self.squared_own or 0.0) + _squared(found.double() - exact[:, : found.shape[1]])

    def result(self, name: str) -> LayerError:
        reference, candidate = (None, None) if self.similarity is None else (self.similarity / self.images).tolist()
        own = None if self.squared_own is None else _ratio(self.squared_own, self.squared_norm)
        return LayerError(name, self.error, own, reference, candidate)


def _layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names that an exported graph gives the embedding, each block's output and the logits."""
    if not has_blocks(model):
        raise InputError(f"{type(model).__name__} has no list of blocks to trace: layers cannot be compared")
    blocks: Any = model.blocks
    return (EMBEDDING, *map(block_name, range(len(blocks))), LOGITS)


class _Network:
    """The checkpoint's network: its tensors between blocks, and each layer on its own."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        self.names = _layer_names(model)
        self.model: Any = model.eval()
        self.preprocessing = preprocessing
        blocks: Any = model.blocks
        self.blocks: list[nn.Module] = list(blocks)
        # Of the images that `tensors` saw last: their pixels, and what each block reads beside its tokens (EVA02's
        # position angles, XCiT's height and width).
        self._pixels = torch.empty(0)
        self._beside: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @torch.inference_mode()
    def tensors(self, images: UInt8Array) -> dict[str, Tensor]:
        """Every named tensor of images uint8 (B, S, S, 3), float32: (B, T, D) or (B, D, H, W), the logits (B, C).

        Raises InputError for a network whose blocks do not each give one tensor, such as TNT.
        """
        found: dict[str, Any] = {}

        def keep_input(_block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[EMBEDDING] = inputs[0]

        def keep_output(name: str) -> Callable[..., None]:
            def keep(_block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
                found[name] = output
                self._beside[name] = (inputs[1:], options)

            return keep

        with ExitStack() as restore:
            restore.callback(self.blocks[0].register_forward_pre_hook(keep_input).remove)
            for name, block in zip(self.names[1:-1], self.blocks, strict=True):
                restore.callback(block.register_forward_hook(keep_output(name), with_kwargs=True).remove)
            pixels = image_tensor(images, self.preprocessing.mean, self.preprocessing.std)
            self._pixels = pixels.to(next(self.model.parameters()))
            found[LOGITS] = self.model(self._pixels)
        if not all(isinstance(found.get(name), Tensor) for name in self.names):
            raise InputError(
                f"the blocks of {type(self.model).__name__} do not each give one tensor: layers cannot be compared"
            )
        return {name: found[name].float().cpu() for name in self.names}

    @torch.inference_mode()
    def output(self, name: str, tokens: Tensor, changed: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """A layer's output on `tokens` (B, T, D), some of its weights `changed`; None where it cannot be run alone.

        tokens: of the images that `tensors` saw last. What follows the blocks needs all tokens unless it pools the
        class token.
        """
        tokens = tokens.to(next(self.model.parameters()))
        if name == LOGITS:
            if tokens.shape[1] == 1 and getattr(self.model, "global_pool", "") != "token":
                return None
            # The whole network: CaiT and XCiT have more than a norm and a head behind these blocks.
            replaced = self.blocks[-1].register_forward_hook(lambda *_: tokens)
            try:
                logits: Tensor = self.model(self._pixels)
            finally:
                replaced.remove()
            return logits.float().cpu()
        block = self.blocks[self.names.index(name) - 1]
        beside, options = self._beside[name]
        output: Tensor = torch.func.functional_call(block, dict(changed or {}), (tokens, *beside), options)
        return output.float().cpu()


def _tensors_of_both(
    network: _Network, graph: onnx.ModelProto, images: UInt8Array, precision: Precision
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield the network's tensors of a batch by name, and the graph's: (B, T, D), split again where it joins B and T.

    The graph's are in the shapes of the network's, where none of their values is left out.
    """
    (output,) = (value.name for value in graph.graph.output)
    watched = [*network.names[:-1], output]
    runs = run_with_outputs(graph_on_cpu(graph, precision), watched, images, BATCH, fused=precision != "fp8")
    for chunk, values in zip(batches(images, BATCH), runs, strict=True):
        tensors = [torch.from_numpy(value.astype(np.float32)) for value in values.values()]
        joined = [value.reshape(len(chunk), -1, value.shape[-1]) for value in tensors[:-1]]
        expected = network.tensors(chunk)
        found = {
            name: value.reshape(expected[name].shape) if value.numel() == expected[name].numel() else value
            for name, value in zip(network.names, (*joined, tensors[-1]), strict=True)
        }
        yield expected, found


def _agree(layers: tuple[LayerError, ...], expected: Tensor, found: Tensor, precision: Precision) -> bool:
    """Whether logits (N, C) and CosSim differ by no more than a certificate allows: no layer is wrong."""
    allowed = allowed_logit_error(precision, float(expected.std(correction=0)))
    both = [(layer.similarity_reference, layer.similarity_candidate) for layer in layers]
    moved = [abs(after - before) for before, after in both if before is not None and after is not None]
    most = SIMILARITY_ALLOWED[precision]
    return bool((found - expected).abs().max() <= allowed) and all(change <= most for change in moved)


def _culprit(layers: tuple[LayerError, ...]) -> str:
    """The first layer that is not finite, or the one with the largest error of its own."""
    for layer in layers:
        if not math.isfinite(layer.error):
            return layer.name
    return max(_own_errors(layers))[1]


def _own_errors(layers: tuple[LayerError, ...]) -> list[tuple[float, str]]:
    own = [(layer.own, layer.name) for layer in layers if layer.own is not None]
    # The embedding reads the image itself: its error is its own.
    return [(layers[0].error, layers[0].name), *own]


def _weight_mistake(
    network: _Network, culprit: str, images: UInt8Array, graph: onnx.ModelProto, precision: Precision
) -> str | None:
    """The weight of the culprit that, left out or transposed, makes the network compute what the candidate does."""
    if culprit in (EMBEDDING, LOGITS):
        return None
    index = network.names.index(culprit)
    _, found = next(_tensors_of_both(network, graph, images[:BATCH], precision))
    block_input, block_output = found[network.names[index - 1]], found[culprit]

    def own_error(changed: Mapping[str, Tensor]) -> float:
        exact = network.output(culprit, block_input, changed)
        assert exact is not None
        return _squared(block_output.double() - exact[:, : block_output.shape[1]])

    unchanged = own_error({})
    if not math.isfinite(unchanged):
        return None
    mistakes = _weight_mistakes(network.blocks[index - 1])
    errors = [(own_error({name: value}), mistake) for name, value, mistake in mistakes]
    error, mistake = min(errors, default=(unchanged, ""))
    return mistake if error <= EXPLAINED**2 * unchanged else None  # squared errors


def _weight_mistakes(block: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """(name, changed value, what was changed) of every weight that an exporter could have lost or transposed."""
    for name, value in block.named_parameters():
        if name.endswith("bias") and bool(value.any()):
            yield name, torch.zeros_like(value), f"bias dropped: {name}"
        # A matrix, or a 1×1 convolution, that is square: of another shape the transposed one would not run.
        square = value.ndim in (2, 4) and value.shape[0] == value.shape[1] and value[0, 0].numel() == 1
        if square:
            yield name, value.detach().transpose(0, 1).contiguous(), f"transposed: {name}"


def _squared(values: Tensor) -> float:
    """The sum of squares; infinite where a value is not finite."""
    total = float(values.double().square().sum())
    return total if math.isfinite(total) else math.inf


def _ratio(squared_error: float, squared_norm: float) -> float:
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else 0.0
