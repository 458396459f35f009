"""A crashed conversion leaves the smallest part of the graph that still crashes, and a script that runs it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import vitx.export.engines.targets as targets
from sandbox_jobs import crash_on_gelu, hang
from vitx.core.errors import CheckFailed, InputError
from vitx.core.sandbox import ConversionCrashed, LimitExceeded
from vitx.export.engines import reproduction
from vitx.export.engines.reproduction import smallest_range, subgraph, write_reproduction


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Twelve Relus with a product and a Gelu in the middle."""
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(6)]
    nodes.append(helper.make_node("MatMul", ["t6", "weight"], ["t7"]))
    nodes.append(helper.make_node("Gelu", ["t7"], ["t8"]))
    nodes += [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(8, 14)]
    made = helper.make_graph(
        nodes,
        "middle",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("t14", TensorProto.FLOAT, ["N", 4])],
        initializer=[helper.make_tensor("weight", TensorProto.FLOAT, [4, 4], [0.1] * 16)],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_the_smallest_part_that_crashes(graph: Path, tmp_path: Path) -> None:
    found = write_reproduction(graph, crash_on_gelu, tmp_path / "failed", "it died", seconds=60, memory_gib=8)
    assert [node.op_type for node in found.graph.node] == ["MatMul", "Gelu"]
    assert sorted(path.name for path in (tmp_path / "failed").iterdir()) == ["reproduce.py", "subgraph.onnx"]
    onnx.checker.check_model(str(tmp_path / "failed" / "subgraph.onnx"), full_check=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    finished = subprocess.run(
        [sys.executable, str(tmp_path / "failed" / "reproduce.py")], env=environment, capture_output=True, check=False
    )
    assert finished.returncode == -signal.SIGSEGV


def test_a_crash_that_does_not_come_again_is_not_reproduced(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system killed the process for memory: no part of the graph is to blame, and none is written."""
    monkeypatch.setitem(targets.CONVERT, "openvino", os.path.getsize)
    with pytest.raises(ConversionCrashed, match=r"^openvino died of SIGSEGV; with default options it did not crash ag"):
        targets.convert_limited(
            *("openvino", crash_on_gelu, graph), failed=tmp_path / "failed", seconds=60, memory_gib=8
        )
    assert [*tmp_path.iterdir()] == [graph]


@pytest.mark.parametrize(("seconds", "allowed"), [(60, 60), (5000, 300)])
def test_what_a_crash_leaves_is_said(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, allowed: float
) -> None:
    """A part is tried for five minutes at most, however long the conversion may take, and as the script runs it."""
    asked: list[tuple[object, ...]] = []

    def run(title: str, convert: object, path: Path, *rest: object, **limits: float) -> None:
        asked.append((title, convert, rest, limits))
        if "Gelu" in {node.op_type for node in onnx.load(str(path)).graph.node}:
            raise ConversionCrashed("it died")

    for module in (targets, reproduction):
        monkeypatch.setattr(module, "run_limited", run)
    failed = tmp_path / "failed"
    said = f"it died; a graph of 1 node that does the same, and a script that shows it, are in {failed}"
    with pytest.raises(ConversionCrashed, match=f"^{re.escape(said)}$"):
        targets.convert_limited("tensorrt", hang, graph, "more", failed=failed, seconds=seconds, memory_gib=8)
    assert asked[0] == ("tensorrt", hang, ("more",), {"seconds": seconds, "memory_gib": 8})
    tried = ("bisecting", targets.convert_tensorrt, (), {"seconds": allowed, "memory_gib": 8})
    assert len(asked) > 2
    assert asked[1:] == [tried] * len(asked[1:])


def test_a_limit_that_is_exceeded_is_no_crash(graph: Path, tmp_path: Path) -> None:
    """Every part would exceed it too, and the script, which has no limits, would show nothing."""
    with pytest.raises(
        LimitExceeded, match=r"^openvino took longer than its limit of 0\.3 s and was ended: allow it mo"
    ):
        targets.convert_limited("openvino", hang, graph, failed=tmp_path / "failed", seconds=0.3, memory_gib=8)
    assert [*tmp_path.iterdir()] == [graph]


@pytest.mark.parametrize("other", [LimitExceeded, InputError, None])
def test_only_a_crash_is_looked_for(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: type[Exception] | None
) -> None:
    """Parts with the product alone end in another way; the whole crashes."""
    asked: list[object] = []

    def run(title: str, convert: object, path: Path, **limits: float) -> None:
        asked.append((title, convert, limits))
        kinds = {node.op_type for node in onnx.load(str(path)).graph.node}
        if "Gelu" in kinds:
            raise ConversionCrashed("it died")
        if "MatMul" in kinds and other is not None:
            raise other("something else")

    monkeypatch.setattr(reproduction, "run_limited", run)
    reason = 'it died: """\n\n  C:\\Users\\new and caf\udce9'
    found = write_reproduction(graph, hang, tmp_path / "failed", reason, seconds=60, memory_gib=8)
    assert [node.op_type for node in found.graph.node] == ["Gelu"]
    assert found == onnx.load(str(tmp_path / "failed" / "subgraph.onnx"))
    assert asked[0] == ("bisecting", hang, {"seconds": 60, "memory_gib": 8})
    script = (tmp_path / "failed" / "reproduce.py").read_text()
    compile(script, "reproduce.py", "exec")
    assert '# it died: """\n#\n#   C:\\Users\\new and caf\\udce9\n' in script
    assert "from sandbox_jobs import hang\n" in script
    monkeypatch.setattr(reproduction, "run_limited", lambda *given, **limits: None)
    with pytest.raises(
        CheckFailed, match=r"^with default options it did not crash again, so there is nothing to repro"
    ):
        write_reproduction(graph, hang, tmp_path / "other", reason, seconds=60, memory_gib=8)
    assert not (tmp_path / "other").exists()


def test_inputs_and_outputs_of_a_part_have_types(graph: Path) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load(str(graph)))
    part = subgraph(model, 6, 7)
    onnx.checker.check_model(part, full_check=True)
    assert [value.name for value in part.graph.input] == ["t6"]
    assert [value.name for value in part.graph.output] == ["t8"]
    assert [tensor.name for tensor in part.graph.initializer] == ["weight"]


def with_branches() -> onnx.ModelProto:
    """Two Relus, a branch that reads one of them and `W`, one that reads the other, and a function of the file's."""

    def side(name: str, *inputs: str) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4])
        made = helper.make_node("MatMul" if len(inputs) == 2 else "Neg", inputs, [name])
        return helper.make_graph([made], name, [], [result])

    twice = helper.make_node("Add", ["a", "a"], ["o"])
    function = helper.make_function("ours", "Twice", ["a"], ["o"], [twice], [helper.make_opsetid("", 20)])
    chosen = {"then_branch": side("product", "r", "W"), "else_branch": side("negative", "s")}
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Relu", ["r"], ["s"]),
        helper.make_node("If", ["flag"], ["t"], **chosen),
        helper.make_node("Twice", ["t"], ["y"], domain="ours"),
    ]
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    constants = {"flag": np.array(True), "W": np.eye(4, dtype=np.float32), "unread": np.zeros(2)}
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "branches", sides[:1], sides[1:], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    onnx.checker.check_model(model, full_check=True)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize(
    ("first", "last", "inputs", "outputs", "constants"),
    [
        (0, 3, ["x"], ["y"], ["flag", "W"]),
        (1, 2, ["r"], ["t"], ["flag", "W"]),
        (2, 2, ["r", "s"], ["t"], ["flag", "W"]),
        (3, 3, ["t"], ["y"], []),
        (0, 1, ["x"], ["s"], []),
    ],
)
def test_a_part_has_what_its_branches_and_functions_need(
    first: int, last: int, inputs: list[str], outputs: list[str], constants: list[str]
) -> None:
    """It was no graph that any compiler takes, so that the bisection ended at another place."""
    part = subgraph(with_branches(), first, last)
    onnx.checker.check_model(part, full_check=True)
    assert [value.name for value in part.graph.input] == inputs
    assert [value.name for value in part.graph.output] == outputs
    assert [tensor.name for tensor in part.graph.initializer] == constants
    session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {name: np.ones((2, 4), np.float32) for name in inputs}
    assert [value.shape for value in session.run(None, given)] == [(2, 4)] * len(outputs)


def test_a_part_has_its_sparse_constants() -> None:
    model = with_branches()
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "W")
    model.graph.initializer.remove(weight)
    values, places = numpy_helper.from_array(np.ones(4, np.float32), "W"), numpy_helper.from_array(np.arange(0, 16, 5))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 4]))
    for first, last, count in ((0, 2, 1), (0, 1, 0)):
        part = subgraph(model, first, last)
        assert [value.name for value in part.graph.input] == ["x"]
        assert len(part.graph.sparse_initializer) == count


@given(st.integers(1, 200), st.data())
def test_bisection_finds_the_smallest_range(nodes: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, nodes - 1))
    last = data.draw(st.integers(first, nodes - 1))
    assert smallest_range(nodes, lambda a, b: a <= first and last <= b) == (first, last)
