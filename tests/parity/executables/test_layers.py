"""The first layer in which an IR leaves its graph: on graphs of two blocks whose tensors numpy knows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper

from bundle_fixture import BIAS, IMAGE_SIZE, LABELS, PREPROCESSING, WEIGHT, NumpySession, colour_images, write_bundle
from vitx.core.bundle import Bundle
from vitx.parity import trace
from vitx.parity.executables import layers
from vitx.parity.executables.layers import first_divergence
from vitx.parity.loaded_model import LoadedModel
from vitx.runtimes.onnxruntime import OnnxRuntimeSession
from vitx.runtimes.openvino import OpenVinoSession
from vitx.runtimes.session import Session
from witnessed_bundle import seal_manifest

PIXELS = np.random.default_rng(0).integers(1, 256, (6, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
BLOCKS = [np.array([1, 2, -3], np.float32), np.array([2, -1, 1], np.float32)]  # factors of the three channels


def graph_of(factors: list[Any]) -> onnx.ModelProto:
    """images → embedding (N, 3), the mean colour; a factor for each block; logits."""
    constants: dict[str, Any] = {"space": np.array([1, 2], np.int64), "weight": WEIGHT, "bias": BIAS}
    nodes = [
        helper.make_node("Cast", ["images"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["wide", "space"], ["embedding"], keepdims=0),
    ]
    names = ["embedding", *(f"blocks.{index}" for index in range(len(factors)))]
    for before, name, factor in zip(names, names[1:], factors, strict=False):
        constants[f"{name} factor"] = factor
        # Between two products alone OpenVINO would make them one, and the tensor would be gone.
        nodes.append(helper.make_node("Mul", [before, f"{name} factor"], [f"{name} signed"]))
        nodes.append(helper.make_node("Abs", [f"{name} signed"], [name]))
    nodes.append(helper.make_node("Gemm", [names[-1], "weight", "bias"], ["logits"]))
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", IMAGE_SIZE, IMAGE_SIZE, 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", len(LABELS)])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "blocks", [images], [logits], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def bundle_of(folder: Path, factors: list[Any]) -> Bundle:
    """model.onnx of BLOCKS, beside it the IR of these factors."""
    bundle = write_bundle(folder / "net.vitx")
    onnx.save(graph_of(BLOCKS), str(bundle.model_path))
    other = folder / "other.onnx"
    onnx.save(graph_of(factors), str(other))
    openvino.save_model(
        openvino.convert_model(str(other)), str(bundle.path / "openvino" / "model.xml"), compress_to_fp16=False
    )
    return seal_manifest(bundle.path)


def clause(bundle: Bundle) -> str:
    with OpenVinoSession(bundle, threads=1) as session:
        return first_divergence(bundle, session, PIXELS)


def relative(factors: list[Any], block: int) -> float:
    """The error of a block on the first four images, relative to the norm of what model.onnx has there."""
    embedding = PIXELS[:4].astype(np.float64).mean(axis=(1, 2))
    found, expected = (np.abs(embedding * np.prod(each[: block + 1], axis=0)) for each in (factors, BLOCKS))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("block", [0, 1])
def test_the_first_block_that_differs_is_named_with_its_error(tmp_path: Path, block: int) -> None:
    factors = [*BLOCKS]
    factors[block] = BLOCKS[block] * np.array([1, 1.5, 1], np.float32)
    error = relative(factors, block)
    assert error > 0.06
    assert clause(bundle_of(tmp_path, factors)) == (
        f"the first layer that differs from model.onnx is blocks.{block}, by {error:.2g} of its norm"
    )


@pytest.mark.parametrize(("change", "named"), [(0.049, False), (0.051, True)])
def test_a_twentieth_is_a_difference(tmp_path: Path, change: float, named: bool) -> None:
    factors = [BLOCKS[0] * np.float32(1 + change), BLOCKS[1]]
    expected = "the first layer that differs from model.onnx is blocks.0, by 0.051 of its norm"
    assert clause(bundle_of(tmp_path, factors)) == (expected if named else "its layers agree with those of model.onnx")


def test_only_openvino_s_layers_are_told_and_only_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(tmp_path, [BLOCKS[0] * 2, BLOCKS[1]])
    assert first_divergence(bundle, NumpySession(), PIXELS) == ""
    monkeypatch.setattr(OpenVinoSession, "describe", lambda self: {"runtime": "openvino-bf16"})
    assert clause(bundle).startswith("the first layer that differs from model.onnx is blocks.0, by 1 of")
    monkeypatch.setattr(layers, "find_spec", lambda name: None if name == "onnx" else name)
    assert clause(bundle) == ""


def test_every_named_tensor_is_compared_and_no_other(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, BLOCKS)
    found = layers._openvino_tensors(bundle, PIXELS[:4])
    expected = layers._graph_tensors(bundle, PIXELS[:4], found)
    assert [*expected] == ["embedding", "blocks.0", "blocks.1", "logits"]
    assert {*found} == {*expected}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)
        assert value.shape == (4, 4 if name == "logits" else 3)


def test_errors_are_relative_to_the_graph() -> None:
    ones = np.ones((2, 2), np.float32)
    assert layers._relative(ones * 3, ones) == 2
    assert layers._relative(ones, ones * 4) == 0.75
    assert layers._relative(ones * 3, ones * 0) == 6  # nothing to be relative to
    assert layers._relative(ones, ones[:1]) == math.inf
    assert math.isnan(layers._relative(ones * np.nan, ones))


def loaded(session: Session, **changes: Any) -> LoadedModel:
    return LoadedModel("model", session, PREPROCESSING, LABELS, "colours", "", **changes)


def test_a_runtime_is_not_blamed_on_a_layer_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """model.onnx is right and its IR is not: a trace of the graph would name whichever layer rounds most."""
    bundle, images = bundle_of(tmp_path, [BLOCKS[0], BLOCKS[1] * 2]), colour_images(8)
    named = trace.TraceResult(None, (), ("blocks.0 diverges first",))
    monkeypatch.setattr(trace, "_trace_network", lambda *_: named)
    request: Any = "request"

    def traced(reference: Session, candidate: Session) -> tuple[str, ...]:
        pair = loaded(reference, network=lambda: None), loaded(candidate, bundle=bundle)
        found = trace.trace(*pair, request, images, repair=True, quiet=True)
        if candidate.artefacts != ("model.onnx",):
            assert trace.measure_token_similarity(*pair, images, quiet=False) is None
            runtime = candidate.describe()["runtime"]
            said = f"parity: CosSim by layer is left out: it is of model.onnx, not of {runtime}\n"
            assert capsys.readouterr().err == said
        return found.notes

    graph, compiled, plan = OnnxRuntimeSession(bundle), OpenVinoSession(bundle, threads=1), NumpySession()
    plan.artefacts = ("engines/tensorrt.plan",)
    agrees = "model.onnx agrees with the reference, so the error is made by"
    assert traced(graph, compiled) == (
        f"{agrees} openvino: the first layer that differs from model.onnx is blocks.1, by 1 of its norm",
    )
    assert traced(graph, plan) == (f"{agrees} numpy",)
    # The graph itself is wrong, or is what was run.
    assert traced(NumpySession(), compiled) == traced(graph, graph) == ("blocks.0 diverges first",)
