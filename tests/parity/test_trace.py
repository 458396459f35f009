"""The trace's arithmetic on tensors of a few numbers, its sentences, and the limits of a diagnosis."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from table_session import PIXEL, TableSession, numbered_images
from vitx.core.errors import CheckFailed, InputError
from vitx.parity import divergence
from vitx.parity.diagnosis import Diagnosis, diagnose
from vitx.parity.divergence import LayerError, NodeError, Trace, node_errors, overflow_text
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.trace import TraceResult, _repair_text, diagnosis_note, measure_token_similarity, require_layers

CLASSES = ("a", "b", "c")


def test_errors_of_a_layer_are_sums_over_batches() -> None:
    sums = divergence._ErrorSums()
    # Errors 1 and 2 of norms 3 and 4, then 2 of 12: √(9 / 169).
    sums.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 2.0]]))
    sums.add(torch.tensor([[12.0, 0.0]]), torch.tensor([[12.0, 2.0]]))
    assert sums.error == pytest.approx(3 / 13)
    assert sums.result("x") == LayerError("x", sums.error, None)
    sums.add_own(None, torch.zeros(1, 2))
    assert sums.result("x").own is None
    # A last block of the class token alone: the first token of the exact ones is compared.
    sums.add_own(torch.tensor([[[1.0], [50.0]]]), torch.tensor([[[3.0]]]))
    sums.add_own(torch.tensor([[[1.0]]]), torch.tensor([[[2.0]]]))
    assert sums.result("x").own == pytest.approx(math.sqrt(5) / 13)


def test_the_error_of_a_small_layer_is_relative_too() -> None:
    sums = divergence._ErrorSums()
    sums.add(torch.tensor([[0.3, 0.4]]), torch.tensor([[0.3, 0.9]]))
    assert sums.error == pytest.approx(1)
    assert divergence._ErrorSums().error == 0  # of nothing


def test_tokens_that_a_layer_leaves_out_are_not_compared() -> None:
    sums = divergence._ErrorSums()
    sums.add(torch.tensor([[[3.0], [50.0]]]), torch.tensor([[[4.0]]]), prefix_tokens=1)
    assert sums.result("x") == LayerError("x", pytest.approx(1 / 3), None)  # type: ignore[arg-type]


def test_cos_sim_is_of_patches_and_weighted_by_images() -> None:
    """Two images with equal patches and one with orthogonal ones: (2·1 + 0) / 3; the class token is left out."""
    equal, apart = [[9.0, 9.0], [1.0, 0.0], [1.0, 0.0]], [[9.0, 9.0], [1.0, 0.0], [0.0, 1.0]]
    sums = divergence._ErrorSums()
    sums.add(torch.tensor([equal, equal]), torch.tensor([apart, apart]), prefix_tokens=1)
    sums.add(torch.tensor([apart]), torch.tensor([equal]), prefix_tokens=1)
    found = sums.result("x")
    assert (found.similarity_reference, found.similarity_candidate) == pytest.approx((2 / 3, 1 / 3))
    # A single patch has no pair.
    single = divergence._ErrorSums()
    single.add(torch.ones(1, 2, 2), torch.ones(1, 2, 2), prefix_tokens=1)
    assert single.result("x").similarity_reference is None


def test_what_is_not_finite_is_an_infinite_error_and_nothing_has_none() -> None:
    sums = divergence._ErrorSums()
    sums.add(torch.ones(1, 2), torch.tensor([[1.0, math.nan]]))
    assert sums.error == math.inf
    assert divergence._ErrorSums().error == 0


def layers(*rows: tuple[str, float, float | None]) -> tuple[LayerError, ...]:
    return tuple(LayerError(*row) for row in rows)


@pytest.mark.parametrize(
    ("rows", "culprit"),
    [
        ((("embedding", 0.1, None), ("blocks.0", 0.9, 0.2), ("logits", 0.8, 0.3)), "logits"),
        ((("embedding", 0.1, None), ("blocks.0", 0.9, 0.3), ("logits", 0.8, 0.2)), "blocks.0"),
        ((("embedding", 0.4, None), ("blocks.0", 0.9, 0.3), ("logits", 0.8, None)), "embedding"),
        ((("embedding", 0.4, None), ("blocks.0", math.inf, 0.1), ("logits", math.inf, math.inf)), "blocks.0"),
        ((("embedding", 0.4, None), ("blocks.0", math.nan, 0.1), ("logits", 0.1, 0.9)), "blocks.0"),
    ],
)
def test_the_culprit_has_the_largest_own_error_or_is_the_first_not_finite(rows: Any, culprit: str) -> None:
    assert divergence._culprit(layers(*rows)) == culprit


def test_a_trace_in_words_and_as_json() -> None:
    rows = layers(("embedding", 0.001, None), ("blocks.0", 0.12345, 0.1), ("logits", math.inf, None))
    said = Trace(8, rows, "blocks.0", "bias dropped: mlp.fc1.bias")
    text = "blocks.0 diverges first (relative error 0.123, 0.1 of it its own): bias dropped: mlp.fc1.bias"
    assert str(said) == text
    assert str(Trace(8, rows, "logits")) == "logits diverges first (relative error inf)"
    # The embedding adds more than a tenth of what the culprit does: it was first.
    both = Trace(8, layers(("embedding", 0.02, None), ("blocks.0", 0.12345, 0.1)), "blocks.0")
    assert str(both) == "blocks.0 diverges most, embedding first (relative error 0.123, 0.1 of it its own)"
    # Where values are not finite, the culprit is the first of those, though it may not run alone.
    infinite = layers(("embedding", 0.1, None), ("blocks.0", math.inf, None), ("logits", math.inf, math.inf))
    assert str(Trace(8, infinite, "blocks.0")) == "blocks.0 diverges first (relative error inf)"
    found = TraceResult(said, (NodeError("n", "t", math.nan, -math.inf),), (text,))
    printed = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert printed["nodes"] == [{"name": "n", "tensor": "t", "error": "nan", "growth": "-inf"}]
    assert (printed["notes"], printed["layers"]["culprit"], printed["layers"]["images"]) == ([text], "blocks.0", 8)
    assert printed["layers"]["layers"][2] == {
        "name": "logits",
        "error": "inf",
        "own": None,
        "similarity_reference": None,
        "similarity_candidate": None,
    }
    errors, similarity = TraceResult(Trace(8, (LayerError("x", 0.5, 0.25, 0.75, 0.875),), "x"), (), ()).plots()
    assert (errors.layers, errors.logarithmic, similarity.logarithmic) == (["x"], True, False)
    assert errors.series == {"of the layer output": [0.5], "made by the layer itself": [0.25]}
    assert similarity.series == {"reference": [0.75], "candidate": [0.875]}
    assert TraceResult(None, (), ()).plots() == ()
    assert TraceResult(None, (), ()).as_json() == {"layers": None, "nodes": [], "notes": []}


def test_a_repair_in_words_names_at_most_eight_islands() -> None:
    def said(count: int) -> str:
        islands = tuple(f"n{index}" for index in range(count))
        found: Any = SimpleNamespace(islands=islands, before="BEFORE", after="AFTER")
        return _repair_text(found, "int8")

    assert said(0) == "int8 passes with no float32 island: AFTER; this bundle: BEFORE"
    assert said(2) == "int8 passes with 2 float32 islands (n0, n1): AFTER; this bundle: BEFORE"
    assert "8 float32 islands (n0, n1, n2, n3, n4, n5, n6, n7): AFTER" in said(8)
    assert "9 float32 islands (n0, n1, n2, n3, n4, n5, n6, n7 and 1 more): AFTER" in said(9)


def scaled_graph(*factors: float) -> onnx.ModelProto:
    """logits [n, 3] = the pixel's three numbers times each factor in turn; tensors t1, t2, …, logits."""
    count = len(factors)
    names = ["t0", *(f"t{index + 1}" for index in range(count - 1)), "logits"]
    nodes = [
        helper.make_node("Cast", ["images"], ["wide"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("ReduceMax", ["wide", "space"], ["t0"], keepdims=0, name="read"),
        *(
            helper.make_node("Mul", [names[index], f"f{index}"], [names[index + 1]], name=f"mul{index}")
            for index in range(count)
        ),
    ]
    constants = {"space": np.array([1, 2], np.int64)} | {f"f{i}": np.float32(f) for i, f in enumerate(factors)}
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 1, 1, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


PIXELS = np.array([[[[1, 2, 3]]], [[[4, 5, 200]]]], np.uint8)


def test_nodes_that_add_most_error_come_first() -> None:
    """Factors 2, 4, 2 against 2.5, 4, 4: relative errors ¼, ¼ and 1.5, of which the nodes add ¼, 0 and 1.25."""
    found = node_errors(scaled_graph(2, 4, 2), scaled_graph(2.5, 4, 4), PIXELS, "fp32")
    assert [(node.name, node.tensor) for node in found[:2]] == [("mul2", "logits"), ("mul0", "t1")]
    errors = {node.name: (node.error, node.growth) for node in found}
    assert errors["mul2"] == pytest.approx((1.5, 1.25))
    assert errors["mul0"] == pytest.approx((0.25, 0.25))
    assert errors["mul1"] == pytest.approx((0.25, 0))
    assert errors["read"] == (0, 0)
    many = node_errors(scaled_graph(*[1.0] * 7), scaled_graph(*[1.5] * 7), PIXELS, "fp32")
    assert len(many) == 5
    assert [node.growth for node in many] == sorted((node.growth for node in many), reverse=True)


def test_the_first_node_that_is_not_finite_leads() -> None:
    with np.errstate(all="ignore"):
        found = node_errors(scaled_graph(2, 4, 2), scaled_graph(2, math.inf, 2), PIXELS, "fp32")
    assert (found[0].name, found[0].error, found[0].growth) == ("mul1", math.inf, math.inf)
    assert {node.name: node.growth for node in found}["mul2"] == 0


def test_an_overflow_says_how_far_a_tensor_reaches() -> None:
    graph = scaled_graph(-400.0, 1.0)  # 200 becomes −80,000
    assert overflow_text(graph, "t1", PIXELS, "fp16") == (
        "fp16 overflow: 't1' reaches 80000 in float32 and fp16 ends at 65504"
    )
    assert overflow_text(graph, "t1", PIXELS, "bf16") is None
    assert overflow_text(graph, "t1", PIXELS, "int8") is None
    assert overflow_text(scaled_graph(65504 / 200, 1.0), "t1", PIXELS, "fp16") is None  # just held


def model(table: Any, **changes: Any) -> LoadedModel:
    return LoadedModel("model", TableSession(table), PIXEL, CLASSES, "numbers", "", **changes)


def test_a_run_is_no_graph_to_trace() -> None:
    pair = model([[1, 2, 3]]), model([[1, 2, 3]])
    images = numbered_images([0], CLASSES)
    with pytest.raises(InputError) as caught:
        require_layers(*pair, images)
    assert str(caught.value) == "--trace looks into a bundle's graph: give a bundle as the candidate"
    assert measure_token_similarity(*pair, images, quiet=True) is None


# Twelve images whose logits no cyclic shift, reversal, factor or constant explains.
TABLE = np.random.default_rng(2).integers(-40, 40, (12, 3)).astype(np.float32)
IMAGES = numbered_images([0] * 12, CLASSES)


def diagnosed(candidate: Any, *, allowed: float = 1e-3, **options: Any) -> Diagnosis:
    session = TableSession(candidate, **options)
    return diagnose(TableSession(TABLE), session, IMAGES, PIXEL, allowed=allowed)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda table: np.roll(table, 1, axis=1), "labels are off by +1"),
        (lambda table: np.roll(table, -1, axis=1), "labels are off by -1"),
        (lambda table: table[:, ::-1], "labels are in reverse order"),
        (lambda table: table * np.float32(-0.5), "logits scaled by -0.5"),
        (
            lambda table: table + np.array([0.25, -3, 1], np.float32),
            "bias of the classifier dropped or changed: class 1 has -3 on every image",
        ),
    ],
)
def test_a_mistake_is_named_with_its_sign_and_its_class(change: Any, cause: str) -> None:
    found = diagnosed(change(TABLE))
    assert found.cause == cause
    assert found.error == pytest.approx(float(np.abs(change(TABLE) - TABLE).max()))
    assert found.remaining_error == pytest.approx(0, abs=1e-5)


def test_a_graph_that_depends_on_its_batch_is_told_apart() -> None:
    def in_a_batch(numbers: list[int], logits: Any) -> None:
        if len(numbers) > 1:
            logits[:, 0] += 2

    found = diagnosed(TABLE, change=in_a_batch)
    assert found == Diagnosis("batch-dependent graph: rows move by 2 in batches of 32", 2.0, 0.0)
    # Rows that move less than is allowed, or by a fifth of the error, are not the cause.
    assert diagnosed(TABLE + 40 * np.eye(3, dtype=np.float32)[0], change=in_a_batch).cause is not None
    assert "bias" in str(diagnosed(TABLE + 40 * np.eye(3, dtype=np.float32)[0], change=in_a_batch))
    assert "batch" not in str(diagnosed(TABLE, change=in_a_batch, allowed=2.0))


def test_one_logit_that_is_not_finite_is_an_overflow() -> None:
    table = TABLE.copy()
    table[11, 2] = np.inf
    assert diagnosed(table).cause == "overflow: logits are NaN or infinite"


def test_what_nothing_explains_recommends_the_trace_unless_there_is_one() -> None:
    other = model(np.random.default_rng(9).integers(-40, 40, (12, 3)))
    certificate: Any = SimpleNamespace(max_logit_error_allowed=1e-3, max_logit_error_by_batch_size={1: 3.0, 32: 2.0})

    def note(*, traced: bool) -> str:
        return diagnosis_note(model(TABLE), other, IMAGES, certificate, traced=traced)

    error = float(np.abs(TABLE - other.session.infer(np.concatenate(list(IMAGES.batches(PIXEL, 12))))).max())
    assert note(traced=False) == (f"no common mistake explains the logit error of {error:.3g}: --trace names the layer")
    assert note(traced=True) == "no common mistake explains it"
    assert str(Diagnosis("a cause", 0.12345, 0.5)) == "a cause (largest logit error 0.123, 0.5 once it is undone)"


def test_an_error_of_some_of_the_images_is_said_to_be() -> None:
    """The certificate names the largest of all of them, which may be another."""
    images = numbered_images([0] * 100, CLASSES)
    assert "image 2" not in images.evenly_spaced(64).keys
    table = np.random.default_rng(3).integers(-40, 40, (100, 3)).astype(np.float32)
    shifted, other = table + 2 * np.eye(3, dtype=np.float32)[0], table.copy()
    shifted[2, 0] += 5
    other[2:, 0] += np.arange(98) % 7
    certificate: Any = SimpleNamespace(max_logit_error_allowed=1e-3, max_logit_error_by_batch_size={1: 7.0, 32: 7.0})

    def note(candidate: Any, images: Any) -> str:
        return diagnosis_note(model(table), model(candidate), images, certificate, traced=False)

    cause = "bias of the classifier dropped or changed: class 0 has +2 on every image"
    assert note(shifted, images) == f"{cause} (largest logit error 2 in 64 of 100 images, 0 once it is undone)"
    unknown = "no common mistake explains the logit error of 6"
    assert note(other, images) == f"{unknown} in 64 of 100 images: --trace names the layer"
    assert note(other, images.subset(np.arange(64))) == f"{unknown}: --trace names the layer"


def test_a_mistake_is_looked_for_at_the_batch_size_that_is_worst_and_at_none_that_the_candidate_refuses() -> None:
    def in_sevens(numbers: list[int], logits: Any) -> None:
        if len(numbers) > 8:
            raise CheckFailed("at most 8 images")
        if len(numbers) == 7:
            logits[:, 0] += 2

    candidate = replace(model(TABLE), session=TableSession(TABLE, change=in_sevens))
    for errors, worst in (({1: 0.0, 7: 2.0, 8: 0.0}, 7), ({1: 0.0, 8: 0.0}, 8), ({1: 1.0, 8: 0.0}, 8)):
        certificate: Any = SimpleNamespace(max_logit_error_allowed=1e-3, max_logit_error_by_batch_size=errors)
        note = diagnosis_note(model(TABLE), candidate, IMAGES, certificate, traced=True)
        assert note.startswith("batch-dependent graph: rows move by 2 in batches of 7 (") == (worst == 7)
