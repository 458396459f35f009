"""The rule that names a limit, the FLOPs and bytes it is given, and the probes."""

from contextlib import ExitStack

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.bench.graph_cost import count_cost, node_flops
from vitx.bench.probe_graphs import copy_graph, empty_graph, product_graph
from vitx.bench.roofline import copy_probe, empty_call, fixed_seconds, name_limit, probe_dtype, product_probe
from vitx.bench.timing import Lane, Probe
from vitx.core.bundle import Bundle
from vitx.core.latency import GraphCost, Limit
from vitx.runtimes import SessionClosed, load_session

# One image: 1 GFLOP and 1 MB of activations; 2 MB of weights.
COST = GraphCost(flops=10**9, activation_bytes=10**6, weight_bytes=2 * 10**6)


@pytest.mark.parametrize(
    ("seconds", "parts", "rates", "limit"),
    [
        # Computing takes 10 ms, reading and writing 0.3 ms.
        (0.012, {"fixed": 0.001}, (1e11, 1e10), "compute"),
        (0.012, {"fixed": 0.001}, (1e14, 1e9), "memory"),
        # 7 of 12 ms do not grow with the batch; 0.2 ms of them read weights.
        (0.012, {"fixed": 0.007}, (1e11, 1e10), "launch"),
        # The same, but an empty call takes most of it.
        (0.012, {"fixed": 0.007, "call": 0.0065}, (1e11, 1e10), "python"),
        (0.012, {"fixed": 0.001, "decode": 0.008}, (1e11, 1e10), "decode"),
        # Reading the weights is fixed, and memory.
        (0.012, {"fixed": 0.010}, (1e14, 2e8), "memory"),
    ],
)
def test_the_limit_is_what_the_greatest_part_of_a_call_goes_to(
    seconds: float, parts: dict[str, float], rates: tuple[float, float], limit: Limit
) -> None:
    fixed, call, decode = (parts.get(name, 0.0) for name in ("fixed", "call", "decode"))
    found = name_limit(
        seconds,
        fixed=fixed,
        call=call,
        decode=decode,
        cost=COST,
        batch_size=1,
        flops_per_second=rates[0],
        bytes_per_second=rates[1],
    )
    assert found == limit


def test_the_fixed_part_is_the_line_at_no_images() -> None:
    assert fixed_seconds({1: 0.003, 8: 0.010, 32: 9.0}) == pytest.approx(0.002)
    assert fixed_seconds({8: 0.010, 1: 0.003}) == pytest.approx(0.002)
    assert fixed_seconds({1: 0.001, 8: 0.010}) == 0  # larger batches fall out of a cache
    assert fixed_seconds({1: 0.003, 2: 0.002}) == 0.003  # noise


def test_a_share_is_of_the_probes_around_each_round() -> None:
    probe = Probe("product", 100.0, Lane("", lambda: None, turn_medians=[1.0, 2.0, 1.0, 1.0]))
    assert probe.rates == [100, 50, 100, 100]
    # Work of 60: rounds at 60/1 of 75, 60/4 of 75, 60/1 of 100.
    lane = Lane("", lambda: None, turn_medians=[1.0, 4.0, 1.0])
    assert probe.share(lane, 60.0) == pytest.approx(0.6)
    lane.turn_medians.pop()  # it was done a round before the others
    assert probe.share(lane, 60.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "flops"),
    [
        ("MatMul", [[2, 3, 5], [5, 7]], [[2, 3, 7]], 2 * 2 * 3 * 5 * 7),
        ("Gemm", [[4, 5], [7, 5], [7]], [[4, 7]], 2 * 4 * 5 * 7),
        ("Conv", [[1, 3, 8, 8], [6, 3, 4, 4], [6]], [[1, 6, 2, 2]], 2 * 6 * 2 * 2 * 3 * 4 * 4),
        ("Conv", [[1, 6, 8, 8], [6, 1, 3, 3]], [[1, 6, 8, 8]], 2 * 6 * 64 * 9),  # depthwise
        ("Attention", [[2, 3, 5, 4]] * 3, [[2, 3, 5, 4]], 2 * 2 * (2 * 3 * 5 * 5 * 4)),
        ("Attention", [[2, 5, 12]] * 3, [[2, 5, 12]], 2 * 2 * (2 * 3 * 5 * 5 * 4)),
        ("Softmax", [[2, 3]], [[2, 3]], 0),
    ],
)
def test_flops_of_an_operator(kind: str, inputs: list[list[int]], outputs: list[list[int]], flops: int) -> None:
    assert node_flops(kind, inputs, outputs) == flops


def test_cost_of_a_bundle(tiny_bundle: Bundle) -> None:
    cost = count_cost(tiny_bundle)
    assert cost.flops == 2 * 3 * 4  # (1, 3) times (3, 4)
    pixels = 16 * 16 * 3
    # Cast 1 + 4 bytes a value, three element-wise kernels 4 + 4, the mean reads all; then 3 and 4 values.
    assert cost.activation_bytes == pixels * (5 + 3 * 8 + 4) + 4 * (3 + 3 + 4)
    # scale, mean, std, the axes (int64), weight, bias.
    assert cost.weight_bytes == 4 * (1 + 3 + 3) + 8 * 2 + 4 * (12 + 4)


def test_flops_are_those_that_torch_counts(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle) -> None:
    """A convolution, products of activations, and a product with a weight, in a graph that ONNX Runtime fuses."""
    rng = np.random.default_rng(0)
    constants = {
        "kernel": rng.normal(size=(8, 3, 4, 4)).astype(np.float32),
        "weight": rng.normal(size=(8, 4)).astype(np.float32),
        "scale": np.float32(0.5),
        "flat": np.array([0, 8, 16], dtype=np.int64),
        "space": np.array([1], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["float"], ["pixels"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["pixels", "kernel"], ["patches"], strides=[4, 4]),
        helper.make_node("Reshape", ["patches", "flat"], ["keys"]),
        helper.make_node("Transpose", ["keys"], ["queries"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["queries", "keys"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["maps"]),
        helper.make_node("MatMul", ["maps", "queries"], ["mixed"]),
        helper.make_node("ReduceMean", ["mixed", "space"], ["token"], keepdims=0),
        helper.make_node("MatMul", ["token", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 16, 16, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tiny_bundle.model_path)
    expected = 2 * (16 * 8 * 48 + 16 * 16 * 8 + 16 * 16 * 8 + 8 * 4)
    assert count_cost(tiny_bundle).flops == expected


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_probe_graphs_are_sound(dtype: str, tiny_bundle: Bundle) -> None:
    product = onnx.load_from_string(product_graph(16, dtype))
    onnx.checker.check_model(product, full_check=True)
    onnx.checker.check_model(onnx.load_from_string(copy_graph()), full_check=True)
    kept = numpy_helper.to_array(product.graph.initializer[0]).astype(np.float32)
    values = np.random.default_rng(0).integers(-8, 9, (16, 16)) / 8
    np.testing.assert_array_equal(kept, values)


def test_the_empty_graph_is_the_bundles_contract(tiny_bundle: Bundle) -> None:
    graph = empty_graph(tiny_bundle.manifest.input, tiny_bundle.manifest.output)
    onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": np.ones((3, 16, 16, 3), dtype=np.uint8)})
    np.testing.assert_array_equal(logits, np.zeros((3, 4), dtype=np.float32))


def test_an_empty_call_goes_through_the_same_runtime(tiny_bundle: Bundle) -> None:
    with ExitStack() as opened:
        lane = empty_call(tiny_bundle, lambda bundle: load_session(bundle, device="cpu", threads=1), opened)
        assert lane is not None
        assert np.asarray(lane.call()).tolist() == [[0, 0, 0, 0]]
    with pytest.raises(SessionClosed):
        lane.call()


@pytest.mark.parametrize("threads", [1, 2])
def test_probes_run_and_count_their_work(threads: int) -> None:
    for probe in (product_probe("cpu", "fp32", threads), copy_probe("cpu", threads)):
        probe.lane.take_turn(0.001)
        assert probe.rate == pytest.approx(probe.work / probe.lane.median)


def test_the_probes_dtype_is_what_the_device_multiplies_in() -> None:
    assert probe_dtype("int8", "cpu") == probe_dtype("fp16", "cpu") == "fp32"
    assert [probe_dtype(precision, "cuda") for precision in ("fp32", "bf16", "int8")] == ["fp32", "bf16", "fp16"]
