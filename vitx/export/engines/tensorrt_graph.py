"""Exact changes of an ONNX graph that TensorRT's parser needs, made in memory before it is parsed."""

import math
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from vitx.core.errors import InputError
from vitx.export.graph.dataflow import STANDARD, attribute, free_tag, read_onnx, reads

# Operators that move elements and compute nothing: they commute with a cast.
_MOVES = ("Transpose", "Reshape")
_NAMES = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
}


def load_for_tensorrt(path: Path) -> onnx.ModelProto:
    """Read an ONNX file and return a graph that TensorRT parses; the file is not changed.

    TensorRT takes uint8 as a network input only, so the cast moves before the transposition of the pixels. `Attention`
    (opset 23) is written out as MatMul, Softmax, MatMul, which TensorRT fuses into one kernel where it has one: the
    node itself is refused in fp32, and TensorRT-RTX 1.7 dies of SIGSEGV when it builds one without a GPU, in any
    precision. Raises InputError if the file is no ONNX graph or has an `Attention` with a mask, a cache or a soft cap.
    """
    try:
        model = read_onnx(path)
    except FileNotFoundError:
        raise InputError(f"no ONNX graph at '{path}'") from None
    cast_before_moving(model.graph)
    write_attention_out(model)
    return model


def cast_before_moving(graph: onnx.GraphProto) -> int:
    """Swap uint8 → move → Cast to uint8 → Cast → move, the same function; return how many were swapped."""
    unsigned = {value.name for value in graph.input if value.type.tensor_type.elem_type == TensorProto.UINT8}
    taken, swapped = _tensor_names(graph), 0
    while (pair := _next_pair(graph, unsigned)) is not None:
        move, cast = pair
        source, result = move.input[0], cast.output[0]
        kind = helper.tensor_dtype_to_string(attribute(cast, "to", 0)).rpartition(".")[2].lower()
        form = f"as {kind}"
        between = f"{free_tag(source, (form,), taken)}/{form}"
        cast.input[0], cast.output[0] = source, between
        move.input[0], move.output[0] = between, result
        nodes = list(graph.node)
        nodes.remove(cast)
        nodes.insert(nodes.index(move), cast)
        del graph.node[:]
        graph.node.extend(nodes)
        swapped += 1
    return swapped


def _next_pair(graph: onnx.GraphProto, unsigned: set[str]) -> tuple[NodeProto, NodeProto] | None:
    """A move of a uint8 graph input, and the Cast that alone reads its result; None when there is no such pair."""
    outputs = {value.name for value in graph.output}
    for move in graph.node:
        if move.op_type in _MOVES and move.input[0] in unsigned and move.output[0] not in outputs:
            readers = [node for node in graph.node if move.output[0] in reads(node)]
            if len(readers) == 1 and readers[0].op_type == "Cast":
                return move, readers[0]
    return None


# Attributes of an Attention at the values that change nothing; PyTorch's exporter writes them all.
_UNUSED = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0}


def write_attention_out(model: onnx.ModelProto) -> int:
    """Replace each plain `Attention` of (B, H, N, d) tensors by softmax(scale·q kᵀ) v; return how many."""
    found = [node.op_type == "Attention" and node.domain in STANDARD for node in model.graph.node]
    if not any(found):
        return 0
    types, taken = _value_types(model), _tensor_names(model.graph)
    nodes: list[NodeProto] = []
    for node, is_attention in zip(model.graph.node, found, strict=True):
        nodes.extend(_written_out(node, types, model.graph, taken) if is_attention else [node])
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return sum(found)


def _tensor_names(graph: onnx.GraphProto) -> set[str]:
    """Of all tensors of the graph, and what graphs within its nodes read of them."""
    named = (*graph.input, *graph.initializer)
    return {value.name for value in named} | {name for node in graph.node for name in (*node.output, *reads(node))}


def _value_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}


def _written_out(
    node: NodeProto, types: dict[str, onnx.TypeProto.Tensor], graph: onnx.GraphProto, taken: set[str]
) -> list[NodeProto]:
    given = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    attributes = {name: value for name, value in given.items() if _UNUSED.get(name) != value}
    query, key, value = node.input[:3]
    kind = types.get(query)
    head = kind.shape.dim[3].dim_value if kind is not None and len(kind.shape.dim) == 4 else 0
    # Keys and values of fewer heads are repeated for groups of queries; those of one head are a plain broadcast.
    heads = {types[name].shape.dim[1].dim_value for name in node.input[:3] if name in types and head}
    plain = (
        not any(node.input[3:]) and not any(node.output[1:]) and not attributes.keys() - {"scale", "TRT_decomposable"}
    )
    if kind is None or not head or not plain or len(heads - {1}) > 1:
        raise InputError(
            f"node '{node.name}' is an Attention that vitx cannot write out: expected (B, H, N, d) tensors "
            "with a known d and one H, no mask, no cache; export with attention as MatMul and Softmax"
        )
    name = node.output[0]  # unique, as the names of nodes need not be
    tag = free_tag(name, ("scale", "query", "key", "scores", "maps"), taken)
    factor = numpy_helper.from_array(
        helper.tensor_dtype_to_np_dtype(kind.elem_type).type(attributes.get("scale", 1 / math.sqrt(head))),
        f"{tag}/scale",
    )
    graph.initializer.append(factor)
    # The scale is on the query alone: TensorRT 10.7 computed the form with √scale on both sides wrongly
    # (github.com/NVIDIA/TensorRT/issues/4328).
    return [
        helper.make_node("Mul", [query, factor.name], [f"{tag}/query"], name=f"{name}_scale_query"),
        helper.make_node("Transpose", [key], [f"{tag}/key"], name=f"{name}_transpose_key", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [f"{tag}/query", f"{tag}/key"], [f"{tag}/scores"], name=f"{name}_scores"),
        helper.make_node("Softmax", [f"{tag}/scores"], [f"{tag}/maps"], name=f"{name}_softmax", axis=-1),
        helper.make_node("MatMul", [f"{tag}/maps", value], [name], name=f"{name}_values"),
    ]


def precision_of(model: onnx.ModelProto) -> str:
    """The types of weights with two or more dimensions, most bytes first: "fp16", "fp16, fp32", "int8, fp16"."""
    weight: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if len(tensor.dims) >= 2 and tensor.data_type in _NAMES:
            name, size = _NAMES[tensor.data_type], helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            weight[name] = weight.get(name, 0) + size * math.prod(tensor.dims)
    return ", ".join(sorted(weight, key=lambda name: -weight[name])) or "none"
