"""Features of a bundle that lists no outputs: the input of the classifier, taken from the bundle's own graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from bundle_fixture import BIAS, PREPROCESSING, WEIGHT, add_files, colour_image, png, tiny_graph, write_bundle
from cli_fixture import Vitx
from run_fixture import DIGITS_PREPROCESSING, SMALL_DEEPVIT, write_trained_run
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.preprocess import UInt8Array
from vitx.data.open import open_images
from vitx.export import ExportOptions, SourceRequest, export_bundle
from vitx.export.graph.outputs import classifier_inputs
from vitx.models import build_model, image_tensor
from vitx.parity.executables.choice import load_fastest
from vitx.parity.executables.unlisted_embedding import classifier
from vitx.predict import PREDICTIONS, predict
from vitx.predict.options import PredictOptions
from vitx.runtimes import load_session


def random_images(count: int, size: int) -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def expected_features(images: UInt8Array) -> npt.NDArray[np.float64]:
    """The fixture's graph in float64: the mean colour, normalised."""
    normal = (images.astype(np.float64) / 255 - PREPROCESSING.mean) / PREPROCESSING.std
    return np.asarray(normal.mean(axis=(1, 2)))


def test_features_are_the_classifiers_input(tiny_bundle: Bundle) -> None:
    images = random_images(5, 16)
    session = load_fastest(tiny_bundle, "auto", device="cpu", threads=1, outputs=("embedding",))
    assert session.outputs == ("embedding",)
    found = session.infer_outputs(images)
    logits, features = found["logits"], found["embedding"]
    np.testing.assert_allclose(features, expected_features(images), rtol=1e-5)
    np.testing.assert_allclose(features @ WEIGHT + BIAS, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logits, load_session(tiny_bundle, device="cpu", threads=1).infer(images))
    np.testing.assert_array_equal(logits, session.infer(images))


@pytest.mark.parametrize("folded", [True, False])
def test_features_are_the_torch_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folded: bool) -> None:
    """forward_head(pre_logits=True), which the export gives without the last norm's scale and shift where it folds."""

    def spread(model: Any) -> None:
        with torch.no_grad():
            model.norm.weight.uniform_(0.5, 1.5)
            model.norm.bias.uniform_(-1, 1)

    monkeypatch.setattr("run_fixture.trained_deepvit", lambda: build_model(SMALL_DEEPVIT).eval())  # it need not learn
    run = write_trained_run(tmp_path / "run", spread)
    monkeypatch.setattr("vitx.export.bundling.run_limited", lambda title, function, *given, **limits: function(*given))
    options = ExportOptions(without=() if folded else ("fold-layer-norm-affine",))
    bundle = export_bundle(SourceRequest(str(run.path)), tmp_path / "net.vitx", options)
    images = next(open_images("digits", "val").batches(DIGITS_PREPROCESSING, 16))
    both = load_fastest(bundle, "auto", device="cpu", outputs=("embedding",)).infer_outputs(images)
    logits, found = both["logits"], both["embedding"]
    model: Any = SourceRequest(str(run.path)).load().model
    with torch.no_grad():
        last = model.forward_features(image_tensor(images, DIGITS_PREPROCESSING.mean, DIGITS_PREPROCESSING.std))
        expected = model.forward_head(last, pre_logits=True)
        features = torch.from_numpy(found)
        np.testing.assert_allclose(model.head(expected), logits, rtol=1e-4, atol=1e-4)
        if folded:
            features = features * model.norm.weight + model.norm.bias
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-4)


GraphChange = Callable[[onnx.GraphProto], None]


def averaged_with_another(graph: onnx.GraphProto) -> None:
    """As a distilled DeiT's: the logits are the mean of two products of two features."""
    graph.node[-1].output[0] = "first"
    graph.node.append(helper.make_node("Mul", ["features", "features"], ["squares"]))
    graph.node.append(helper.make_node("Gemm", ["squares", "weight", "bias"], ["second"]))
    graph.node.append(helper.make_node("Add", ["first", "second"], ["logits"]))


def softmax_at_the_end(graph: onnx.GraphProto) -> None:
    graph.node[-1].output[0] = "raw"
    graph.node.append(helper.make_node("Softmax", ["raw"], ["logits"]))


def no_product(graph: onnx.GraphProto) -> None:
    del graph.node[-1]
    graph.node[-1].output[0] = "logits"


@pytest.mark.parametrize("change", [softmax_at_the_end, no_product])
def test_graphs_without_a_classifier_are_refused(change: GraphChange) -> None:
    model = tiny_graph()
    change(model.graph)
    with pytest.raises(InputError, match=r"not matrix products of features \(N, D\)"):
        classifier_inputs(model, "logits")


def test_two_classifiers_are_refused(tmp_path: Path) -> None:
    """Which mean of the two is meant, only the network can say."""
    model = tiny_graph()
    averaged_with_another(model.graph)
    assert classifier_inputs(model, "logits") == ("features", "squares")
    bundle = add_files(write_bundle(tmp_path / "b.vitx"), {"model.onnx": model.SerializeToString()})
    with pytest.raises(InputError, match=r"are of 2 classifiers: export it again with --output embedding"):
        load_fastest(bundle, "auto", device="cpu", outputs=("embedding",))


def with_casts_and_scale(graph: onnx.GraphProto) -> None:
    """As of a lower precision: half weights, the product, a cast, a bias and a scale of their own."""
    del graph.node[-1]
    halves = numpy_helper.from_array(WEIGHT.astype(np.float16), "halves")
    graph.initializer.extend([halves, numpy_helper.from_array(np.array(2, np.float32), "two")])
    graph.node.extend(
        [
            helper.make_node("Cast", ["features"], ["half_features"], to=TensorProto.FLOAT16),
            helper.make_node("Identity", ["halves"], ["weights"]),
            helper.make_node("MatMul", ["half_features", "weights"], ["half_product"]),
            helper.make_node("Cast", ["half_product"], ["product"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["product", "bias"], ["sum"]),
            helper.make_node("Mul", ["sum", "two"], ["logits"]),
        ]
    )


def test_a_product_in_half_precision_is_found() -> None:
    model = tiny_graph()
    with_casts_and_scale(model.graph)
    assert classifier_inputs(model, "logits") == ("half_features",)
    head = classifier(model, "half_features", TensorProto.FLOAT16, "logits")
    assert [node.op_type for node in head.graph.node] == ["Identity", "MatMul", "Cast", "Add", "Mul"]
    assert {tensor.name for tensor in head.graph.initializer} == {"halves", "bias", "two"}


def test_logits_that_do_not_follow_from_the_features_are_refused(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_bias(model: onnx.ModelProto, features: str, kind: int, logits: str) -> onnx.ModelProto:
        head = classifier(model, features, kind, logits)
        for tensor in head.graph.initializer:
            if tensor.name == "bias":
                tensor.CopyFrom(numpy_helper.from_array(BIAS + np.float32(0.01), "bias"))
        return head

    monkeypatch.setattr("vitx.parity.executables.unlisted_embedding.classifier", another_bias)
    with pytest.raises(CheckFailed, match=r"from the features alone differ by 0\.01, allowed 0\.0001"):
        load_fastest(tiny_bundle, "auto", device="cpu", outputs=("embedding",))


def test_features_of_four_axes_are_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b.vitx")
    model = tiny_graph()
    del model.graph.node[-2:]
    constant = numpy_helper.from_array(WEIGHT, "weight")
    model.graph.node.append(helper.make_node("MatMul", ["normal", constant.name], ["logits"]))
    bundle = add_files(bundle, {"model.onnx": model.SerializeToString()})
    with pytest.raises(InputError, match=r"takes float of 4 axes: expected float32 or float16 \(N, D\)"):
        load_fastest(bundle, "auto", device="cpu", outputs=("embedding",))


def test_other_runtimes_and_a_missing_package_say_so(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"only onnxruntime finds one in a graph, not openvino: choose it, or export"):
        load_fastest(tiny_bundle, "openvino", outputs=("embedding",))
    monkeypatch.setattr("vitx.parity.executables.unlisted_embedding.find_spec", lambda name: None)
    with pytest.raises(EnvironmentMissing, match=r"'onnx', which is not installed: pip install 'vitx\[export\]'"):
        load_fastest(tiny_bundle, "auto", outputs=("embedding",))


@pytest.mark.parametrize("outputs", [("attention",), ("embedding", "attention")])
def test_what_no_graph_shows_is_refused(tiny_bundle: Bundle, outputs: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=rf"has no output '{outputs[0]}' \(logits alone\): export it again with --out"):
        load_fastest(tiny_bundle, "auto", device="cpu", outputs=outputs)


def test_embeddings_column(tiny_bundle: Bundle, tmp_path: Path, vitx: Vitx) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = np.stack([colour_image(index % 4, rng) for index in range(9)])
    for index, image in enumerate(images):
        (folder / f"{index}.png").write_bytes(png(image))
    (folder / "4.png").write_bytes(b"")
    out = tmp_path / "out"
    arguments = (tiny_bundle.path, folder, "--out", out, "--batch", 4, "--device", "cpu", "--quiet")
    code, _, err = vitx("predict", *arguments, "--embeddings", "--max-error-rate", ".2")
    assert code == 0, err
    table = pq.read_table(out / PREDICTIONS)
    assert table.schema.field("embeddings").type == pa.list_(pa.float32())
    found = table["embeddings"].to_pylist()
    assert found[4] is None
    rest = [index for index in range(9) if index != 4]
    values = np.array([found[index] for index in rest], dtype=np.float64)
    np.testing.assert_allclose(values, expected_features(images[rest]), rtol=1e-5, atol=1e-5)
    code, _, err = vitx("predict", *arguments)
    assert code == 2
    assert "embeddings was True, is False now" in err


def test_embeddings_need_a_session_with_features(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(colour_image(0, np.random.default_rng(0))))
    session = load_session(tiny_bundle, device="cpu")
    with pytest.raises(
        InputError, match=r"the session gives no embedding: load_session\(…, outputs=\('embedding',\)\)"
    ):
        predict(tiny_bundle, session, tmp_path / "a.png", tmp_path / "out", PredictOptions(embeddings=True), quiet=True)
