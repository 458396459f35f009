"""Honest fp16 and int8 bundles of a trained digits-deepvit are certified; faulty ones are traced to the layer."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from bundle_fixture import add_files
from cli_fixture import Vitx
from run_fixture import write_trained_run
from vitx.core.bundle import Bundle, Precision
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.export import ExportOptions, SourceRequest, export_bundle
from vitx.export.bundling import trace_to_file
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HALVES, HalfGraph


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_trained_run(tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    """Export here, where PyTorch is imported already; one graph serves every precision that is made of it."""
    traced: dict[tuple[Any, ...], tuple[Any, bytes]] = {}

    def run(title: str, function: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
        if function is not trace_to_file:
            return function(*arguments)
        request, rewrites, path, opset, _ = arguments
        key = (request, rewrites, opset)
        if key not in traced:
            traced[key] = function(*arguments), path.read_bytes()
        result, graph = traced[key]
        path.write_bytes(graph)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitx.export.bundling.run_limited", run)
        yield


@pytest.fixture(scope="module")
def bundles(run: RunFolder, in_this_process: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Uncertified bundles by precision."""
    folder = tmp_path_factory.mktemp("bundles")
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    request = SourceRequest(str(run.path))
    return {name: export_bundle(request, folder / f"{name}.vitx", ExportOptions(precision=name)) for name in precisions}


def write_digits(root: Path, count: int) -> Path:
    """ROOT/train with `count` digits and ROOT/val with ten, one folder a class."""
    for split, images in (("train", open_images("digits", "train")), ("val", open_images("digits", "val"))):
        for index in range(count if split == "train" else 10):
            folder = root / split / str(index % 10)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index}.png").write_bytes(images.read(index))
    return root


def test_half_is_exported_on_fewer_images_than_int8_takes(
    run: RunFolder, in_this_process: None, tmp_path: Path, vitx: Vitx
) -> None:
    """48 images are all judged; 31 are too few, and so are 48 where ranges are calibrated."""
    source = ("export", run.path, "--max-flip-rate", "0.99", "--device", "cpu", "--quiet", "--calibration-data")
    enough, few = write_digits(tmp_path / "48", 48), write_digits(tmp_path / "31", 31)
    code, _, err = vitx(*source, enough, "--precision", "fp16", "--out", tmp_path / "fp16.vitx")
    assert code == 0, err
    bundle = Bundle.open(tmp_path / "fp16.vitx")
    assert bundle.require_certificate().verdict == "pass"
    assert (bundle.manifest.precision, bundle.manifest.lowering["held_out_images"]) == ("fp16", 48)
    for folder, precision, said in (
        (few, "fp16", "31 images to judge a lower precision on: give at least 32 real ones, and 320 where ranges are"),
        (enough, "int8", "48 images to calibrate on: ranges take at least 256 real images"),
    ):
        code, _, err = vitx(*source, folder, "--precision", precision, "--out", tmp_path / "none.vitx")
        assert code == 2
        assert said in err
        assert not (tmp_path / "none.vitx").exists()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_an_honest_bundle_is_certified(run: RunFolder, bundles: dict[str, Bundle], vitx: Vitx, precision: str) -> None:
    bundle = bundles[precision]
    code, out, err = vitx("parity", run.path, bundle.path, "--device", "cpu", "--json", "--max-flip-rate", "0.03")
    assert code == 0, err
    certificate = bundle.require_certificate()
    assert certificate.verdict == "pass"
    assert certificate.images == 360
    assert certificate.accuracy_reference > 0.8
    assert abs(certificate.ece_reference - certificate.ece_candidate) < 0.02
    assert certificate.min_cosine > 0.99
    tokens = certificate.token_similarity
    assert tokens is not None
    assert tokens.layers[:3] == ("embedding", "blocks.0", "blocks.1")
    assert json.loads(out)["written"] is True
    code, _, err = vitx("parity", "--verify", bundle.path, run.path, "--device", "cpu", "--quiet")
    assert code == 0, err


def head_mix_transposed(model: Any) -> None:
    weight = model.blocks[1].attn.reatten_matrix.weight
    weight.data = weight.data.transpose(0, 1).contiguous()


def test_a_faulty_weight_is_named(run: RunFolder, in_this_process: None, tmp_path: Path, vitx: Vitx) -> None:
    """By the command; tests/parity/test_divergence.py has other weights."""
    faulty = write_trained_run(tmp_path / "faulty", head_mix_transposed)
    bundle = export_bundle(SourceRequest(str(faulty.path)), tmp_path / "faulty.vitx")
    code, _, err = vitx("parity", run.path, bundle.path, "--device", "cpu", "--trace", "--quiet")
    assert code == 1
    assert "blocks.1 diverges first" in err
    assert "transposed: attn.reatten_matrix.weight" in err


def test_an_fp16_overflow_is_named(in_this_process: None, tmp_path: Path, vitx: Vitx) -> None:
    """In a bundle whose every node is float16; tests/parity/test_divergence.py names its node and repairs it."""
    run = write_trained_run(tmp_path / "wide", reaches_beyond_float16)
    bundle = export_bundle(SourceRequest(str(run.path)), tmp_path / "wide.vitx")
    graph = HalfGraph(Dataflow(onnx.load(str(bundle.model_path))), HALVES["fp16"]).build(())
    bundle = with_graph(bundle, graph, precision="fp16")
    code, _, err = vitx("parity", run.path, bundle.path, "--device", "cpu", "--quiet")
    assert code == 1
    assert "overflow: logits are NaN or infinite" in err


def reaches_beyond_float16(model: Any) -> None:
    """fc1 of block 1 passes 65,504, with weights that float16 holds."""
    fc1, fc2 = model.blocks[1].mlp.fc1, model.blocks[1].mlp.fc2
    fc1.bias.data[0] = 6e4  # GELU is the identity there
    fc1.weight.data[0] *= 1e4 / fc1.weight.data[0].abs().max()
    fc2.weight.data[:, 0] = 1e-6


def with_wide_scale(original: Bundle, folder: Path, factor: float) -> Bundle:
    """The int8 bundle with one scale `factor` times too large: that tensor is rounded too coarsely."""
    bundle = Bundle.open(shutil.copytree(original.path, folder))
    graph = onnx.load(str(bundle.model_path))
    read = {name for node in graph.graph.node if node.op_type == "QuantizeLinear" for name in node.input[1:2]}
    chosen = sorted(read)[len(read) // 2]
    for tensor in graph.graph.initializer:
        if tensor.name == chosen:
            value = onnx.numpy_helper.to_array(tensor) * factor
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype("float32"), chosen))
    return with_graph(bundle, graph)


def with_graph(bundle: Bundle, graph: onnx.ModelProto, **changes: Any) -> Bundle:
    """The bundle with another graph, and with changes in its manifest."""
    changed = Bundle(bundle.path, bundle.manifest.model_copy(update=changes))
    return add_files(changed, {"model.onnx": graph.SerializeToString()})


def test_a_failed_int8_bundle_is_traced_and_a_repair_is_verified(
    run: RunFolder, bundles: dict[str, Bundle], tmp_path: Path, vitx: Vitx
) -> None:
    bundle = with_wide_scale(bundles["int8"], tmp_path / "digits.vitx", 60.0)
    report = tmp_path / "report.html"
    code, out, err = vitx(
        *("parity", run.path, bundle.path, "--device", "cpu", "--json", "--trace", "--report", report, "--quiet")
    )
    assert code == 1
    notes, diverges = json.loads(out)["notes"], r"\S+ diverges (first|most, \S+ first) \(relative error"
    assert any(re.search(diverges, note) for note in notes)
    assert any(note.startswith("int8 passes with") for note in notes)
    assert re.search(diverges, err)
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "Relative error by layer" in page
