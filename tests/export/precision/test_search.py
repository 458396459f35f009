"""What is measured and tried before a graph is lowered, and in which words it is refused: small graphs by hand."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.console import counted
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.data.image_set import evenly_spaced
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_in_parts, logits_of
from vitx.export.precision import acceptance, lower, placement, quantization
from vitx.export.precision.acceptance import (
    FIRST_IMAGES,
    Bounds,
    SamplingPlan,
    agreement_of,
    judging_order,
)
from vitx.export.precision.calibration import MIN_IMAGES, observe, split_images
from vitx.export.precision.half import HalfGraph, cpu_twin
from vitx.export.precision.islands import added_error_by_node
from vitx.export.precision.lower import lower_precision
from vitx.export.precision.qdq import QuantizedGraph
from vitx.export.precision.quantization import quantize

LARGE = Bounds(100.0, 0.0)


def images_of(count: int) -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (count, 2, 2, 3), dtype=np.uint8)


def graph_of(nodes: Sequence[onnx.NodeProto], **constants: Any) -> onnx.ModelProto:
    """uint8 (N, 2, 2, 3) → `x` (N, 12) → `nodes` → `logits` (N, 12)."""
    first = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Flatten", ["pixels"], ["x"], name="flatten"),
    ]
    graph = helper.make_graph(
        [*first, *nodes],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 2, 2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 12])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def three_products() -> onnx.ModelProto:
    """The second layer is the most sensitive: row 0 of its weights is huge and makes the codes of the others coarse,
    and as column 0 of the first is zero, nothing else comes of that row.
    """
    rng = np.random.default_rng(0)
    first, second, third = (np.linalg.qr(rng.normal(size=(12, 12)))[0] for _ in range(3))
    first, third = np.eye(12) / 100 + first / 1e4, np.eye(12) + third / 10
    first[:, 0] = 0
    second[0] = 40
    nodes = [
        *(
            helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
            helper.make_node("Relu", ["h"], ["r"], name="r"),
        ),
        *(
            helper.make_node("MatMul", ["r", "B"], ["s"], name="second"),
            helper.make_node("Tanh", ["s"], ["t"], name="t"),
        ),
        helper.make_node("MatMul", ["t", "C"], ["logits"], name="third"),
    ]
    return graph_of(nodes, A=first, B=second, C=third)


GRAPH, IMAGES = three_products(), images_of(MIN_IMAGES)
LAYERS = ["first", "second", "third"]


KNOWN: dict[Any, Any] = {}


def observed(graph: onnx.ModelProto, tensors: Sequence[str], images: UInt8Array, *, bar: Any = None) -> Any:
    """`observe`, which takes a tenth of a second, once for equal arguments; its ranges are only read."""
    key = (graph.SerializeToString(), tuple(tensors), images.tobytes())
    if key not in KNOWN:
        KNOWN[key] = observe(graph, tensors, images)
    return KNOWN[key]


@pytest.fixture(autouse=True)
def _observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "observe", observed)
    monkeypatch.setattr(placement, "MIN_SIDE", 1)  # the products here are small whatever the target


def measured(
    graph: onnx.ModelProto, method: Any, layers: list[str], kind: Any = "int8", count: int | None = None
) -> Any:
    """The agreement on the held-out images, with the fewest of the program's own functions."""
    calibration, held_out = split_images(IMAGES)
    ranges = observed(graph, ["r", "t", "x"], calibration)
    built = QuantizedGraph(Dataflow(graph), kind, "cpu").build(layers, ranges, method)
    judged = held_out[judging_order(len(held_out))][:count]
    std = float(logits_of(graph, held_out).std())
    return agreement_of(logits_of(graph, judged), logits_of(built, judged, fused=kind == "int8"), std)


def test_what_the_manifest_says_of_a_quantised_graph() -> None:
    lowered = quantize(GRAPH, "int8", IMAGES, bounds=LARGE, quiet=True)
    details = lowered.details
    assert lowered.islands == ()
    compared = {method: measured(GRAPH, method, LAYERS, count=16) for method in ("max", "percentile", "entropy")}
    best = min(compared, key=lambda method: compared[method].mean_error)
    ranges = observed(GRAPH, ["r", "t", "x"], split_images(IMAGES)[0])
    assert details == {
        "kind": "int8",
        "target": "cpu",
        "base": "fp32",
        "calibration_images": 256,
        "held_out_images": 64,
        "allowed": LARGE.as_json(),
        "method": best,
        "percentile": 0.9999,
        "layers": 3,
        "quantized": 3,
        "not_quantized": [],
        "weights_with_one_scale": [],
        "methods": {method: agreement.as_json() for method, agreement in compared.items()},
        "sensitivity": {},
        "trials": [{"what": "0 layers in float32", **measured(GRAPH, best, LAYERS).as_json(), "within_bounds": True}],
        "ranges": {name: ranges[name].threshold(best) for name in ("r", "t", "x")},
    }
    written = QuantizedGraph(Dataflow(GRAPH), "int8", "cpu").build(LAYERS, ranges, best)  # type: ignore[arg-type]
    assert lowered.graph.SerializeToString() == written.SerializeToString()


def test_the_method_of_the_least_mean_error_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        method: measured(GRAPH, method, LAYERS, count=16).mean_error for method in ("max", "percentile", "entropy")
    }
    assert errors["entropy"] < errors["max"]
    for methods in (("max", "entropy"), ("entropy", "max"), ("percentile",)):
        monkeypatch.setattr(quantization, "METHODS_FOR", {"int8": methods})
        found = quantize(GRAPH, "int8", IMAGES, bounds=LARGE, quiet=True)
        assert found.details["method"] == min(methods, key=lambda method: errors[method])
        assert list(found.details["methods"]) == list(methods)


def test_layers_stay_in_float_the_most_sensitive_first() -> None:
    alone = {name: measured(GRAPH, "max", [name], count=8).mean_error for name in LAYERS}
    assert alone["second"] > 2 * max(alone["first"], alone["third"])
    full, without = (measured(GRAPH, "max", layers) for layers in (LAYERS, ["first", "third"]))
    assert without.max_error < full.max_error
    bounds = Bounds((without.max_error + full.max_error) / 2, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "METHODS_FOR", {"int8": ("max",)})
        lowered = quantize(GRAPH, "int8", IMAGES, bounds=bounds, quiet=True)
    assert lowered.islands == ("second",)
    assert lowered.details["sensitivity"] == pytest.approx(alone, rel=1e-5)
    assert (lowered.details["layers"], lowered.details["quantized"]) == (3, 2)
    whats = [trial["what"] for trial in lowered.details["trials"]]
    assert whats[0] == "0 layers in float32"
    assert whats[-1] == "1 layer in float32"


@pytest.mark.parametrize(("kind", "methods", "fused"), [("int8", 3, True), ("fp8", 2, False)])
def test_eight_bits_are_judged_as_they_will_run(
    monkeypatch: pytest.MonkeyPatch, kind: Any, methods: int, fused: bool
) -> None:
    asked: list[bool] = []

    def recorded(run: Any) -> Any:
        def recorder(graph: onnx.ModelProto, images: Any, *, fused: bool = True) -> Any:
            asked.append(fused)
            return run(graph, images, fused=fused)

        return recorder

    monkeypatch.setattr(acceptance, "logits_in_parts", recorded(logits_in_parts))
    monkeypatch.setattr(acceptance, "logits_of", recorded(logits_of))
    details = quantize(GRAPH, kind, IMAGES, target="tensorrt", quiet=True, bounds=LARGE).details
    assert asked == [True, *[fused] * (methods + 1)]
    assert len(details["methods"]) == methods
    assert (details["kind"], details["target"]) == (kind, "tensorrt")


def test_bounds_are_by_default_those_of_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "SENSITIVITY_IMAGES", 16)  # in fp8 two layers are nearly equal
    for kind in ("int8", "fp8"):
        allowed = quantize(GRAPH, kind, IMAGES, accept=lambda _: True, quiet=True).details["allowed"]
        assert allowed == Bounds(0.5).as_json()
    for precision, share in (("fp16", 0.02), ("bf16", 0.15)):
        lowered = lower_precision(graph_of([RELU]), precision, IMAGES[:32], quiet=True)  # type: ignore[arg-type]
        assert lowered.details["allowed"] == Bounds(share).as_json()


@pytest.mark.parametrize(
    ("accept", "refused"), [(None, ""), (False, " and was then refused by the caller's own check")]
)
def test_when_no_choice_passes_the_best_is_described(accept: bool | None, refused: str) -> None:
    bounds = Bounds(1e-9) if accept is None else LARGE
    asked: list[onnx.ModelProto] = []
    with pytest.raises(CheckFailed) as failed:
        quantize(GRAPH, "int8", IMAGES, bounds=bounds, accept=None if accept is None else asked.append, quiet=True)  # type: ignore[arg-type]
    text = str(failed.value)
    assert text.startswith("no choice of layers passes: the best, ")
    assert text.endswith(f" standard deviations{refused}; allowed are {bounds}")
    count = 16 if accept is None else 64  # what fails clearly is looked at no longer
    assert f" of {count} images in another class and a largest logit error of " in text
    if accept is not None:
        sizes = [sum(node.op_type == "QuantizeLinear" for node in graph.graph.node) for graph in asked]
        assert list(dict.fromkeys(sizes)) == [3, 2, 1], "with all layers in float32 nothing is left to ask"


def test_the_best_of_all_trials_is_the_one_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "METHODS_FOR", {"int8": ("max",)})
    alone = {name: measured(GRAPH, "max", [name], count=8).mean_error for name in LAYERS}
    order = sorted(LAYERS, key=lambda name: alone[name])
    best = measured(GRAPH, "max", order[:1], count=16)
    assert best.max_error < min(measured(GRAPH, "max", order[:count], count=16).max_error for count in (2, 3))
    with pytest.raises(CheckFailed, match=r"of the 360 .*; train longer, or allow more \(--max-flip-rate\)$"):
        quantize(GRAPH, "int8", IMAGES, bounds=Bounds(1e-9, sampling_plan=SamplingPlan(360, 0)), quiet=True)
    with pytest.raises(CheckFailed) as failed:
        quantize(GRAPH, "int8", IMAGES, bounds=Bounds(1e-9), quiet=True)
    assert str(failed.value) == (
        f"no choice of layers passes: the best, 2 layers in float32, has {best.flips} of 16 images in another class "
        f"and a largest logit error of {best.max_error:.3g} standard deviations; allowed are 1e-09 and 0.01 of the "
        "images"
    )


def test_progress_and_one_line_are_shown_unless_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []

    @contextmanager
    def recorded(title: str, total: int, *, quiet: bool = False) -> Iterator[Any]:
        shown.append((title, total, quiet))

        class Bar:
            def update(self, done: int, note: str = "") -> None:
                shown.append((done, note))

        yield Bar()

    monkeypatch.setattr(quantization, "progress", recorded)
    monkeypatch.setattr(lower, "progress", recorded)
    quantize(GRAPH, "int8", IMAGES, bounds=LARGE)
    lower_precision(GRAPH, "int8", IMAGES, bounds=LARGE, quiet=True)
    lower_precision(GRAPH, "fp16", IMAGES[:40], bounds=LARGE)
    lower_precision(GRAPH, "bf16", IMAGES[:40], bounds=LARGE, quiet=True)
    none = (1, "0 layers in float32")
    assert shown == [
        *(("int8 ranges", 256, False), ("int8 trials", 0, False), none),
        *(("int8 ranges", 256, True), ("int8 trials", 0, True), none),
        *(("fp16 trials", 0, False), (1, "no island"), ("bf16 trials", 0, True), (1, "no island")),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "int8: ranges from 256 images, judged on up to 64 others",
        "fp16: overflow looked for on up to 40 images, islands judged on up to 40",
    ]


RELU = helper.make_node("Relu", ["x"], ["logits"], name="relu")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((40, 2, 2, 3), np.float32), "images are float32 (40, 2, 2, 3): the graph takes uint8 (n, 2, 2, 3)"),
        (np.zeros((40, 2, 3, 3), np.uint8), "images are uint8 (40, 2, 3, 3): the graph takes uint8 (n, 2, 2, 3)"),
        (np.zeros((40, 12), np.uint8), "images are uint8 (40, 12): the graph takes uint8 (n, 2, 2, 3)"),
        (
            np.zeros((31, 2, 2, 3), np.uint8),
            "31 images to judge a lower precision on: give at least 32 real ones, and 320 where ranges are calibrated "
            "(int8, fp8)",
        ),
    ],
)
def test_unusable_images_are_refused(images: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        lower_precision(graph_of([RELU]), "fp16", images, quiet=True)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ([("images", TensorProto.FLOAT)], "images (float)"),
        ([("images", TensorProto.UINT8), ("mask", TensorProto.BOOL)], "images (uint8), mask (bool)"),
        ([], "nothing"),
    ],
)
def test_a_graph_of_other_inputs_is_refused(inputs: list[tuple[str, int]], given: str) -> None:
    """As timm's own export has float pixels: it was a traceback of the runtime, after the graph was taken apart."""
    graph = graph_of([RELU])
    del graph.graph.input[:]
    graph.graph.input.extend(helper.make_tensor_value_info(*each, ["N", 2, 2, 3]) for each in inputs)
    with pytest.raises(InputError) as refused:
        lower_precision(graph, "fp16", np.zeros((40, 2, 2, 3), np.uint8), quiet=True)
    assert str(refused.value) == f"the graph takes {given}: expected one input, uint8 images (n, S, S, 3)"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="unknown precision 'fp61': did you mean fp16") as refused:
        lower_precision(graph_of([RELU]), "fp61", IMAGES)  # type: ignore[arg-type]
    for known in ("fp16", "bf16", "int8", "fp8"):
        assert known in str(refused.value)


# x → ·grow → Relu → ÷grow → product with A.
GROWN = [
    helper.make_node("Mul", ["x", "grow"], ["large"], name="grow it"),
    helper.make_node("Relu", ["large"], ["kept"], name="keep"),
    helper.make_node("Div", ["kept", "grow"], ["small"], name="shrink"),
    helper.make_node("MatMul", ["small", "A"], ["logits"], name="classify"),
]


def grown(factor: float) -> onnx.ModelProto:
    matrix = np.random.default_rng(0).normal(size=(12, 12))
    return graph_of(GROWN, grow=factor, A=matrix)


@pytest.mark.parametrize(("count", "judged"), [(33, 33), (200, 200), (400, 144)])
def test_what_the_manifest_says_of_a_half_graph(count: int, judged: int) -> None:
    images = images_of(count)
    graph = grown(3.0)
    lowered = lower_precision(graph, "fp16", images, bounds=LARGE, quiet=True)
    half = HalfGraph(Dataflow(graph), TensorProto.FLOAT16)
    chosen = split_images(images)[1] if count == 400 else images
    chosen = chosen[judging_order(judged)[:FIRST_IMAGES]]  # the bounds are so wide that these decide
    same = agreement_of(logits_of(graph, chosen), logits_of(cpu_twin(half.build(())), chosen))
    seen = images[evenly_spaced(count, 16)].reshape(16, 12)  # far below the type's largest number
    values = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    largest = max(3.0 * float(seen.max()), float(np.abs(seen.astype(np.float32) @ values).max()))
    assert lowered.details.pop("largest_activation") == pytest.approx(largest, rel=1e-6)
    assert lowered.details == {
        "kind": "fp16",
        "observed_images": 16,
        "held_out_images": judged,
        "measured_on": "float32 twin with every tensor rounded where it is made",
        "allowed": LARGE.as_json(),
        "overflow": {},
        "without_kernel": [],
        "rounding": {},
        "nodes": 6,
        "trials": [{"what": "no island", **same.as_json(), "within_bounds": True}],
    }
    assert (same.images, lowered.islands) == (min(judged, 64), ())
    assert lowered.graph.SerializeToString() == half.build(()).SerializeToString()


def test_nodes_that_overflow_are_islands_and_their_values_are_told() -> None:
    images = images_of(40)
    images[7, 0, 0, 0] = 255
    lowered = lower_precision(grown(300.0), "fp16", images, quiet=True)
    assert lowered.islands == ("grow it", "keep", "shrink")
    assert lowered.details["overflow"] == {"large": 76500.0, "kept": 76500.0}
    assert lowered.details["largest_activation"] == 76500.0
    whats = [trial["what"] for trial in lowered.details["trials"]]
    assert whats[:2] == ["no island", "3 islands, where it overflows"]
    assert set(whats[2:]) <= {counted(count, "island") for count in range(1, 4)}
    assert list(lowered.details["rounding"]) == ["grow it", "keep", "shrink"]


@pytest.mark.parametrize("precision", ["int8", "fp8", "fp16", "bf16"])
def test_an_activation_that_is_not_finite_is_named_though_the_logits_are(precision: Any) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
        helper.make_node("Tanh", ["h"], ["t"], name="bound"),
        helper.make_node("MatMul", ["t", "C"], ["logits"], name="last"),
        helper.make_node("MatMul", ["h", "C"], ["other"], name="reader"),
    ]
    graph = graph_of(nodes, A=np.diag([3e38] + [1] * 11), C=np.eye(12))
    images = IMAGES // 4 + 2  # always beyond the largest float32
    with pytest.raises(CheckFailed) as refused:
        lower_precision(graph, precision, images, quiet=True)
    seen = 256 if precision in ("int8", "fp8") else 16
    assert str(refused.value) == (
        f"'h', made by first, holds {seen} values that are not finite in float32 already: no lower precision can hold "
        "them"
    )


def test_the_largest_number_of_the_type_is_no_overflow() -> None:
    graph = graph_of([helper.make_node("Div", ["x", "huge"], ["logits"], name="shrink")], huge=65504.0)
    lowered = lower_precision(graph, "fp16", images_of(40), bounds=LARGE, quiet=True)
    assert (lowered.islands, lowered.details["overflow"]) == ((), {})
    exact = graph_of([helper.make_node("Mul", ["x", "f"], ["logits"], name="grow")], f=256.0)
    images = images_of(40) % 255  # 254 · 256 = 65,024
    assert lower_precision(exact, "fp16", images, quiet=True).details["overflow"] == {}


def rounding_by_hand(factor: float, images: UInt8Array) -> dict[str, float]:
    """‖exact − rounded‖ / ‖exact‖ of each node's result less the largest of its inputs'."""

    def half(value: Any) -> Any:
        return np.asarray(value, np.float32).astype(np.float16).astype(np.float32)

    matrix = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    x = images.reshape(-1, 12).astype(np.float32)
    f = np.float32(factor)
    exact = [x, x * f, np.maximum(x * f, 0), x * f / f, x * f / f @ matrix]
    large = half(x * half(f))
    small = half(large / half(f))
    rounded = [x, large, large, small]
    errors = [
        float(np.sqrt(np.square(a.astype(np.float64) - b).sum() / np.square(a.astype(np.float64)).sum()))
        for a, b in zip(exact, rounded, strict=False)
    ]
    steps = [after - before for before, after in itertools.pairwise(errors)]
    # The logits are judged themselves, so the last node counts for no result of its own.
    return dict(
        zip(["cast", "flatten", "grow it", "keep", "shrink", "classify"], [0, 0, *steps, -errors[3]], strict=True)
    )


def test_the_rounding_that_each_node_adds() -> None:
    images = images_of(40)
    graph = grown(1 / 3)
    half = HalfGraph(Dataflow(graph), TensorProto.FLOAT16)
    found = added_error_by_node(half, [], images)
    expected = rounding_by_hand(1 / 3, images)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert found["grow it"] > 1e-5
    without = added_error_by_node(half, ["grow it", "keep", "shrink"], images)
    assert without["grow it"] == without["keep"] == 0
    zeros = added_error_by_node(half, [], np.zeros((8, 2, 2, 3), np.uint8))
    assert set(zeros.values()) == {0.0}, "an error of nothing is none"


def test_islands_are_sought_where_most_rounding_is_added() -> None:
    images = images_of(40)
    graph = grown(1 / 3)
    expected = logits_of(graph, images)
    half = HalfGraph(Dataflow(graph), TensorProto.FLOAT16)
    added = rounding_by_hand(1 / 3, images[evenly_spaced(40, 16)][:8])
    order = sorted(added, key=lambda name: -added[name])
    errors = [
        agreement_of(expected, logits_of(cpu_twin(half.build(order[:count])), images)).max_error for count in (0, 6)
    ]
    bounds = Bounds(errors[0] / 50, 0.0)
    lowered = lower_precision(graph, "fp16", images, bounds=bounds, quiet=True)
    assert lowered.islands
    assert [name for name in order if name in lowered.islands] == list(lowered.islands)
    assert list(lowered.details["rounding"]) == order
    assert lowered.details["rounding"] == pytest.approx(added, rel=1e-3, abs=1e-9)
    assert errors[1] == 0
    twin = cpu_twin(lowered.graph)
    assert agreement_of(expected, logits_of(twin, images)).within(bounds)


def test_the_caller_has_the_last_word_on_a_half_graph() -> None:
    asked: list[onnx.ModelProto] = []

    def accept(graph: onnx.ModelProto) -> bool:
        asked.append(graph)
        return len(asked) > 1

    lowered = lower_precision(grown(1 / 3), "fp16", images_of(40), bounds=LARGE, accept=accept, quiet=True)
    trials = [(trial["what"], trial["accepted"]) for trial in lowered.details["trials"]]
    assert trials == [("no island", False), ("1 island", True)]
    assert len(lowered.islands) == 1
