"""The layers of a plan as it was built: what was fused into each, and the types and shapes that it reads and writes.

The engine inspector opens a plan on its GPU only. TensorRT for RTX also logs the table when it has compiled a plan,
which needs no GPU; one table stands for all architectures of a build.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from vitx.export.graph.dataflow import AS_FLOAT

TABLE = "Layers:\n"
# Types by the log's names, and bytes of a number.
TYPES = {"Float": "fp32", "Half": "fp16", "BFloat16": "bf16", "Int8": "int8", "FP8": "fp8", "UInt8": "uint8"}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1, "uint8": 1, "Int64": 8, "Int32": 4, "Bool": 1}
# Waiting for another stream, and arithmetic of shapes on the host.
_NO_KERNELS = ("wait", "signal", "shape_call", "reshape", "cast")
_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: (?P<inputs>\[.*?\]), Constants: (?P<constants>\[.*?\]), "
    r"Outputs: (?P<outputs>\[.*\]), TacticName: .*?Metadata: ?(?P<metadata>.*)$"
)
_TENSOR = re.compile(r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dims>[-\d,]*)\].*?Datatype: (?P<type>\w+)")
_PROFILE = re.compile(r"_myl(\d+)_\d+$")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


class Tensor(NamedTuple):
    """An operand of a fused layer; -1 in the shape is the batch, or the batch times the tokens."""

    name: str
    type: str
    shape: tuple[int, ...]

    def bytes(self) -> int | None:
        """None for a dynamic shape, and for a type whose size is not known."""
        size = BYTES.get(self.type)
        return None if -1 in self.shape or size is None else math.prod(self.shape) * size

    def __str__(self) -> str:
        return f"{self.type}[{'x'.join('N' if size < 0 else str(size) for size in self.shape)}]"


class FusedLayer(NamedTuple):
    """A kernel of a plan. profile: counted from 0. nodes: of the ONNX graph, those it computes."""

    profile: int
    name: str
    kind: str
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[str, ...]

    def bytes(self) -> int | None:
        """Read and written, constants included, a tensor that is listed twice once; None if one has none."""
        sizes = [tensor.bytes() for tensor in dict.fromkeys((*self.inputs, *self.constants, *self.outputs))]
        return None if None in sizes else sum(filter(None, sizes))


def fused_layers(message: str) -> tuple[FusedLayer, ...]:
    """The layers with kernels of the table in a message of the builder; none if it has no table."""
    _, _, table = message.partition(TABLE)
    rows = map(_LAYER.match, table.splitlines())
    return tuple(_layer(row) for row in rows if row is not None and row["kind"] not in _NO_KERNELS)


def _layer(row: re.Match[str]) -> FusedLayer:
    profile = _PROFILE.search(row["name"])
    inputs, constants, outputs = (tuple(_tensors(row[part])) for part in ("inputs", "constants", "outputs"))
    nodes = tuple(dict.fromkeys(_NODE.findall(row["metadata"])))
    return FusedLayer(int(profile[1]) if profile else 0, row["name"], row["kind"], inputs, constants, outputs, nodes)


def _tensors(text: str) -> Iterator[Tensor]:
    for found in _TENSOR.finditer(text):
        dims = tuple(int(size) for size in found["dims"].split(",") if size)
        yield Tensor(found["name"], TYPES.get(found["type"], found["type"]), dims)


def count_types(layers: Iterable[FusedLayer]) -> dict[str, int]:
    """How many layers write each type, the most frequent first; of several outputs the first counts."""
    return dict(Counter(layer.outputs[0].type for layer in layers if layer.outputs).most_common())


def float_layers(
    layers: Iterable[FusedLayer], islands: Collection[str] = (), outputs: Collection[str] = ("logits",)
) -> tuple[FusedLayer, ...]:
    """The layers that write float32, and compute no node of `islands` and no cast for one.

    Not counted: the outputs of the plan, and the first half of a LayerNorm that is split into two kernels, which is
    float32 by its definition: it writes centred values and their variance, one number a row.
    """
    others = (layer for layer in layers if not (islands and _of_island(layer, islands)))
    return tuple(layer for layer in others if _writes_float(layer, outputs))


def _of_island(layer: FusedLayer, islands: Collection[str]) -> bool:
    return any(node in islands or node.endswith(f"/{AS_FLOAT}") for node in layer.nodes)


def _writes_float(layer: FusedLayer, outputs: Collection[str]) -> bool:
    written = [tensor for tensor in layer.outputs if tensor.type == "fp32"]
    variance = any(tensor.shape[-1:] == (1,) for tensor in written)
    return not variance and any(tensor.name.split(" [profile")[0] not in outputs for tensor in written)


def layers_as_text(layers: Sequence[FusedLayer]) -> str:
    """A table with a line for each layer, columns separated by tabs."""
    lines = ["profile\tkind\treads\tconstants\twrites\tbytes\tnodes\tlayer"]
    for layer in layers:
        operands = (" ".join(map(str, tensors)) for tensors in (layer.inputs, layer.constants, layer.outputs))
        size = layer.bytes()
        cells = (
            layer.profile,
            layer.kind,
            *operands,
            "" if size is None else size,
            " + ".join(layer.nodes),
            layer.name,
        )
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n"
