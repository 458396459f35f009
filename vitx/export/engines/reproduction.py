"""The reproduction of a crash: the smallest part of a graph that still crashes a conversion, and a script."""

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import shape_inference

from vitx.core.errors import CheckFailed, VitxError
from vitx.core.files import staged_folder, write_bytes
from vitx.core.sandbox import ConversionCrashed, LimitExceeded, run_limited
from vitx.export.graph.dataflow import reads

Convert = Callable[[Path], object]
_SCRIPT = """# Runs the conversion that crashed, on the smallest part of the graph that still crashes it.
{reason}

from pathlib import Path

from {module} import {function}

if __name__ == "__main__":
    {function}(Path(__file__).with_name("subgraph.onnx"))
"""


def write_reproduction(
    graph_path: Path, convert: Convert, folder: Path, reason: str, *, seconds: float, memory_gib: float
) -> onnx.ModelProto:
    """Bisect the graph that crashed `convert`; write `subgraph.onnx` and `reproduce.py` into `folder`.

    `convert` is a function at the top of a module. It is called with the path of a graph in a process of its own, which
    crashed unless it returned, raised a VitxError or exceeded a limit. Raises CheckFailed, and writes nothing, where
    the whole graph does not crash it: the system may have killed the process for memory, or options that `convert` does
    not have decide.
    """
    # A part of the graph needs the types of the tensors where it was cut.
    graph = shape_inference.infer_shapes(onnx.load(str(graph_path)))

    with staged_folder(folder) as stage:

        def crashes(first: int, last: int) -> bool:
            attempt = stage / "subgraph.onnx"
            write_bytes(attempt, subgraph(graph, first, last).SerializeToString())
            try:
                run_limited("bisecting", convert, attempt, seconds=seconds, memory_gib=memory_gib)
            except VitxError as error:
                return isinstance(error, ConversionCrashed) and not isinstance(error, LimitExceeded)
            return False

        count = len(graph.graph.node)
        if not crashes(0, count - 1):
            raise CheckFailed("with default options it did not crash again, so there is nothing to reproduce it with")
        first, last = smallest_range(count, crashes)
        found = subgraph(graph, first, last)
        write_bytes(stage / "subgraph.onnx", found.SerializeToString())
        # As comments: a traceback may hold quotation marks and backslashes, and paths that are not UTF-8.
        told = "\n".join(f"# {line}".rstrip() for line in reason.splitlines())
        script = _SCRIPT.format(
            reason=told, module=convert.__module__, function=getattr(convert, "__name__", "convert")
        )
        write_bytes(stage / "reproduce.py", script.encode(errors="backslashreplace"))
    return found


def smallest_range(nodes: int, crashes: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return (first, last) of a small range of nodes that crashes; the range of all nodes is known to crash.

    Bisects for the earliest end, then for the latest beginning. The range is the smallest if every range that contains
    a crashing one crashes too; if not, it may be larger than needed, but it has crashed when it was tried.
    """
    low, high = 0, nodes - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if crashes(0, middle) else (middle + 1, high)
    last = high
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if crashes(middle, last) else (low, middle - 1)
    return low, last


def subgraph(model: onnx.ModelProto, first: int, last: int) -> onnx.ModelProto:
    """Nodes `first` to `last` of a topologically sorted graph as a graph of their own.

    A tensor from outside that they read becomes an input; a tensor that none of them reads becomes an output.
    """
    graph = model.graph
    nodes = graph.node[first : last + 1]
    types = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
    made = {name for node in nodes for name in node.output if name}
    read = set[str]().union(*map(reads, nodes))
    outside = sorted(read - made - initializers.keys() - sparse.keys())
    ends = [name for node in nodes for name in node.output if name and name not in read]
    part = onnx.helper.make_graph(
        nodes,
        f"{graph.name}_{first}_{last}",
        [types.get(name, onnx.ValueInfoProto(name=name)) for name in outside],
        [types.get(name, onnx.ValueInfoProto(name=name)) for name in ends],
        initializer=[tensor for name, tensor in initializers.items() if name in read],
        sparse_initializer=[tensor for name, tensor in sparse.items() if name in read],
    )
    return onnx.helper.make_model(
        part, opset_imports=model.opset_import, ir_version=model.ir_version, functions=model.functions
    )
