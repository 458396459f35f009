"""What `trace` asks for: every call that would need a network, an export or a search is replaced."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from torch import nn

from bundle_fixture import certificate, write_bundle
from table_session import PIXEL, TableSession, numbered_images
from vitx.core.bundle import Bundle
from vitx.core.certificate import TokenSimilarity
from vitx.core.errors import InputError
from vitx.parity import divergence, trace
from vitx.parity.divergence import Trace
from vitx.parity.loaded_model import LoadedModel


def note(seen: list[Any], what: Any, result: Any) -> Any:
    """Note what was asked for; return what was prepared."""
    seen.append(what)
    return result


class Blocks(nn.Module):
    """A network of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Identity())


def named_graph() -> onnx.ModelProto:
    """A graph that names the tensors between its blocks."""
    nodes = [
        helper.make_node("Identity", [source], [made])
        for source, made in (("x", "embedding"), ("embedding", "blocks.0"), ("blocks.0", "logits"))
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in ("x", "logits")]
    graph = helper.make_graph(nodes, "named", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


PIXELS = np.zeros((1, 1, 1, 3), np.uint8)
CLASSES = ("a", "b")


def model(**changes: Any) -> LoadedModel:
    return LoadedModel("model", TableSession([[1.0, 0.0]] * 70), PIXEL, CLASSES, "numbers", "", **changes)


@pytest.fixture
def bundle(tmp_path: Any) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx")


def in_precision(bundle: Bundle, precision: str, **changes: Any) -> LoadedModel:
    manifest = bundle.manifest.model_copy(update={"precision": precision, **changes})
    return model(bundle=Bundle(bundle.path, manifest))


class Traced:
    """Stands for what divergence measures; notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, exact: Any) -> None:
        self.asked: dict[str, Any] = {}
        self.layers = Trace(64, (), "blocks.0")
        monkeypatch.setattr(Trace, "__str__", lambda self: "the layers")
        monkeypatch.setattr(divergence, "trace_layers", lambda *a, **o: self.note("layers", a, o, self.layers))
        nodes = (divergence.NodeError("n", "t", 1.0, 0.5), divergence.NodeError("m", "u", 1.0, 0.25))
        self.nodes: tuple[divergence.NodeError, ...] = nodes
        self.overflow: str | None = "it overflows"
        monkeypatch.setattr(divergence, "node_errors", lambda *a: self.note("nodes", a, {}, self.nodes))
        monkeypatch.setattr(divergence, "overflow_text", lambda *a: self.note("overflow", a, {}, self.overflow))
        monkeypatch.setattr(trace, "_float32_graph", lambda *a: self.note("export", a, {}, exact))

    def note(self, name: str, arguments: Any, options: Any, result: Any) -> Any:
        self.asked[name] = (arguments, options)
        return result


IMAGES_70 = numbered_images([0] * 70, CLASSES)


def test_a_float32_bundle_is_traced_by_layer(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Traced(monkeypatch, "exact")
    reference = model(network=lambda: "network")
    request: Any = "request"
    found = trace.trace(reference, in_precision(bundle, "fp32"), request, IMAGES_70, repair=True, quiet=True)
    assert (found.layers, found.nodes, found.notes, found.exact) == (standing.layers, (), ("the layers",), None)
    (network, preprocessing, graph, pixels), options = standing.asked.pop("layers")
    assert (network, preprocessing, options) == ("network", PIXEL, {"precision": "fp32"})
    assert graph == onnx.load(str(bundle.model_path))
    assert pixels[:, 0, 0, 2].tolist() == [int(69 * index / 63) for index in range(64)]
    assert standing.asked == {}


@pytest.mark.parametrize("overflow", ["it overflows", None])
def test_a_bundle_of_lower_precision_is_traced_by_layer_and_node(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, overflow: str | None
) -> None:
    standing = Traced(monkeypatch, "exact")
    standing.overflow = overflow
    monkeypatch.setattr(trace, "_repair", lambda *a, **o: standing.note("repair", a, o, "repaired"))
    reference, candidate = model(network=lambda: "network"), in_precision(bundle, "fp16")
    for repairs in (False, True):
        standing.asked.clear()
        request: Any = "request"
        found = trace.trace(reference, candidate, request, IMAGES_70, repair=repairs, quiet=True)
        notes = ["the layers", "node 'n' adds most error: 0.5 of its result 't'", *([overflow] if overflow else [])]
        assert found.notes == (*notes, *(["repaired"] if repairs else []))
        assert (found.layers, found.nodes, found.exact) == (standing.layers, standing.nodes, "exact")
        exact, graph, pixels, precision = standing.asked["nodes"][0]
        assert (exact, precision, len(pixels)) == ("exact", "fp16", 8)
        assert standing.asked["overflow"][0][:2] == ("exact", "t")
        assert len(standing.asked["overflow"][0][2]) == 8
        assert standing.asked["export"][0] == ("request", candidate.bundle)
        assert ("repair" in standing.asked) is repairs
    arguments, options = standing.asked["repair"]
    assert (arguments[0], arguments[2], len(arguments[3]), options) == ("exact", candidate.bundle, 64, {"quiet": True})
    assert (arguments[1], arguments[4]) == (graph, IMAGES_70)


def test_two_bundles_are_compared_node_by_node(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Traced(monkeypatch, "exact")
    pair = in_precision(bundle, "fp32"), in_precision(bundle, "int8")
    found = trace.trace(*pair, None, IMAGES_70, repair=True, quiet=True)
    assert (found.layers, found.nodes, found.exact) == (None, standing.nodes, None)
    assert standing.asked["nodes"][0][0] == onnx.load(str(bundle.model_path))
    standing.nodes = ()
    assert trace.trace(*pair, None, IMAGES_70, repair=False, quiet=True) == trace.TraceResult(None, (), ())


@pytest.mark.parametrize(
    ("precision", "target", "asked", "least"),
    [("int8", {}, "cpu", 320), ("int8", {"target": "tensorrt"}, "tensorrt", 320), ("fp16", {}, "cpu", 32)],
)
def test_islands_are_searched_on_training_images(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, precision: Any, target: dict[str, Any], asked: str, least: int
) -> None:
    seen: list[Any] = []
    candidate = in_precision(bundle, precision, lowering=target).bundle
    assert candidate is not None
    steps = candidate.manifest.preprocessing
    opened = ("numbers", "train", True, steps.check_size)
    monkeypatch.setattr(trace, "open_images", lambda *a, **o: note(seen, (*a, *o.values()), "training set"))
    sampled = "vitx.export.precision.calibration.sample_images"
    monkeypatch.setattr(sampled, lambda *a, least: note(seen, (*a, least), "training images"))
    found: Any = SimpleNamespace(islands=("a",), before="BEFORE", after="AFTER")
    monkeypatch.setattr(divergence, "repair", lambda *a, **o: note(seen, (a, o), found))
    exact: Any = "exact"
    graph: Any = "graph"
    text = trace._repair(exact, graph, candidate, PIXELS, IMAGES_70, quiet=True)
    assert text == f"{precision} passes with 1 float32 islands (a): AFTER; this bundle: BEFORE"
    assert seen[:2] == [opened, ("training set", steps, least)]
    arguments, options = seen[2]
    assert arguments[:4] == ("exact", "graph", precision, "training images")
    assert arguments[4] is PIXELS
    assert options == {"target": asked, "base": "fp32", "quiet": True}


def test_the_float32_graph_is_exported_with_the_bundles_rewrites(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def trace_to_file(request: Any, rewrites: Any, path: Any, opset: int) -> None:
        asked.append((request, rewrites, opset))
        onnx.save(named_graph(), str(path))

    monkeypatch.setattr("vitx.export.bundling.trace_to_file", trace_to_file)
    request: Any = "request"
    assert trace._float32_graph(request, bundle) == named_graph()
    assert asked == [("request", bundle.manifest.rewrites, bundle.manifest.opset)]


def test_token_similarity_is_measured_where_there_are_blocks_with_names(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    tokens = TokenSimilarity(images=1, layers=("a",), reference=(0.5,), candidate=(0.5,), allowed=0.1)
    answers = [tokens, TokenSimilarity(images=1, layers=(), reference=(), candidate=(), allowed=0.1)]
    network = Blocks()
    reference, candidate = model(network=lambda: network), in_precision(bundle, "int8")

    def measured(first: LoadedModel, second: LoadedModel, *, quiet: bool = False) -> Any:
        return trace.measure_token_similarity(first, second, IMAGES_70, quiet=quiet)

    assert measured(model(), candidate) is measured(reference, model()) is None
    assert measured(model(network=nn.Identity), candidate) is None
    assert capsys.readouterr().err == ""
    assert measured(reference, candidate) is None
    assert capsys.readouterr().err.startswith(
        "parity: CosSim by layer is left out: the graph has no tensor 'embedding'"
    )
    assert measured(reference, candidate, quiet=True) is None
    assert capsys.readouterr().err == ""
    onnx.save(named_graph(), str(bundle.model_path))
    monkeypatch.setattr(divergence, "compare_token_similarity", lambda *a, **o: note(asked, (a, o), answers.pop(0)))
    assert measured(reference, candidate) is tokens
    ((arguments, options),) = asked
    assert (arguments[0], arguments[1], len(arguments[3]), options) == (network, PIXEL, 64, {"precision": "int8"})
    assert arguments[2] == named_graph()
    assert measured(reference, candidate) is None  # one patch is like no other


def test_the_notes_of_a_failed_export(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def traced(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        if arguments[2] == "refused":
            raise InputError("no names")
        return trace.TraceResult(None, (), ("a layer", "a node"))

    monkeypatch.setattr(trace, "diagnosis_note", lambda *a, traced: note(asked, (a, traced), "a mistake"))
    monkeypatch.setattr(trace, "trace", traced)
    failed, reference, candidate = certificate(), model(network=Blocks), model()

    def notes(first: LoadedModel, request: Any = "request") -> tuple[str, ...]:
        return trace.failure_notes(first, candidate, IMAGES_70, failed, request, quiet=True)

    assert notes(reference) == ("a mistake", "a layer", "a node")
    assert asked == [
        ((reference, candidate, IMAGES_70, failed), True),
        ((reference, candidate, "request", IMAGES_70), {"repair": False, "quiet": True}),
    ]
    assert notes(reference, "refused") == ("a mistake", "no names")
    asked.clear()
    assert notes(model()) == notes(model(network=nn.Identity)) == ("a mistake",)
    assert len(asked) == 2
