"""int8 and fp8: the Q/DQ nodes, the ranges behind their scales, and which layers stay in float32."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from run_fixture import DIGITS_PREPROCESSING as PREPROCESSING
from run_fixture import trained_deepvit
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.data.open import open_images
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Bounds, agreement_of, minimal_subset
from vitx.export.precision.calibration import MIN_IMAGES, Activations, sample_images, split_images
from vitx.export.precision.lower import lower_precision
from vitx.export.precision.placement import find_layers
from vitx.export.precision.qdq import QuantizedGraph


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, UInt8Array, UInt8Array]:
    """A DeepViT that has learned the digits for a few epochs: its graph, training images, evaluation images."""
    path = tmp_path_factory.mktemp("quantization") / "model.onnx"
    rewritten = rewrite_for_export(trained_deepvit(), PREPROCESSING)
    graph = onnx_from_model(rewritten, PREPROCESSING, tuple("0123456789"), path)
    held_out = np.concatenate(list(open_images("digits", "val").batches(PREPROCESSING, 256)))
    return graph, next(open_images("digits", "train").batches(PREPROCESSING, 400)), held_out


@pytest.fixture(scope="session")
def int8(trained: tuple[onnx.ModelProto, UInt8Array, UInt8Array]) -> Any:
    return lower_precision(trained[0], "int8", trained[1], quiet=True)


def linear_graph(*, weight: Sequence[Any] | None = None, batch: str | int = "N") -> onnx.ModelProto:
    """uint8 (N, 4, 4, 3) → two products with the same weight → logits (N, 48)."""
    generator = np.random.default_rng(0)
    square = generator.normal(size=(48, 48)).astype(np.float32) / 7 if weight is None else np.array(weight, np.float32)
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["pixels", "rows"], ["x"]),
        helper.make_node("MatMul", ["x", "W"], ["h"], name="first"),
        helper.make_node("Gemm", ["h", "W"], ["logits"], name="second", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "shared",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, [batch, 4, 4, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 48])],
        [numpy_helper.from_array(square, "W"), numpy_helper.from_array(np.array([-1, 48]), "rows")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def random_images(count: int) -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)


def constants(graph: onnx.ModelProto) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


def producers(graph: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in graph.graph.node for name in node.output}


def test_int8_agrees_on_images_it_never_saw(trained: Any, int8: Any) -> None:
    graph, _, images = trained
    for batch in (1, 7, 32):
        expected, found = logits_of(graph, images, batch), logits_of(int8.graph, images, batch)
        agreement = agreement_of(expected, found)
        assert agreement.agreement >= 0.98  # a few epochs leave near ties
        assert agreement.max_error < 0.25
        second, first = np.sort(expected, axis=1)[:, -2:].T
        clear = first - second > 0.5 * expected.std()
        assert clear.mean() > 0.5
        assert (expected.argmax(axis=1) == found.argmax(axis=1))[clear].all()


def test_every_product_with_a_weight_is_quantised(int8: Any) -> None:
    assert int8.islands == (), int8.details["trials"]
    made = producers(int8.graph)
    products = [node for node in int8.graph.graph.node if node.op_type in ("Gemm", "Conv")]
    assert len(products) > 10
    for node in products:
        sources = [made[name].op_type for name in node.input]
        assert set(sources) == {"DequantizeLinear"}, f"{node.name} reads {sources}"


def test_float_operators_stay_float(int8: Any, trained: Any) -> None:
    kinds = ("Softmax", "Gelu", "LayerNormalization", "Attention")
    for kind in kinds:
        counts = [sum(node.op_type == kind for node in model.graph.node) for model in (int8.graph, trained[0])]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_scales_are_symmetric_and_per_channel(trained: Any, target: Any) -> None:
    lowered = lower_precision(trained[0], "int8", trained[1], target=target, bounds=Bounds(2.0, 0.9), quiet=True)
    held = constants(lowered.graph)
    made = producers(lowered.graph)
    for node in lowered.graph.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero_point = held[node.input[1]], held[node.input[2]]
            assert scale.shape == ()
            if target == "tensorrt":
                assert (zero_point.dtype, int(zero_point)) == (np.int8, 0)
            else:
                assert zero_point.dtype == np.uint8
                assert int(zero_point) in (0, 128)
        if node.op_type == "DequantizeLinear" and node.input[0] in held:
            codes, scale, zero_point = (held[name] for name in node.input)
            if scale.shape == () and "attn" in node.input[0]:  # queries, keys and values of a fused attention
                assert target == "tensorrt"
                assert int(np.abs(codes.astype(int)).max()) == 127
                continue
            axis = next(item.i for item in node.attribute if item.name == "axis")
            assert scale.shape == (codes.shape[axis],)
            assert not zero_point.any()
            assert codes.dtype in (np.int8, np.int32)
            if codes.dtype == np.int8:
                assert int(codes.min()) >= -127
                others = tuple(i for i in range(codes.ndim) if i != axis)
                assert (np.abs(codes.astype(int)).max(axis=others)[scale != 1] == 127).all()
    if target == "tensorrt":  # biases in float32: TensorRT reads no int32 Q/DQ
        kinds = {made[name].op_type for node in lowered.graph.graph.node for name in node.input[2:3] if name in made}
        assert "DequantizeLinear" not in kinds


def test_the_batch_stays_dynamic_and_inputs_and_outputs_keep_their_types(int8: Any) -> None:
    (source,), (result,) = int8.graph.graph.input, int8.graph.graph.output
    assert source.type.tensor_type.elem_type == TensorProto.UINT8
    assert result.type.tensor_type.elem_type == TensorProto.FLOAT
    assert source.type.tensor_type.shape.dim[0].dim_param
    assert {entry.key for entry in int8.graph.metadata_props} >= {"vitx.labels", "vitx.preprocessing"}


def test_details_compare_the_range_methods(int8: Any) -> None:
    methods = int8.details["methods"]
    assert set(methods) == {"max", "percentile", "entropy"}
    assert int8.details["method"] == min(methods, key=lambda name: methods[name]["mean_error"])
    assert int8.details["calibration_images"] == 256
    assert int8.details["held_out_images"] == 144
    assert int8.details["trials"][-1]["within_bounds"]


def test_a_quarter_of_the_bytes(int8: Any, trained: Any) -> None:
    assert int8.graph.ByteSize() < 0.5 * trained[0].ByteSize()  # names and scales weigh in a small network


def test_layers_are_left_in_float_until_the_bound_holds(trained: Any) -> None:
    """A bound that the fully quantised graph fails: some layers stay in float32, as few as possible."""
    graph, images, _ = trained
    full = lower_precision(graph, "int8", images, quiet=True).details["trials"][0]["max_error"]
    bounds = Bounds(0.6 * full)
    lowered = lower_precision(graph, "int8", images, bounds=bounds, quiet=True)
    assert lowered.islands
    assert lowered.details["quantized"] + len(lowered.islands) == lowered.details["layers"]
    assert lowered.details["quantized"] > 0
    tried = [trial for trial in lowered.details["trials"] if trial["what"].startswith(f"{len(lowered.islands)} ")]
    assert any(trial["within_bounds"] for trial in tried)
    _, held_out = split_images(images)
    assert agreement_of(logits_of(graph, held_out), logits_of(lowered.graph, held_out)).within(bounds)


def test_accept_has_the_last_word(trained: Any) -> None:
    graph, images, _ = trained
    answers: Iterator[bool] = itertools.chain([False, False], itertools.repeat(True))
    lowered = lower_precision(graph, "int8", images, accept=lambda _: next(answers), quiet=True)
    assert lowered.islands
    assert [trial["accepted"] for trial in lowered.details["trials"]][:2] == [False, False]


def test_failure_of_every_choice_is_reported_with_numbers(trained: Any) -> None:
    with pytest.raises(CheckFailed, match=r"no choice of layers passes: the best, .* standard deviations; allowed are"):
        lower_precision(trained[0], "int8", trained[1], bounds=Bounds(1e-9), quiet=True)


def test_fp8_is_valid_and_close(trained: Any) -> None:
    graph, images, held_out = trained
    lowered = lower_precision(graph, "fp8", images, quiet=True)
    held = {tensor.name: tensor for tensor in lowered.graph.graph.initializer}
    quantizers = [node for node in lowered.graph.graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers
    assert {held[node.input[2]].data_type for node in quantizers} == {TensorProto.FLOAT8E4M3FN}
    assert not any(node.op_type == "Conv" and "dequantized" in node.input[0] for node in lowered.graph.graph.node)
    logits = logits_of(graph, held_out)
    agreement = agreement_of(logits, logits_of(lowered.graph, held_out, fused=False))
    assert agreement.agreement >= 0.95
    # The network is trained in this test, so its last bits depend on the processor.
    assert agreement.max_error < 0.3 * logits.std()


def test_a_weight_shared_by_two_products_gets_scales_for_each() -> None:
    graph = linear_graph()
    lowered = lower_precision(graph, "int8", random_images(MIN_IMAGES), bounds=Bounds(0.5, 0.5), quiet=True)
    held = constants(lowered.graph)
    assert "W" not in held
    scales = {name: value for name, value in held.items() if name.startswith("W/") and name.endswith("scale")}
    assert sorted(scales) == ["W/axis0/scale", "W/axis1/scale"]
    assert not np.allclose(scales["W/axis0/scale"], scales["W/axis1/scale"])


def test_too_few_images() -> None:
    graph = linear_graph()
    with pytest.raises(InputError, match=r"100 images to calibrate on: .* at least 256 real images, .* at least 320"):
        lower_precision(graph, "int8", random_images(100), quiet=True)
    with pytest.raises(InputError, match="0 images to judge a lower precision on"):
        lower_precision(graph, "int8", random_images(0), quiet=True)
    with pytest.raises(InputError, match=r"images are float64 .*: the graph takes uint8 \(n, 4, 4, 3\)"):
        lower_precision(graph, "int8", np.zeros((400, 4, 4, 3)), quiet=True)  # type: ignore[arg-type]
    few = open_images("digits", "train").first(200)
    with pytest.raises(InputError, match="200 images to calibrate on"):
        sample_images(few, PREPROCESSING)


def test_weights_that_are_not_finite_are_named() -> None:
    weight = np.eye(48, dtype=np.float32)
    weight[3, 4] = np.nan
    with pytest.raises(CheckFailed, match="the weights 'W' hold 1 of 2304 values that are NaN or infinite"):
        lower_precision(linear_graph(weight=list(weight)), "int8", random_images(MIN_IMAGES), quiet=True)


def test_a_mask_of_infinities_is_not_taken_for_a_damaged_checkpoint() -> None:
    weight = np.eye(48, dtype=np.float32)
    weight[3, 4] = -np.inf
    with pytest.raises(CheckFailed) as refused:
        lower_precision(linear_graph(weight=list(weight)), "int8", random_images(MIN_IMAGES), quiet=True)
    assert str(refused.value) == (
        "the constant 'W' holds 1 of 2304 values of -inf, as a mask does: a lower precision is measured on finite "
        "values alone; mask with -1e4, or export in fp32"
    )


def test_a_frozen_batch_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"the batch of 'images' is frozen \(2\)"):
        lower_precision(linear_graph(batch=2), "int8", random_images(MIN_IMAGES), quiet=True)


def test_activations_that_are_not_finite_are_named() -> None:
    weight = 3e37 * np.eye(48, dtype=np.float32)
    with pytest.raises(CheckFailed, match=r"'h', made by first, holds .* not finite in float32 already|itself gives"):
        lower_precision(linear_graph(weight=list(weight)), "int8", random_images(MIN_IMAGES), quiet=True)


def test_narrow_heads_stay_float_on_a_cpu(trained: Any) -> None:
    """Products of attention with heads of 16 gain nothing on a CPU; TensorRT fuses them only if they are quantised."""
    flow = Dataflow(trained[0])
    on_cpu, on_gpu = (find_layers(flow, "int8", target) for target in ("cpu", "tensorrt"))
    assert on_cpu
    assert all(layer.weight for layer in on_cpu)
    assert any(layer.weight is None for layer in on_gpu)


def test_building_twice_gives_the_same_graph(trained: Any) -> None:
    quantized = QuantizedGraph(Dataflow(trained[0]), "int8", "cpu")
    ranges = {name: Activations(1.0, 1.0) for layer in quantized.layers.values() for name in layer.tensors()}
    first, second = (quantized.build(list(quantized.layers), ranges, "max") for _ in range(2))
    assert first.SerializeToString() == second.SerializeToString()


def test_calibration_images_are_spread_over_the_set() -> None:
    images = open_images("digits", "train")
    chosen = sample_images(images, PREPROCESSING, limit=320)
    last = PREPROCESSING.from_bytes(images.read(len(images) - 1))
    assert chosen.shape == (320, 32, 32, 3)
    assert np.array_equal(chosen[-1], last)


def test_thresholds_of_a_normal_tensor_with_one_outlier() -> None:
    activations = Activations()
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    for part in np.split(values, 10):
        activations.add(part)
    activations.add(np.array([-40.0], np.float32))
    assert activations.threshold("max") == 40.0
    assert activations.counts.sum() == 100_001
    assert activations.smallest == -40.0
    for method in ("percentile", "entropy"):
        assert 2.0 < activations.threshold(method) < 6.0


def test_histogram_doubles_without_losing_counts() -> None:
    activations = Activations()
    activations.add(np.linspace(0, 1, 1000, dtype=np.float32))
    activations.add(np.linspace(0, 5, 1000, dtype=np.float32))
    assert activations.limit == 8.0
    assert activations.counts.sum() == 2000
    below = activations.counts[: len(activations.counts) // 8].sum()
    assert below == pytest.approx(1000 + 200, abs=10)


def test_not_finite_values_are_counted_not_ranged() -> None:
    activations = Activations()
    activations.add(np.array([1.0, np.nan, np.inf, -2.0], np.float32))
    assert (activations.not_finite, activations.largest) == (2, 2.0)


@pytest.mark.parametrize("needed", [{"b"}, {"a", "d"}, {"e"}, set("abcde")])
def test_the_subset_is_minimal(needed: set[str]) -> None:
    assert set(minimal_subset("abcde", lambda names: needed <= set(names))) == needed


def test_no_exceptions_help() -> None:
    with pytest.raises(CheckFailed, match="even with every node left in float32"):
        minimal_subset("abc", lambda names: False)


def test_unknown_precision() -> None:
    with pytest.raises(InputError, match="unknown precision 'int4'"):
        lower_precision(linear_graph(), "int4", random_images(MIN_IMAGES))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["fp16", "bf16"])
def test_a_half_base_of_int8_is_not_for_a_cpu(base: Any) -> None:
    """ONNX Runtime's rewriting of uint8 activations with half scales computes something else."""
    with pytest.raises(InputError, match=f"base {base} of int8 is for target tensorrt"):
        lower_precision(linear_graph(), "int8", random_images(MIN_IMAGES), target="cpu", base=base, quiet=True)


def test_files_written_load_from_disk(int8: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(int8.graph, str(path))
    onnx.checker.check_model(str(path), full_check=True)
    assert onnx.load(str(path)) == int8.graph
