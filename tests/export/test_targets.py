"""Precision, engines, OpenVINO and Triton through `vitx export`, and a compiler that crashes."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import vitx.export.targets as targets
from sandbox_jobs import crash_on_gelu
from vitx.core.bundle import Bundle
from vitx.core.sandbox import ConversionCrashed
from vitx.export import ExportOptions, SourceRequest, export_bundle

REQUEST = SourceRequest("model:deepvit_digits", weights="random", data="digits")
# Random weights rank near-equal logits: what is tested is the way, so a twentieth of the images may change class.
SOURCE = ("model:deepvit_digits", "--weights", "random", "--data", "digits", "--max-flip-rate", "0.05")


def vitx(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vitx", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_half_precision_with_every_target(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX has wheels for x86-64 Linux and Windows only")
    pytest.importorskip("openvino", reason="an optional target")
    options = (
        "--precision",
        "fp16",
        "--trt-rtx",
        "--arch",
        "sm89",
        "--profiles",
        "1,8",
        "--openvino",
        "--triton",
        "repo",
    )
    finished = vitx("export", *SOURCE, *options, "--out", "net.vitx", "--json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    bundle = Bundle.open(tmp_path / "net.vitx")
    assert bundle.manifest.precision == "fp16"
    assert bundle.require_certificate().subject.keys() == {"manifest.json", *bundle.manifest.files}
    assert {"engines/tensorrt-rtx.plan", "engines/tensorrt-rtx.plan.json", "openvino/model.xml"} <= set(
        bundle.manifest.files
    )
    sidecar = json.loads((bundle.path / "engines" / "tensorrt-rtx.plan.json").read_text())
    assert sidecar["architectures"] == ["sm89"]
    assert sidecar["onnx_sha256"] == bundle.manifest.files["model.onnx"].sha256
    assert (tmp_path / "repo" / "net" / "1" / "model.onnx").read_bytes() == bundle.model_path.read_bytes()
    weights = {
        tensor.data_type for tensor in onnx.load(str(bundle.model_path)).graph.initializer if len(tensor.dims) > 1
    }
    assert onnx.TensorProto.FLOAT16 in weights


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--trt",), 3, "tensorrt"),
        (("--arch", "sm89"), 2, "--arch sm89 goes with --trt-rtx"),
        (("--trt-rtx", "--profiles", "1,x"), 2, "--profiles 1,x: expected batch sizes such as 1,8,32"),
        (("--trt-rtx", "--profiles", "8,1"), 2, "batch sizes 8, 1"),
        (("--trt-rtx", "--arch", "sm90"), 2, "cannot build for 'sm90'"),
    ],
)
def test_targets_that_cannot_be_made(tmp_path: Path, options: tuple[str, ...], code: int, message: str) -> None:
    finished = vitx("export", *SOURCE, *options, "--out", "net.vitx", cwd=tmp_path)
    assert finished.returncode == code, finished.stderr
    assert message in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_crashing_compiler_leaves_a_reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old bundle stays; the smallest part of the graph that crashes the compiler lies beside it."""
    out = tmp_path / "net.vitx"
    export_bundle(REQUEST, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setitem(targets.CONVERT, "openvino", crash_on_gelu)
    with pytest.raises(ConversionCrashed, match=r"openvino died of SIGSEGV; 2 nodes that do the same"):
        targets.convert_limited(
            *("openvino", crash_on_gelu, out / "model.onnx"),
            failed=tmp_path / "net.vitx.failed",
            seconds=60,
            memory_gib=8,
        )
    found = onnx.load(str(tmp_path / "net.vitx.failed" / "subgraph.onnx"))
    assert [node.op_type for node in found.graph.node] == ["Gemm", "Gelu"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_lower_precision_needs_images(tmp_path: Path) -> None:
    finished = vitx(
        *("export", "model:deepvit_digits", "--weights", "random", "--uncertified", "--precision", "int8"), cwd=tmp_path
    )
    assert finished.returncode == 2
    assert "int8 is judged on real images: give --data or --calibration-data" in finished.stderr
    assert ExportOptions().precision == "fp32"
