"""What onnxslim and onnxsim, two simplifiers of ONNX graphs, still find to remove from a graph."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx

# Operators that only rename a shape: a runtime computes and writes nothing for them.
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
SIMPLIFIERS = ("onnxslim", "onnxsim")


def compute_nodes(model: onnx.ModelProto) -> Counter[str]:
    """Nodes by operator, without views."""
    return Counter(node.op_type for node in model.graph.node if node.op_type not in VIEWS)


def simplified(name: str, model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that a simplifier makes of a copy of `model`; raise ImportError where it is not installed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    simplify: dict[str, Callable[[onnx.ModelProto], Any]] = {"onnxslim": _onnxslim, "onnxsim": _onnxsim}
    result: onnx.ModelProto = simplify[name](copy)
    return result


def removed_by(name: str, model: onnx.ModelProto) -> dict[str, int]:
    """How many compute nodes of each operator the simplifier removes; negative where it adds some."""
    before, after = compute_nodes(model), compute_nodes(simplified(name, model))
    return {each: before[each] - after[each] for each in sorted({*before, *after}) if before[each] != after[each]}


def _onnxslim(model: onnx.ModelProto) -> Any:
    import onnxslim

    return onnxslim.slim(model)


def _onnxsim(model: onnx.ModelProto) -> Any:
    import onnxsim

    return onnxsim.simplify(model)[0]
