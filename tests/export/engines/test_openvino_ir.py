"""OpenVINO IR computes what the ONNX graph computes."""

import errno
import resource
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
from onnx import helper

import vitx.export.engines.targets as targets
from bundle_fixture import tiny_graph
from reference import randomize
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.openvino_ir import openvino_from_onnx

openvino = pytest.importorskip("openvino", reason="an optional target")


def test_ir_equals_the_graph(tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=32)
    model = randomize(timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"])).eval()
    graph = tmp_path / "model.onnx"
    onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, tuple("0123456789"), graph)
    files = openvino_from_onnx(graph, tmp_path / "openvino")
    assert [path.name for path in files] == ["model.bin", "model.xml"]
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(str(tmp_path / "openvino" / "model.xml"), "CPU", options)
    for batch in (1, 5):
        images = np.random.default_rng(0).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
        (expected,) = session.run(None, {"images": images})
        scale = np.abs(expected).max()
        np.testing.assert_allclose(compiled([images])[0] / scale, expected / scale, atol=1e-4, rtol=0)


QUANTISED = """
<ir_version: 9, opset_import: ["": 20]>
moved (uint8[N,4,4,3] images) => (float[N,4,4] logits) <int64[3] rows = {-1, 4, 12}, int8 zero = {0}> {
  pixels = Cast<to=10>(images)
  x = Reshape(pixels, rows)
  heads = Transpose<perm=[0, 2, 1]>(x)
  codes = QuantizeLinear(heads, scale, zero)
  back = DequantizeLinear(codes, scale, zero)
  product = MatMul(x, back)
  logits = Cast<to=1>(product)
}
"""


def test_a_graph_that_openvino_refuses_is_no_crash(tmp_path: Path) -> None:
    """int8 codes of a float16 tensor behind a transpose, as attention has them: OpenVINO 2026.4 mixes up the types."""
    graph = onnx.parser.parse_model(QUANTISED)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.1, np.float16), "scale"))
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, str(tmp_path / "model.onnx"))
    with pytest.raises(InputError) as refused:
        openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert str(refused.value) == (
        "OpenVINO cannot convert the graph (Arguments do not have the same element type (arg0 element type: f32, arg1 "
        "element type: f16).): leave --openvino and --for cpu out, or, where it is int8 for TensorRT, try --base fp32"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("inputs", "operator", "domain", "reason"),
    [
        (["x"], "HeadMix", "ours", "No conversion rule found for operations: ours.HeadMix"),
        (["x", "w"], "MatMul", "", "Conversion is failed for: MatMul-20"),  # of shapes that do not fit
    ],
)
def test_a_graph_with_a_node_that_openvino_does_not_convert_is_refused(
    tmp_path: Path, inputs: list[str], operator: str, domain: str, reason: str
) -> None:
    """Its front end has errors of its own, which passed for a crash: the graph was searched for its smallest part."""
    sides = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3]) for name in "xy"]
    weight = onnx.numpy_helper.from_array(np.ones((5, 3), np.float32), "w")
    node = helper.make_node(operator, inputs, ["y"], domain=domain)
    graph = helper.make_graph([node], "g", sides[:1], sides[1:], [weight])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), str(tmp_path / "model.onnx"))
    with pytest.raises(
        InputError, match=rf"^OpenVINO cannot convert the graph \({reason}\): leave --openvino and --for"
    ):
        openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_graph_that_openvino_converts_and_cannot_compile_is_refused(tmp_path: Path) -> None:
    """It was only logged: a bundle passed with an IR that no runtime could load. Int8 of a DeiT-Ti is such a graph."""
    sides = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3, *[4] * 5]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("LRN", ["x"], ["y"], size=3)], "lrn", sides[:1], sides[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), str(tmp_path / "model.onnx"))
    with pytest.raises(
        InputError, match=r"^OpenVINO cannot compile the graph \(.+\): leave --openvino and --for cpu out$"
    ):
        openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


FIXED = """
<ir_version: 9, opset_import: ["": 20]>
pairs (uint8[N,4,4,3] images) => (float[N,48] logits) <int64[3] two = {2, -1, 48}> {
  pixels = Cast<to=1>(images)
  paired = Reshape(pixels, two)
  summed = ReduceSum<keepdims=0>(paired, axis)
  logits = Expand(summed, shape)
}
"""


def test_a_graph_that_openvino_compiles_and_cannot_run_is_refused(tmp_path: Path) -> None:
    """It takes an even number of images alone. It was only logged: a bundle passed with an IR that fails on a batch."""
    graph = onnx.parser.parse_model(FIXED)
    for name, values in (("axis", [0]), ("shape", [1, 48])):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), name))
    onnx.save(graph, str(tmp_path / "model.onnx"))
    with pytest.raises(
        InputError,
        match=r"^OpenVINO cannot run the graph on a batch of 1 \(.+\): leave --openvino and --for cpu out$",
    ):
        openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    """Not as a crash of the compiler, for which the graph would be searched. A limit on files acts like a full disk."""
    onnx.save(tiny_graph(), str(tmp_path / "model.onnx"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device") as caught:
            openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_what_openvino_cannot_write_for_another_reason_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash: the graph is searched for the part that shows it."""

    def fails(*given: object, **options: object) -> None:
        raise RuntimeError("Serializing a node of type X is not supported")

    onnx.save(tiny_graph(), str(tmp_path / "model.onnx"))
    monkeypatch.setattr(openvino, "save_model", fails)
    with pytest.raises(RuntimeError, match=r"^Serializing a node of type X is not supported$"):
        openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_what_was_written_is_tried_as_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, also where the processor has bfloat16; and read whole: a cut file that is mapped ends the process."""
    given: list[object] = []
    compile_model = openvino.Core.compile_model

    def noted(core: object, model: str, *options: object) -> object:
        given.append(options)
        return compile_model(core, model, *options)

    onnx.save(tiny_graph(), str(tmp_path / "model.onnx"))
    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert given == [("CPU", {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_MMAP": False})]


def test_a_part_of_a_graph_may_have_two_inputs(tmp_path: Path) -> None:
    """The parts that a reproduction of a crash tries: an error of this function passed for the crash it looks for."""
    sides = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 5, 4]) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "sum", sides[:2], sides[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), str(tmp_path / "model.onnx"))
    files = openvino_from_onnx(tmp_path / "model.onnx", tmp_path / "openvino")
    assert [path.name for path in files] == ["model.bin", "model.xml"]


def test_a_crash_is_shown_by_files_that_are_thrown_away(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(
        targets, "openvino_from_onnx", lambda *given: written.append([p.name for p in openvino_from_onnx(*given)])
    )
    onnx.save(tiny_graph(), str(tmp_path / "model.onnx"))
    targets.CONVERT["openvino"](tmp_path / "model.onnx")
    assert written == [["model.bin", "model.xml"]]
    assert [*temporary.iterdir()] == []
