"""Running a graph on the CPU: in which batches, which tensors, and what a session is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from vitx.core import machine
from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.preprocess import UInt8Array
from vitx.export.graph import execution
from vitx.export.graph.execution import logits_in_parts, logits_of, open_session, run_with_outputs

# The logits are float16: each pixel twice, and how many images ran beside it.
DOUBLED = """
<ir_version: 9, opset_import: ["": 20]>
doubled (uint8[N,1,2,3] images) => (float16[N,7] logits) <int64[2] rows = {-1, 6}, int64[1] first = {0}> {
  pixels = Cast<to=10>(images)
  x = Reshape(pixels, rows)
  sums = Add(x, x)
  shape = Shape<end=1>(images)
  count = Cast<to=10>(shape)
  lengths = Unsqueeze(count, first)
  one = Shape<start=1, end=2>(images)
  tiles = Concat<axis=0>(shape, one)
  counts = Tile(lengths, tiles)
  logits = Concat<axis=1>(sums, counts)
}
"""
IMAGES = np.arange(60, dtype=np.uint8).reshape(10, 1, 2, 3)


@pytest.fixture
def graph() -> onnx.ModelProto:
    return onnx.parser.parse_model(DOUBLED)


def expected(images: UInt8Array, *sizes: int) -> Any:
    return np.column_stack([images.reshape(-1, 6) * 2.0, np.repeat(sizes, sizes)])


def test_logits_are_float32_of_eight_images_a_run(graph: onnx.ModelProto) -> None:
    found = logits_of(graph, IMAGES)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected(IMAGES, 8, 2))
    np.testing.assert_array_equal(logits_of(graph, IMAGES, 4), expected(IMAGES, 4, 4, 2))


def test_parts_are_run_when_they_are_asked_for(graph: onnx.ModelProto) -> None:
    asked = []

    def parts() -> Any:
        for start in (0, 9):
            asked.append(start)
            yield IMAGES[start : start + 9]

    found = logits_in_parts(graph, parts())
    np.testing.assert_array_equal(next(found), expected(IMAGES[:9], 8, 1))
    assert asked == [0]
    np.testing.assert_array_equal(next(found), expected(IMAGES[9:], 1))
    (part,) = logits_in_parts(graph, (IMAGES,), 5)
    np.testing.assert_array_equal(part, expected(IMAGES, 5, 5))


def test_tensors_inside_are_given_by_name_and_the_graph_is_as_before(graph: onnx.ModelProto) -> None:
    before = graph.SerializeToString()
    first, second = run_with_outputs(graph, ["sums", "logits", "x"], IMAGES[:6])
    assert (list(first), list(second)) == (["sums", "logits", "x"],) * 2
    np.testing.assert_array_equal(first["logits"], expected(IMAGES[:4], 4))
    np.testing.assert_array_equal(second["logits"], expected(IMAGES[4:6], 2))
    np.testing.assert_array_equal(second["x"], IMAGES[4:6].reshape(2, 6))
    np.testing.assert_array_equal(second["sums"], IMAGES[4:6].reshape(2, 6) * 2.0)
    assert len(list(run_with_outputs(graph, ["x"], IMAGES, 5))) == 2
    assert graph.SerializeToString() == before


def test_a_session_of_a_message_a_file_or_its_bytes(graph: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(graph, str(tmp_path / "model.onnx"))
    for given in (graph, str(tmp_path / "model.onnx"), graph.SerializeToString()):
        (logits,) = open_session(given).run(None, {"images": IMAGES})
        np.testing.assert_array_equal(logits, expected(IMAGES, 10))


def test_a_graph_that_cannot_run_is_refused_with_the_reason(graph: onnx.ModelProto) -> None:
    graph.graph.node[0].op_type = "Nothing"
    with pytest.raises(CheckFailed, match=r"^ONNX Runtime cannot run the graph on the CPU: .*Nothing"):
        open_session(graph)


def test_an_installation_without_its_files_is_named(graph: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise EnvironmentMissing("files are missing")

    monkeypatch.setattr(execution, "require_onnxruntime", missing)
    with pytest.raises(EnvironmentMissing, match=r"^files are missing$"):
        open_session(graph)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize("run", ["session", "outputs", "logits", "parts"])
def test_what_a_session_is_asked_for(
    graph: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, run: str, threads: int | None, exact: bool
) -> None:
    """Q and DQ are fused unless they are to run as they stand; sums of int8 never saturate."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    real = onnxruntime.InferenceSession

    def session(content: bytes, options: Any, **others: Any) -> Any:
        asked.append((options, others))
        return real(content, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(machine, "sums_int8_exactly", lambda: exact)
    monkeypatch.setattr(execution, "threads_here", lambda given: threads if given is None else given)
    opened: Callable[..., object] = {
        "session": lambda **options: open_session(graph, **options),
        "outputs": lambda **options: next(run_with_outputs(graph, ["x"], IMAGES, **options)),
        "logits": lambda **options: logits_of(graph, IMAGES, **options),
        "parts": lambda **options: next(logits_in_parts(graph, (IMAGES,), **options)),
    }[run]
    for given in ({}, {"fused": True}, {"fused": False}):
        opened(**given)
    for (options, others), fused in zip(asked, (True, True, False), strict=True):
        assert others["providers"] == ["CPUExecutionProvider"]
        assert others["disabled_optimizers"] == (None if fused else ["ReluQuantRewrite", "ClipQuantRewrite"])
        assert options.log_severity_level == 4  # a verdict is raised, not printed
        assert options.intra_op_num_threads == (threads or onnxruntime.SessionOptions().intra_op_num_threads)
        assert entry(options, "session.x64quantprecision") == (None if exact else "1")
        assert entry(options, "session.disable_quant_qdq") == (None if fused else "1")


def entry(options: Any, name: str) -> str | None:
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:  # it has none of that name
        return None
