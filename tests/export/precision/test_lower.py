"""float16 and bfloat16 in the graph: what is rounded, what stays in float32, and no needless Cast."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import timm
from onnx import TensorProto, helper, numpy_helper
from scipy import stats

from reference import randomize
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import open_images
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Bounds, SamplingPlan, agreement_of, expected_flip_rate
from vitx.export.precision.half import HalfGraph, cpu_twin
from vitx.export.precision.lower import lower_precision

PREPROCESSING = Preprocessing(image_size=32)


@pytest.fixture(scope="session", params=["plain", "re-attention"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Two blocks, the last with the attention of the parameter."""
    model = randomize(timm.create_model("deepvit_digits", depth=2, attention=["plain", request.param])).eval()
    for parameter in model.parameters():
        parameter.data.mul_(0.4)
    path = tmp_path_factory.mktemp("precision") / "model.onnx"
    return onnx_from_model(rewrite_for_export(model, PREPROCESSING), PREPROCESSING, tuple("0123456789"), path)


@pytest.fixture(scope="session")
def digits() -> UInt8Array:
    return next(open_images("digits", "train").batches(PREPROCESSING, 64))


def scaled_graph(factor: float, opset: int = 20) -> onnx.ModelProto:
    """uint8 (N, 4, 4, 3) → ·factor → Relu → ÷factor → logits (N, 48), with values up to 255·factor in between."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["pixels", "rows"], ["x"]),
        helper.make_node("Mul", ["x", "factor"], ["large"], name="grow"),
        helper.make_node("Relu", ["large"], ["still_large"], name="pass"),
        helper.make_node("Div", ["still_large", "factor"], ["small"], name="shrink"),
        helper.make_node("MatMul", ["small", "W"], ["logits"], name="classify"),
    ]
    weight = np.random.default_rng(0).normal(size=(48, 48)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 4, 4, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 48])],
        [
            numpy_helper.from_array(weight, "W"),
            numpy_helper.from_array(np.array(factor, np.float32), "factor"),
            numpy_helper.from_array(np.array([-1, 48]), "rows"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def small_images() -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (64, 4, 4, 3), dtype=np.uint8)


@pytest.fixture
def trained_margins() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Logits of 400 images with few small margins, and the same with errors that flip none of them."""
    margins = np.linspace(0.05, 8, 400)
    expected = np.stack([margins, np.zeros_like(margins)], axis=1).astype(np.float32)
    found = expected.copy()
    found[:, 1] += 0.06 * (-1.0) ** np.arange(400)
    found[0, 1] = 0.0
    return expected, found


def types_of(graph: onnx.ModelProto) -> dict[str, int]:
    return Dataflow(graph).types


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_agrees_and_is_small(exported: onnx.ModelProto, digits: UInt8Array, precision: Any) -> None:
    bounds = Bounds({"fp16": 0.1, "bf16": 2.0}[precision], 0.5)  # random weights: wide apart in bfloat16
    lowered = lower_precision(exported, precision, digits, bounds=bounds, quiet=True)
    assert lowered.details["trials"][-1]["within_bounds"]
    assert set(lowered.islands) == set(lowered.details["without_kernel"])
    assert lowered.graph.ByteSize() < 0.65 * exported.ByteSize()
    (source,), (result,) = lowered.graph.graph.input, lowered.graph.graph.output
    assert source.type.tensor_type.elem_type == TensorProto.UINT8
    assert source.type.tensor_type.shape.dim[0].dim_param
    assert result.type.tensor_type.elem_type == TensorProto.FLOAT
    assert {entry.key for entry in lowered.graph.metadata_props} >= {"vitx.labels"}


def test_no_stray_cast(exported: onnx.ModelProto, digits: UInt8Array) -> None:
    """One Cast of the pixels and one of the logits, no other."""
    lowered = lower_precision(exported, "fp16", digits, bounds=Bounds(0.05, 0.9), quiet=True)
    assert [node.output[0] for node in lowered.graph.graph.node if node.op_type == "Cast"][1:] == ["logits"]
    kinds = types_of(lowered.graph)
    floats = [name for name, kind in kinds.items() if kind == TensorProto.FLOAT]
    assert floats == ["logits"]


def test_an_island_is_cast_once_on_each_side(exported: onnx.ModelProto) -> None:
    flow = Dataflow(exported)
    island = next(node for node in flow.nodes if node.op_type == "LayerNormalization")
    graph = HalfGraph(flow, TensorProto.FLOAT16).build([island.name])
    onnx.checker.check_model(graph, full_check=True)
    casts = [node for node in graph.graph.node if node.op_type == "Cast"]
    assert len(casts) == 4  # pixels, into the island, out of it, logits
    made = {name: node for node in graph.graph.node for name in node.output}
    assert not any(made[node.input[0]].op_type == "Cast" for node in casts if node.input[0] in made)
    assert all(count == 1 for count in Counter((node.input[0], node.attribute[0].i) for node in casts).values())


def test_only_nodes_that_overflow_become_islands() -> None:
    lowered = lower_precision(scaled_graph(1000.0), "fp16", small_images(), quiet=True)
    assert lowered.islands == ("grow", "pass", "shrink")
    assert set(lowered.details["overflow"]) == {"large", "still_large"}
    kinds = types_of(lowered.graph)
    assert kinds["large"] == kinds["still_large"] == TensorProto.FLOAT
    assert kinds["x"] == TensorProto.FLOAT16


def test_islands_are_minimal() -> None:
    graph, images = scaled_graph(1000.0), small_images()
    lowered = lower_precision(graph, "fp16", images, quiet=True)
    half, expected = HalfGraph(Dataflow(graph), TensorProto.FLOAT16), logits_of(graph, images)
    assert lowered.islands
    for name in lowered.islands:
        fewer = half.build([other for other in lowered.islands if other != name])
        assert not agreement_of(expected, logits_of(cpu_twin(fewer), images)).within(Bounds(0.02))


def test_bfloat16_needs_no_island_where_float16_overflows() -> None:
    lowered = lower_precision(scaled_graph(1000.0), "bf16", small_images(), bounds=Bounds(0.2, 0.9), quiet=True)
    assert lowered.islands == ()


@pytest.mark.parametrize("exported", ["plain"], indirect=True)
def test_rounding_that_dominates_becomes_an_island(exported: onnx.ModelProto, digits: UInt8Array) -> None:
    free = lower_precision(exported, "bf16", digits, bounds=Bounds(10.0, 0.0), quiet=True)
    bounds = Bounds(0.7 * free.details["trials"][0]["max_error"], 0.0)
    lowered = lower_precision(exported, "bf16", digits, bounds=bounds, quiet=True)
    assert len(free.islands) < len(lowered.islands) < lowered.details["nodes"]
    expected = logits_of(exported, digits)
    assert agreement_of(expected, logits_of(cpu_twin(lowered.graph), digits)).within(bounds)


def test_accept_may_refuse_every_graph(exported: onnx.ModelProto, digits: UInt8Array) -> None:
    with pytest.raises(CheckFailed, match="is it the caller's check that fails"):
        lower_precision(exported, "fp16", digits, bounds=Bounds(0.05, 0.9), accept=lambda graph: False, quiet=True)


def test_the_twin_rounds_and_overflows_as_the_type_does() -> None:
    """ONNX Runtime on a CPU does not round: it keeps the tensor between two float16 nodes in float32."""
    half = HalfGraph(Dataflow(scaled_graph(1000.0)), TensorProto.FLOAT16).build(())
    images = small_images()
    assert not np.isfinite(logits_of(cpu_twin(half), images)).all()
    assert np.isfinite(logits_of(half, images)).all()


def test_the_twin_of_a_product() -> None:
    graph = scaled_graph(1.0)
    images = small_images()
    (weight,) = [numpy_helper.to_array(item) for item in graph.graph.initializer if item.name == "W"]
    x = images.reshape(-1, 48).astype(np.float16).astype(np.float32)
    exact: npt.NDArray[np.float32] = x @ weight.astype(np.float16).astype(np.float32)
    found = logits_of(cpu_twin(HalfGraph(Dataflow(graph), TensorProto.FLOAT16).build(())), images)
    np.testing.assert_allclose(found, exact.astype(np.float16).astype(np.float32), rtol=2**-10)


def test_an_operator_without_the_type_is_listed() -> None:
    """A convolution in bfloat16 came with opset 22."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["pixels"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["planes", "W"], ["features"], name="stem"),
        helper.make_node("Reshape", ["features", "rows"], ["logits"]),
    ]
    weight = np.random.default_rng(0).normal(size=(5, 3, 4, 4)).astype(np.float32)
    for opset, expected in ((20, ("stem",)), (22, ())):
        graph = helper.make_graph(
            nodes,
            "stem",
            [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 4, 4, 3])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 5])],
            [numpy_helper.from_array(weight, "W"), numpy_helper.from_array(np.array([-1, 5]), "rows")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        lowered = lower_precision(model, "bf16", small_images(), quiet=True)
        assert lowered.islands == expected


def test_too_few_images() -> None:
    with pytest.raises(InputError, match="3 images to judge a lower precision on: give at least 32 real ones"):
        lower_precision(scaled_graph(1.0), "fp16", small_images()[:3], quiet=True)


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        ([], "no output"),
        ([("best", TensorProto.INT64, ["N"])], "'best', int64 (N), as its first output"),
        ([("best", TensorProto.INT64, ["N", 2])], "'best', int64 (N, 2), as its first output"),
        ([("best", TensorProto.INT64, None)], "'best', int64 (), as its first output"),
        ([("tokens", TensorProto.FLOAT, [None, 4, 12])], "'tokens', float (?, 4, 12), as its first output"),
        ([("least", TensorProto.FLOAT, [])], "'least', float (), as its first output"),
    ],
)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_first_output_that_is_no_logits_is_refused(precision: Any, outputs: list[Any], found: str) -> None:
    """Graphs are judged by it: the classes that an ArgMax gives first ended in an error of numpy."""
    graph = scaled_graph(1.0)
    given = [helper.make_tensor_value_info(*output) for output in outputs]
    after = [*given, *graph.graph.output] if given else []
    del graph.graph.output[:]
    graph.graph.output.extend(after)
    with pytest.raises(InputError) as refused:
        lower_precision(graph, precision, small_images(), quiet=True)
    assert str(refused.value) == f"the graph gives {found}: expected logits, float (N, C)"


def test_the_given_graph_is_not_changed(tmp_path: Path) -> None:
    graph = scaled_graph(1000.0)
    before = graph.SerializeToString()
    lower_precision(graph, "fp16", small_images(), quiet=True)
    assert graph.SerializeToString() == before


def test_a_sampling_plan_is_binomial_where_flips_are_rare() -> None:
    assert SamplingPlan(360, 0).acceptance_probability(0.0) == 1.0
    for images, flips, rate in ((360, 0, 1 / 720), (360, 2, 0.005), (50_000, 459, 0.0085)):
        expected = stats.binom.cdf(flips, images, rate)
        assert SamplingPlan(images, flips).acceptance_probability(rate) == pytest.approx(expected, abs=5e-3)


def test_the_expected_flip_rate_is_that_of_other_images() -> None:
    """Noise of known size on margins of known density: the rate is half the mean of |loss| times the density."""
    rng = np.random.default_rng(0)
    margins = rng.uniform(0, 1, 20_000)
    logits = np.stack([margins, np.zeros_like(margins)], axis=1).astype(np.float32)
    noisy = logits + rng.normal(0, 0.02, logits.shape).astype(np.float32)
    flipped = float((logits.argmax(axis=1) != noisy.argmax(axis=1)).mean())
    exact = np.sqrt(2) * 0.02 / np.sqrt(2 * np.pi)
    assert flipped == pytest.approx(exact, rel=0.1)
    few = expected_flip_rate(logits[:500], noisy[:500])
    assert few == pytest.approx(exact, rel=0.4)
    assert expected_flip_rate(logits, noisy) == pytest.approx(exact, rel=0.1)
    assert expected_flip_rate(logits, logits) == 0.0


def test_a_sampling_plan_asks_for_more_than_no_flip(trained_margins: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    """No flip here, but about one is expected among 360 others: a plan of 2 flips is likely met, one of 0 is not."""
    agreement = agreement_of(*trained_margins)
    assert agreement.flips == 0
    assert agreement.within(Bounds(0.5))
    assert not agreement.within(Bounds(0.5, sampling_plan=SamplingPlan(360, 0)))
    assert agreement.within(Bounds(0.5, sampling_plan=SamplingPlan(360, 2)))
