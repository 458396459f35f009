"""The rule that names a limit, the FLOPs and bytes it is given, and the probes."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.bench import roofline
from vitx.bench.graph_cost import count_cost, node_flops
from vitx.bench.probe_graphs import copy_graph, empty_graph, product_graph
from vitx.bench.roofline import (
    copy_bytes,
    copy_probe,
    empty_call,
    fixed_seconds,
    name_limit,
    probe_dtype,
    product_probe,
)
from vitx.bench.timing import Lane, Probe
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing
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


def test_a_call_of_no_empty_graph_and_no_decoding_is_the_runtimes_own() -> None:
    found = name_limit(0.012, fixed=0.007, cost=COST, batch_size=1, flops_per_second=1e11, bytes_per_second=1e10)
    assert found == "launch"


def test_a_batch_counts_each_of_its_images() -> None:
    """One image computes for 1 ms and moves for 1.2 ms, most of it weights; eight compute for 8 and move for 2.6."""
    cost = GraphCost(flops=10**9, activation_bytes=2 * 10**6, weight_bytes=10**7)
    limits = [
        name_limit(0.012, fixed=0, cost=cost, batch_size=size, flops_per_second=1e12, bytes_per_second=1e10)
        for size in (1, 8)
    ]
    assert limits == ["memory", "compute"]


def test_the_fixed_part_is_the_line_at_no_images() -> None:
    assert fixed_seconds({1: 0.003, 8: 0.010, 32: 9.0}) == pytest.approx(0.002)
    assert fixed_seconds({8: 0.010, 1: 0.003}) == pytest.approx(0.002)
    assert fixed_seconds({1: 0.001, 8: 0.010}) == 0  # larger batches fall out of a cache
    assert fixed_seconds({1: 0.003, 2: 0.002}) == 0.003  # noise


def test_a_share_is_of_the_probes_around_each_round() -> None:
    probe = Probe(100.0, Lane("", lambda: None, turn_medians=[1.0, 2.0, 1.0, 1.0]))
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
        ("Gemm", [[5, 4], [5, 7], [7]], [[4, 7]], 2 * 4 * 5 * 7),  # transA
        ("Conv", [[1, 3, 8, 8], [6, 3, 4, 4], [6]], [[1, 6, 2, 2]], 2 * 6 * 2 * 2 * 3 * 4 * 4),
        ("Conv", [[1, 6, 8, 8], [6, 1, 3, 3]], [[1, 6, 8, 8]], 2 * 6 * 64 * 9),  # depthwise
        ("Attention", [[2, 3, 5, 4]] * 3, [[2, 3, 5, 4]], 2 * 2 * (2 * 3 * 5 * 5 * 4)),
        ("Attention", [[2, 5, 12]] * 3, [[2, 5, 12]], 2 * 2 * (2 * 3 * 5 * 5 * 4)),
        ("Softmax", [[2, 3]], [[2, 3]], 0),
    ],
)
def test_flops_of_an_operator(kind: str, inputs: list[list[int]], outputs: list[list[int]], flops: int) -> None:
    assert node_flops(kind, inputs, outputs) == flops


def test_cost_of_a_bundle(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = set(tmp_path.rglob("*"))
    cost = count_cost(tiny_bundle)
    assert cost is not None
    assert set(tmp_path.rglob("*")) == there, "a profile beside the user's files"
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
    cost = count_cost(tiny_bundle)
    assert cost is not None
    assert cost.flops == expected


def test_a_graph_without_kernels_on_a_cpu_is_not_counted(tiny_bundle: Bundle) -> None:
    """ONNX Runtime has no products in bf16 there; OpenVINO and GPUs run such a bundle."""
    model = onnx.load(tiny_bundle.model_path)
    at, product = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type in ("MatMul", "Gemm"))
    for number, name in enumerate(list(product.input)):
        model.graph.node.insert(at, helper.make_node("Cast", [name], [f"half_{number}"], to=TensorProto.BFLOAT16))
        product.input[number] = f"half_{number}"
        at += 1
    model.graph.node.insert(at + 1, helper.make_node("Cast", ["half"], [product.output[0]], to=TensorProto.FLOAT))
    product.output[0] = "half"
    onnx.save(model, tiny_bundle.model_path)
    assert count_cost(tiny_bundle) is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_probe_graphs_are_sound(dtype: str, tiny_bundle: Bundle) -> None:
    product = onnx.load_from_string(product_graph(16, dtype))
    onnx.checker.check_model(product, full_check=True)
    copy = onnx.load_from_string(copy_graph())
    onnx.checker.check_model(copy, full_check=True)
    (length,) = copy.graph.input[0].type.tensor_type.shape.dim
    assert length.dim_param == "N"
    for value in (product.graph.input[0], product.graph.output[0]):
        assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [16, 16]
    for model in (product, copy):  # and nothing that is no field of it, which readers skip
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 20)]
        whole = model.ByteSize()
        model.DiscardUnknownFields()
        assert model.ByteSize() == whole
    kept = numpy_helper.to_array(product.graph.initializer[0]).astype(np.float32)
    values = np.random.default_rng(0).integers(-8, 9, (16, 16)) / 8
    np.testing.assert_array_equal(kept, values)


def test_extents_of_more_than_a_byte_are_kept() -> None:
    """Seven bits a byte: 127, 128 and 129 are on both sides of the second one."""
    for side in (127, 128, 129):
        model = onnx.load_from_string(product_graph(side, "fp32"))
        assert list(model.graph.initializer[0].dims) == [side, side]


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


def test_the_work_of_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "CPU_SIDE", 16)
    monkeypatch.setattr(roofline, "copy_bytes", lambda: 1000)
    runs: list[object] = []
    run = onnxruntime.InferenceSession.run_with_iobinding

    def noted(session: Any, binding: object) -> None:
        runs.append(session)
        run(session, binding)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", noted)
    product = product_probe("cpu", "fp32", 1)
    assert (product.work, product.lane.title) == (2 * 16**3, "probe: fp32 product")
    product.lane.call()
    assert len(runs) == 1
    copy = copy_probe("cpu", 2)
    assert (copy.work, copy.lane.title) == (2000, "probe: copy")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_on_threads_copies_every_part(threads: int) -> None:
    source, target = np.arange(10, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
    parts = [*zip(np.array_split(source, threads), np.array_split(target, threads), strict=True)]
    roofline._threaded_copy(parts, threads)()
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(
    ("sizes", "mebibytes"),
    [
        ((), 64),
        (("48K", "1024K"), 64),
        (("32K", "32M", "2048K"), 128),
        (("32768K\n",), 128),
        (("260M",), 512),
        (("", "20M"), 80),  # a kernel that does not say
    ],
)
def test_a_copy_is_four_times_the_largest_cache(
    sizes: tuple[str, ...], mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size)
    monkeypatch.setattr(roofline, "CACHE_FILES", f"{tmp_path}/index*/size")
    assert copy_bytes() == mebibytes << 20


class Gpu:
    """ONNX Runtime as far as the probes call it, with a provider that is there or not."""

    def __init__(self, provider: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.provider = provider
        self.OrtValue = SimpleNamespace(
            ortvalue_from_numpy=lambda values, device, index: ("typed", values, device, index),
            ortvalue_from_numpy_with_onnx_type=lambda values, kind: ("bits", values, kind),
        )
        self.SessionOptions = SimpleNamespace

    def preload_dlls(self) -> None:
        self.calls.append(("preload",))

    def InferenceSession(self, graph: bytes, options: Any, providers: list[Any]) -> Any:
        self.calls.append(("session", graph, options.intra_op_num_threads, providers))

        def note(name: str) -> Any:
            return lambda *arguments: self.calls.append((name, *arguments))

        binding = SimpleNamespace(
            bind_ortvalue_input=note("input"), bind_output=note("output"), synchronize_outputs=note("synchronize")
        )
        return SimpleNamespace(
            get_providers=lambda: [self.provider, "CPUExecutionProvider"],
            io_binding=lambda: binding,
            get_inputs=lambda: [SimpleNamespace(name="a")],
            get_outputs=lambda: [SimpleNamespace(name="b")],
            run_with_iobinding=lambda bound: self.calls.append(("run", bound is binding)),
        )


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", np.float32), ("fp16", np.float16), ("bf16", np.uint16)])
def test_a_product_on_a_gpu_is_of_its_types(monkeypatch: pytest.MonkeyPatch, dtype: str, expected: type) -> None:
    gpu = Gpu("CUDAExecutionProvider")
    monkeypatch.setitem(sys.modules, "onnxruntime", gpu)
    monkeypatch.setattr(roofline, "GPU_SIDE", 64)
    probe = product_probe("cuda", dtype, 3)
    assert (probe.work, probe.lane.title) == (2 * 64**3, f"probe: {dtype} product")
    preload, session, (_, name, tensor), output = gpu.calls
    assert preload == ("preload",)
    assert session == ("session", product_graph(64, dtype), 3, [("CUDAExecutionProvider", {"use_tf32": "0"})])
    assert (name, output) == ("a", ("output", "b", "cuda"))
    values = np.random.default_rng(1).integers(-8, 9, (64, 64)) / 8
    if dtype == "bf16":
        kind, bits, element = tensor
        assert (kind, bits.dtype, element) == ("bits", expected, TensorProto.BFLOAT16)
        found = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        kind, found, *place = tensor
        assert (kind, found.dtype, place) == ("typed", expected, ["cuda", 0])
    np.testing.assert_array_equal(found, values)
    probe.lane.call()
    assert gpu.calls[4:] == [("run", True), ("synchronize",)]


def test_a_copy_on_a_gpu_reads_and_writes_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("CUDAExecutionProvider")
    monkeypatch.setitem(sys.modules, "onnxruntime", gpu)
    monkeypatch.setattr(roofline, "GPU_COPY_BYTES", 4096)
    probe = copy_probe("cuda", 1)
    assert (probe.work, probe.lane.title) == (2 * 4096, "probe: copy")
    assert gpu.calls[1][1] == copy_graph()
    assert gpu.calls[2][2][1].shape == (1024,)


def test_probes_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", Gpu("AzureExecutionProvider"))
    monkeypatch.setattr(roofline, "GPU_SIDE", 16)
    with pytest.raises(EnvironmentMissing, match=r"^the probes need CUDAExecutionProvider, but ONNX Runtime would use"):
        product_probe("cuda", "fp32", 1)


def test_the_probes_dtype_is_what_the_device_multiplies_in() -> None:
    assert probe_dtype("int8", "cpu") == probe_dtype("fp16", "cpu") == "fp32"
    assert [probe_dtype(precision, "cuda") for precision in ("fp32", "bf16", "int8")] == ["fp32", "bf16", "fp16"]
