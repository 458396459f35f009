"""Reading graphs as people bring them: weights beside the file, constants that are inputs too, branches, names."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed, InputError
from vitx.export.graph import dataflow
from vitx.export.graph.dataflow import Dataflow, free_tag, inputs_of, opset_of, read_onnx, reads
from vitx.export.graph.execution import logits_of

FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8
WEIGHT = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
IMAGES = np.random.default_rng(1).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
LOGITS = IMAGES.reshape(-1, 48).astype(np.float32) @ WEIGHT


def model_of(batch: Any = "N", result: Any = ("N", 3), ir_version: int = 10, **domains: int) -> onnx.ModelProto:
    """uint8 images (batch, 4, 4, 3) → logits (N, 3), of the standard operator set 20 and those of `domains`."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=FLOAT),
        helper.make_node("Reshape", ["pixels", "rows"], ["x"]),
        helper.make_node("MatMul", ["x", "W"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", UINT8, [batch, 4, 4, 3])],
        [helper.make_tensor_value_info("logits", FLOAT, result)],
        [numpy_helper.from_array(WEIGHT, "W"), numpy_helper.from_array(np.array([-1, 48]), "rows")],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (domains or {"": 20}).items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def with_weights_beside(folder: Path, location: str = "weights.bin") -> Path:
    """The graph's file; its weights are written to weights.bin, and said to be at `location`."""
    path = folder / "model.onnx"
    onnx.save(model_of(), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        (entry,) = (entry for entry in tensor.external_data if entry.key == "location")
        entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_graph_are_read(tmp_path: Path) -> None:
    np.testing.assert_allclose(logits_of(read_onnx(with_weights_beside(tmp_path)), IMAGES), LOGITS, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "location", "reason"),
    [
        (lambda folder: (folder / "weights.bin").unlink(), "weights.bin", "tensor name: W.* is not regular file"),
        (lambda folder: (folder / "weights.bin").write_bytes(b"short"), "weights.bin", "exceeds available data"),
        (lambda folder: None, "../weights.bin", "points outside the directory"),
        (lambda folder: (folder / "link").symlink_to(folder / "weights.bin"), "link", "it is a symbolic link"),
        (lambda folder: None, "/etc/passwd", "it is an absolute path"),
    ],
)
def test_weights_that_cannot_be_read_are_one_message(tmp_path: Path, change: Any, location: str, reason: str) -> None:
    """It was a traceback of onnx."""
    path = with_weights_beside(tmp_path, location)
    change(tmp_path)
    with pytest.raises(InputError, match=rf"^'.+model\.onnx' has weights in another file, which .+: .*{reason}"):
        read_onnx(path)


@pytest.mark.parametrize("name", ["m.onnx", "m.json", "m.onnxtxt", "m.textproto"])
def test_a_file_is_read_as_onnx_whatever_its_name(tmp_path: Path, name: str) -> None:
    """By the name, onnx would read a text in one of its own forms, or end with a traceback."""
    (tmp_path / name).write_bytes(model_of().SerializeToString())
    assert read_onnx(tmp_path / name) == model_of()
    (tmp_path / name).write_text('{"model": "none"}')
    with pytest.raises(InputError, match=rf"{name}' is not an ONNX graph: .*pars"):
        read_onnx(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name}' is not an ONNX graph: it is of no operator set$"):
        read_onnx(tmp_path / name)


def test_more_weights_than_a_message_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the graph they may be larger; what is given the graph as one message failed with protobuf's traceback."""
    path = with_weights_beside(tmp_path)
    monkeypatch.setattr(dataflow, "MOST_BYTES", WEIGHT.nbytes + 16)
    assert len(read_onnx(path).graph.initializer) == 2
    monkeypatch.setattr(dataflow, "MOST_BYTES", WEIGHT.nbytes + 15)
    with pytest.raises(InputError, match=r"model\.onnx' has 0\.0 GB of weights: expected 0\.0 GB at most, which one "):
        read_onnx(path)


def test_the_limit_is_protobuf_s() -> None:
    """Its message of 2 GiB is one byte too long."""
    assert dataflow.MOST_BYTES == 2_147_483_647


def test_a_file_that_cannot_be_opened_is_the_system_s_error(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none.onnx", FileNotFoundError)):
        with pytest.raises(kind):
            read_onnx(path)


@pytest.mark.parametrize("domains", [{"": 20}, {"ai.onnx": 20}, {"com.microsoft": 1, "": 20, "ai.onnx.ml": 3}])
def test_the_standard_operator_set(domains: dict[str, int]) -> None:
    model = model_of(**domains)
    assert (opset_of(model), Dataflow(model).opset) == (20, 20)


def test_a_graph_of_custom_operators_alone() -> None:
    """It ended with a StopIteration."""
    for given in (opset_of, Dataflow):
        with pytest.raises(InputError) as refused:
            given(model_of(**{"com.microsoft": 1, "vitx": 2}))
        assert str(refused.value) == (
            "the graph is of the operator sets com.microsoft, vitx: expected ONNX's own, ai.onnx, beside them"
        )


@pytest.mark.parametrize("first", [True, False])
def test_a_constant_that_is_an_input_too_is_a_constant(first: bool) -> None:
    """So all are in files of IR 3, and in those of PyTorch's keep_initializers_as_inputs."""
    model = model_of(ir_version=3)
    images = model.graph.input.pop()
    sides = [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in model.graph.initializer
    ]
    model.graph.input.extend([*sides, images] if first else [images, *sides])
    onnx.checker.check_model(model, full_check=True)
    assert inputs_of(model.graph) == [images]
    flow = Dataflow(model)
    assert flow.inputs == ("images",)
    assert flow.depends_on_input() == {"images", "pixels", "x", "logits"}
    np.testing.assert_array_equal(flow.array("W"), WEIGHT)
    again = flow.assemble(flow.nodes, {"rows": numpy_helper.from_array(np.array([-1, 48]), "rows")})
    onnx.checker.check_model(again, full_check=True)
    assert again.ir_version == 4
    np.testing.assert_allclose(logits_of(again, IMAGES), LOGITS, rtol=1e-5)


@pytest.mark.parametrize(("batch", "result"), [(None, [None, 3]), ("N", None), ("batch size", ["N*2", 3])])
def test_a_batch_without_a_name_is_not_frozen(batch: Any, result: Any) -> None:
    assert Dataflow(model_of(batch, result)).shapes["images"] == (None, 4, 4, 3)


@pytest.mark.parametrize(
    ("batch", "result", "name", "given"),
    [(2, ["N", 3], "images", "2"), ("N", [5, 3], "logits", "5"), ("N", [], "logits", "a single number")],
)
def test_a_frozen_batch_is_named(batch: Any, result: Any, name: str, given: str) -> None:
    with pytest.raises(CheckFailed, match=rf"^the batch of '{name}' is frozen \({given}\): trace the graph with a "):
        Dataflow(model_of(batch, result))


def test_of_frozen_batches_the_input_s_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"^the batch of 'images' is frozen \(7\)"):
        Dataflow(model_of(7, [5, 3]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [0.0, -np.inf, -np.inf],
            "the constant 'V' holds 2 of 3 values of -inf, as a mask does: a lower precision is measured on finite "
            "values alone; mask with -1e4, or export in fp32",
        ),
        (
            [np.inf, 0.0, np.nan],
            "the weights 'V' hold 2 of 3 values that are NaN or infinite: no precision can hold them; look at the "
            "checkpoint they come from",
        ),
        (
            [-np.inf, np.nan, 0.0],
            "the weights 'V' hold 2 of 3 values that are NaN or infinite: no precision can hold them; look at the "
            "checkpoint they come from",
        ),
    ],
)
def test_weights_that_are_not_finite_are_named(dtype: Any, values: list[float], message: str) -> None:
    model = model_of()
    model.graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), "V"))
    with pytest.raises(CheckFailed) as refused:
        Dataflow(model)
    assert str(refused.value) == message
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.array(values, np.float16), "V"))
    assert "V" in Dataflow(model).constants, "it was beyond the half type when it was lowered"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("W", {"dims": [47, 3]}, "cannot reshape array of size 144 into shape (47,3)"),
        ("rows", {"dims": [3]}, "cannot reshape array of size 2 into shape (3,)"),
        ("W", {"raw_data": b"abc"}, "buffer size must be a multiple of element size"),
        ("W", {"data_type": TensorProto.UNDEFINED}, "The element type in the input tensor is UNDEFINED."),
        ("W", {"data_type": 99}, "99"),
    ],
)
def test_a_constant_that_is_not_what_it_says_is_named(name: str, change: dict[str, Any], reason: str) -> None:
    model = model_of()
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    for key in change:
        tensor.ClearField(key)
    tensor.MergeFrom(onnx.TensorProto(**change))
    with pytest.raises(InputError) as refused:
        Dataflow(model)
    assert str(refused.value) == (
        f"the constant '{name}' does not hold what its type and shape say ({reason}): write the graph again"
    )


def test_readers_are_in_order_each_once() -> None:
    model = model_of()
    twice = helper.make_node("Mul", ["pixels", "pixels"], ["squares"], name="square")
    model.graph.node.append(twice)
    readers = Dataflow(model).readers()
    assert [node.op_type for node in readers["pixels"]] == ["Reshape", "Mul"]
    assert [node.op_type for node in readers["W"]] == ["MatMul"]


def test_shapes_are_followed_through_what_is_computed_of_shapes() -> None:
    model = model_of()
    last = [
        helper.make_node("Shape", ["W"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["three"]),
        helper.make_node("Concat", ["rest", "three"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["split"]),
    ]
    model.graph.node.extend(last)
    for name, value in (("one", [1]), ("rest", [-1, 16])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    flow = Dataflow(model)
    assert flow.shapes["split"][1:] == (16, 3)
    assert (flow.types["split"], flow.types["shape"]) == (FLOAT, TensorProto.INT64)


def test_a_sparse_constant_is_refused() -> None:
    """It is in no list of constants, and was left out without a word."""
    model = model_of()
    codes, places = (numpy_helper.from_array(np.array(given), name) for given, name in (([1.0], "S"), ([7], "at")))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(codes, places, [48]))
    with pytest.raises(CheckFailed) as refused:
        Dataflow(model)
    assert str(refused.value) == (
        "the constant 'S' is sparse, which no lower precision is written into: export in fp32, or write it as a dense "
        "one"
    )


def test_an_output_that_is_left_out_is_no_tensor() -> None:
    """What reads an optional input that is left out does not depend on the images for it."""
    model = model_of()
    nodes = [
        helper.make_node("Dropout", ["x"], ["dropped", ""]),
        helper.make_node("Clip", ["W", "", "high"], ["clipped"]),
    ]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "high"))
    flow = Dataflow(model)
    assert "clipped" not in flow.depends_on_input()
    assert "" not in flow.producers()
    made = {"images", "pixels", "x", "logits", "dropped", "clipped"}
    assert flow.names() == {*made, "W", "rows", "high"}


def body(name: str, nodes: list[onnx.NodeProto], given: Any = (), constants: Any = ()) -> onnx.GraphProto:
    result = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)
    return helper.make_graph(nodes, name, list(given), [result], list(constants))


def test_what_a_node_reads() -> None:
    """A branch or a loop reads tensors of the graph around it, which no list of inputs holds."""
    assert reads(helper.make_node("Clip", ["x", "", "high"], ["y"])) == {"x", "high"}
    constant = numpy_helper.from_array(np.array(2, np.float32), "two")
    twice = body("twice", [helper.make_node("Mul", ["x", "two"], ["t"]), helper.make_node("Add", ["t", "b"], ["u"])])
    own = body("own", [helper.make_node("Mul", ["y", "two"], ["t"])], constants=[constant])
    branch = helper.make_node("If", ["flag"], ["z"], then_branch=twice, else_branch=own)
    assert reads(branch) == {"flag", "x", "two", "b", "y"}
    step = [helper.make_tensor_value_info(name, FLOAT, None) for name in ("i", "go", "state")]
    inner = helper.make_node("If", ["go"], ["v"], then_branch=twice, else_branch=own)
    loop = body("loop", [helper.make_node("Add", ["state", "W"], ["x"]), inner], step)
    # The branch within the loop's body reads `x` of the body, and `b` and `two` of the graph.
    assert reads(helper.make_node("Loop", ["n", "", "start"], ["end"], body=loop)) == {
        *("n", "start", "W", "b", "y", "two"),
    }


def test_a_name_that_is_free() -> None:
    taken = {"a/one", "a/again/two", "b"}
    assert free_tag("b", ("one",), taken) == "b"
    assert free_tag("b", ("one", "two"), taken) == "b/again"
    assert free_tag("a", ("one", "two"), taken) == "a/again/again"
    new = {"b/one", "b/again/one", "b/again/two", "a/again/again/one", "a/again/again/two"}
    assert taken == {"a/one", "a/again/two", "b"} | new
