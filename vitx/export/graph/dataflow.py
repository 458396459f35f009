"""The dataflow of an ONNX graph: nodes, constants, the readers, types and shapes of its tensors. Read only."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed, InputError

# In bytes: protobuf writes no larger message, and ONNX Runtime and TensorRT are given a graph as one.
MOST_BYTES = 2**31 - 1
STANDARD = ("", "ai.onnx")
# What stands behind a tensor's name where an island of a half graph reads it in float32.
AS_FLOAT = "as float"
# Bytes of a constant that may say a shape: infer_shapes reads its values.
LARGEST_SHAPE = 1024
# Of the half types a constant may be infinite: it was beyond the type when it was lowered, and the logits tell.
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)


class Dataflow:
    """A graph taken apart: uniquely named nodes, constants, inferred element types and shapes.

    `assemble` makes a graph of other nodes and constants with the same inputs, outputs and metadata. Raises
    CheckFailed, naming the tensor or the node, for a frozen batch, for weights that are sparse or not finite, and for a
    branch or a loop; InputError for a constant whose bytes are not of its type and shape.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.opset = opset_of(model)
        given = inputs_of(model.graph)
        _require_dynamic_batch(given, model.graph.output)
        _require_one_graph(model.graph)
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        _require_values(self.constants)
        self.nodes = _named(model.graph.node)
        self.inputs = tuple(value.name for value in given)
        self.outputs = tuple(value.name for value in model.graph.output)
        self.types, self.shapes = _types_and_shapes(model)
        # Everything but nodes and constants: `assemble` must not copy the weights once more for every candidate.
        self._skeleton = onnx.ModelProto(
            # Until IR 3 every constant had to be an input too.
            ir_version=max(model.ir_version, 4),
            opset_import=model.opset_import,
            metadata_props=model.metadata_props,
            producer_name=model.producer_name,
            producer_version=model.producer_version,
            functions=model.functions,
            graph=onnx.GraphProto(name=model.graph.name, input=given, output=model.graph.output),
        )

    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each tensor, in order."""
        found: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                found[name].append(node)
        return found

    def producers(self) -> dict[str, onnx.NodeProto]:
        """The node that makes each tensor."""
        return {name: node for node in self.nodes for name in node.output if name}

    def depends_on_input(self) -> set[str]:
        """The tensors whose values differ from image to image."""
        varying = set(self.inputs)
        for node in self.nodes:
            # A shape is the same for every image of a batch, and so is everything computed from it.
            if node.op_type not in ("Shape", "Size") and varying.intersection(node.input):
                varying.update(filter(None, node.output))
        return varying

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self.constants, *self.inputs, *self.producers()}

    def is_float(self, name: str) -> bool:
        """Whether a tensor is float32."""
        return self.types.get(name) == TensorProto.FLOAT

    def array(self, name: str) -> npt.NDArray[Any]:
        """The value of a constant."""
        return numpy_helper.to_array(self.constants[name])

    def assemble(
        self, nodes: Iterable[onnx.NodeProto], new_constants: Mapping[str, TensorProto] | None = None
    ) -> onnx.ModelProto:
        """A graph of `nodes`, in their order, with the constants that they read and no others."""
        model = deepcopy(self._skeleton)
        model.graph.node.extend(nodes)
        used = {name for node in model.graph.node for name in node.input}
        constants = {**self.constants, **(new_constants or {})}
        model.graph.initializer.extend(tensor for name, tensor in constants.items() if name in used)
        return model


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read a graph with its weights; raise InputError for a file that holds none, or more than one message can."""
    try:
        model = onnx.load(str(path), format="protobuf")
    except (onnx.checker.ValidationError, ValueError) as error:  # of a file beside it
        raise InputError(f"'{path}' has weights in another file, which cannot be read: {error}") from None
    except Exception as error:
        if type(error).__name__ != "DecodeError":  # protobuf's own, under a name that differs between its versions
            raise
        raise InputError(f"'{path}' is not an ONNX graph: {error}") from None
    if not model.opset_import:  # no bytes at all are a message too
        raise InputError(f"'{path}' is not an ONNX graph: it is of no operator set")
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size > MOST_BYTES:
        raise InputError(
            f"'{path}' has {size / 1e9:.1f} GB of weights: expected {MOST_BYTES / 1e9:.1f} GB at most, which one "
            "message of protobuf holds; take a smaller network"
        )
    return model


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operator set; raise InputError for a graph of others alone."""
    found = {entry.domain: int(entry.version) for entry in model.opset_import}
    for domain in STANDARD:
        if domain in found:
            return found[domain]
    others = ", ".join(found) or "none"
    raise InputError(f"the graph is of the operator sets {others}: expected ONNX's own, ai.onnx, beside them")


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """What the graph must be given: an input that is a constant too, as all were until IR 3, has its value."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def reads(node: onnx.NodeProto) -> set[str]:
    """The tensors that a node reads, also those of the graph around it that a branch or a loop's body reads."""
    found = set(filter(None, node.input))
    for given in node.attribute:
        for inner in (given.g, *given.graphs):
            own = {value.name for value in (*inner.input, *inner.initializer)}
            own.update(name for each in inner.node for name in each.output)
            found |= set().union(*map(reads, inner.node)) - own
    return found


def free_tag(tag: str, parts: Collection[str], taken: set[str]) -> str:
    """The tag, changed until no tensor is called `tag/part`; these are `taken` then. A graph's own names may be any."""
    while not taken.isdisjoint(names := {f"{tag}/{part}" for part in parts}):
        tag += "/again"
    taken |= names
    return tag


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    for given in node.attribute:
        if given.name == name:
            return helper.get_attribute_value(given)
    return default


def named_tensor(name: str, value: npt.NDArray[Any]) -> TensorProto:
    # ascontiguousarray makes a scalar one-dimensional, so its shape is put back.
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)


def cast(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{source} to {target}", to=to)


def _named(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Copies of the nodes, each with a unique name: precisions are chosen node by node, by name."""
    seen: set[str] = set()
    copies = []
    for index, node in enumerate(nodes):
        copy = deepcopy(node)
        copy.name = node.name or f"{node.op_type}_{index}"
        while copy.name in seen:
            copy.name = f"{copy.name}_{index}"
        seen.add(copy.name)
        copies.append(copy)
    return copies


def _require_values(constants: Mapping[str, TensorProto]) -> None:
    for name, tensor in constants.items():
        try:
            value = numpy_helper.to_array(tensor)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the constant '{name}' does not hold what its type and shape say ({error}): write the graph again"
            ) from None
        if tensor.data_type in FLOATS:
            bad = int(value.size - np.count_nonzero(np.isfinite(value)))
            if bad and bad == np.count_nonzero(value == -np.inf):
                raise CheckFailed(
                    f"the constant '{name}' holds {bad} of {value.size} values of -inf, as a mask does: a lower "
                    "precision is measured on finite values alone; mask with -1e4, or export in fp32"
                )
            if bad:
                raise CheckFailed(
                    f"the weights '{name}' hold {bad} of {value.size} values that are NaN or infinite: no precision "
                    "can hold them; look at the checkpoint they come from"
                )


def _require_dynamic_batch(inputs: Iterable[onnx.ValueInfoProto], outputs: Iterable[onnx.ValueInfoProto]) -> None:
    for value in (*inputs, *outputs):
        shape = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and (not shape or shape[0].HasField("dim_value")):
            given = shape[0].dim_value if shape else "a single number"
            raise CheckFailed(
                f"the batch of '{value.name}' is frozen ({given}): trace the graph with a dynamic batch, its precision "
                "is measured on batches of several sizes"
            )


def _require_one_graph(graph: onnx.GraphProto) -> None:
    """Refuse what the lists of inputs and constants leave out: what a graph within a node reads, a sparse constant."""
    for sparse in graph.sparse_initializer:
        raise CheckFailed(
            f"the constant '{sparse.values.name}' is sparse, which no lower precision is written into: export in fp32, "
            "or write it as a dense one"
        )
    for node in graph.node:
        if any(given.HasField("g") or given.graphs for given in node.attribute):
            raise CheckFailed(
                f"the node '{node.name or node.output[0]}' is a branch or a loop ({node.op_type}), which no lower "
                "precision is written into: export in fp32, or take a network without one"
            )


def _types_and_shapes(model: onnx.ModelProto) -> tuple[dict[str, int], dict[str, tuple[int | None, ...]]]:
    """Element type and shape (None for a dynamic size) of every tensor for which shape inference finds them."""
    # Recorded shapes may be stale (the exporter transposes a weight and keeps its old shape), so all are inferred. Of
    # weights type and shape are enough, and a graph of 90 MB takes half a second less.
    weights = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) > LARGEST_SHAPE]
    declared = (helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in weights)
    bare = onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=onnx.GraphProto(
            name=model.graph.name,
            node=model.graph.node,
            input=[*model.graph.input, *declared],
            output=model.graph.output,
            initializer=[tensor for tensor in model.graph.initializer if len(tensor.raw_data) <= LARGEST_SHAPE],
        ),
    )
    graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    shapes: dict[str, tuple[int | None, ...]] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return types, shapes
