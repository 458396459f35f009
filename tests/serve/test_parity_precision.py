"""Honest fp16 and int8 bundles of a trained digits-deepvit are certified; one that rounds too coarsely is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from cli_fixture import Vitx
from run_fixture import write_trained_run
from vitx.core.bundle import MANIFEST, Bundle, Precision
from vitx.core.files import sha256_file, write_json
from vitx.core.run import RunFolder
from vitx.export import ExportOptions, SourceRequest, export_bundle


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_trained_run(tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="module")
def bundles(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Uncertified bundles by precision."""
    folder = tmp_path_factory.mktemp("bundles")
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    request = SourceRequest(str(run.path))
    return {name: export_bundle(request, folder / f"{name}.vitx", ExportOptions(precision=name)) for name in precisions}


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
    onnx.save(graph, str(bundle.model_path))
    plain: dict[str, Any] = bundle.manifest.model_dump(mode="json")
    plain["files"]["model.onnx"] = {
        "sha256": sha256_file(bundle.model_path),
        "size": bundle.model_path.stat().st_size,
    }
    write_json(bundle.path / MANIFEST, plain)
    return Bundle.open(bundle.path)


def test_a_failed_int8_bundle_is_traced_and_a_repair_is_verified(
    run: RunFolder, bundles: dict[str, Bundle], tmp_path: Path, vitx: Vitx
) -> None:
    bundle = with_wide_scale(bundles["int8"], tmp_path / "digits.vitx", 60.0)
    report = tmp_path / "report.html"
    code, out, err = vitx(
        *("parity", run.path, bundle.path, "--device", "cpu", "--json", "--trace", "--report", report, "--quiet")
    )
    assert code == 1
    notes = json.loads(out)["notes"]
    assert any("diverges first" in note for note in notes)
    assert any(note.startswith("int8 passes with") for note in notes)
    assert "diverges first" in err
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "Relative error by layer" in page
