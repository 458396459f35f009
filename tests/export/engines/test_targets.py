"""Precision, engines, OpenVINO and Triton through `vitx export`, and a compiler that crashes."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import vitx.export.engines.targets as targets
from bundle_fixture import PREPROCESSING, colour_images, tiny_graph
from cli_fixture import Vitx
from sandbox_jobs import crash_on_gelu
from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Manifest
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import read_record, sha256_file, write_json
from vitx.core.sandbox import ConversionCrashed
from vitx.data.image_set import encode_png
from vitx.data.open import open_images
from vitx.export import SourceRequest
from vitx.export.engines.targets import EngineRequest, PrecisionRequest
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HALVES, HalfGraph
from vitx.export.precision.lower import MIN_HALF_IMAGES
from vitx.parity import certify_models
from vitx.parity.exported import model_from_source
from vitx.parity.loaded_model import model_from_bundle
from vitx.runtimes import load_session

# Random weights give near ties. The conversions are under test, not the network: 5 % of the images may flip.
SOURCE = ("model:deepvit_digits", "--weights", "random", "--data", "digits", "--max-flip-rate", "0.05")
SMALL = ("--model-arg", "depth=2", "--model-arg", "attention=('plain', 're-attention')")


def test_half_precision_with_every_target(tmp_path: Path, vitx: Vitx, in_this_process: None) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX has wheels for x86-64 Linux and Windows only")
    pytest.importorskip("openvino", reason="an optional target")
    every_target = ("--trt-rtx", "--arch", "sm89", "--profiles", "1", "--openvino", "--triton", tmp_path / "repo")
    code, _, errors = vitx(
        "export", *SOURCE, *SMALL, "--precision", "fp16", *every_target, "--out", tmp_path / "net.vitx"
    )
    assert code == 0, errors
    bundle = Bundle.open(tmp_path / "net.vitx")
    assert bundle.manifest.precision == "fp16"
    certificate = bundle.require_certificate()
    assert certificate.subject.keys() == {"manifest.json", *bundle.manifest.files}
    assert certificate.runtime["graph"] == "float32 twin.onnx"
    assert bundle.manifest.lowering["allowed"]["plan"] == {"images": 360, "flips": 10}
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


def test_eight_bits_beside_float16_with_a_plan(tmp_path: Path, vitx: Vitx, in_this_process: None) -> None:
    """The default for TensorRT; the certificate is by the twin, and the plan's layers are in the bundle."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX has wheels for x86-64 Linux and Windows only")
    plan = ("--trt-rtx", "--arch", "sm89", "--profiles", "1")
    code, _, errors = vitx(
        "export", *SOURCE, *SMALL, "--precision", "int8", *plan, "--json", "--out", tmp_path / "net.vitx"
    )
    assert code == 0, errors
    bundle = Bundle.open(tmp_path / "net.vitx")
    manifest = bundle.manifest
    assert (manifest.precision, manifest.base, manifest.lowering["target"]) == ("int8", "fp16", "tensorrt")
    assert manifest.islands == ()
    certificate = bundle.require_certificate()
    assert certificate.runtime["graph"] == "float32 twin.onnx"
    assert "engines/tensorrt-rtx.plan.layers.tsv" in manifest.files
    types = json.loads((bundle.path / "engines" / "tensorrt-rtx.plan.json").read_text())["fused_layers"]
    assert types["int8"] > 4
    assert types["fp16"] > 8
    assert types.get("fp32", 0) <= 2, "the logits, and half a LayerNorm"


def test_the_process_of_a_conversion_imports_no_torch() -> None:
    """It would take 3 s and 600 MB of each, under its limits."""
    code = "import sys; import vitx.export.engines.targets; print({'torch', 'timm'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--trt",), 3, "tensorrt"),
        (("--arch", "sm89"), 2, "--arch sm89 goes with --trt-rtx"),
        (("--trt-rtx", "--profiles", "1,x"), 2, "--profiles 1,x: expected batch sizes such as 1,8,32"),
        (("--trt-rtx", "--profiles", "8,1"), 2, "batch sizes 8, 1"),
        (("--trt-rtx", "--arch", "sm90"), 2, "cannot build for 'sm90'"),
        (("--trt-rtx", "--arch", "sm75,sm89"), 2, "TensorRT for RTX has no fp32 products for sm75: leave it out of"),
    ],
)
def test_targets_that_cannot_be_made(
    tmp_path: Path, vitx: Vitx, options: tuple[str, ...], code: int, message: str
) -> None:
    found, _, errors = vitx("export", *SOURCE, *options, "--out", tmp_path / "net.vitx")
    assert found == code, errors
    assert message in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flavor", "precision", "base", "lacking"),
    [
        ("tensorrt-rtx", "fp16", "fp32", ""),
        ("tensorrt-rtx", "int8", "fp16", ""),
        ("tensorrt-rtx", "fp32", "fp32", "fp32"),
        ("tensorrt-rtx", "bf16", "fp32", "bf16"),
        ("tensorrt-rtx", "int8", "bf16", "bf16"),
        ("tensorrt-rtx", "int8", "fp32", "fp32"),
        ("tensorrt", "fp32", "fp32", ""),  # the classic library has them
    ],
)
def test_turing_computes_in_float16_alone(
    monkeypatch: pytest.MonkeyPatch, flavor: Any, precision: Any, base: Any, lacking: str
) -> None:
    """The library says so itself once the graph is traced, and names no remedy."""
    monkeypatch.setattr(
        targets, "load_flavor", lambda flavor: SimpleNamespace(targets=lambda asked: asked or ("sm89",))
    )
    EngineRequest(flavor).check(precision, base)
    turing = EngineRequest(flavor, architectures=("sm75", "sm89"))
    if not lacking:
        turing.check(precision, base)
        return
    with pytest.raises(
        InputError, match=f"^TensorRT for RTX has no {lacking} products for sm75: leave it out of --arch"
    ):
        turing.check(precision, base)


def test_a_crashing_compiler_leaves_a_reproduction(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old bundle stays; beside it is the smallest part of the graph that crashes the compiler."""
    failed = own_bundle.with_name("net.vitx.failed")
    before = {path.name: path.read_bytes() for path in own_bundle.iterdir()}
    monkeypatch.setitem(targets.CONVERT, "openvino", crash_on_gelu)
    with pytest.raises(ConversionCrashed, match=r"openvino died of SIGSEGV; a graph of 2 nodes that does the same"):
        targets.convert_limited(
            *("openvino", crash_on_gelu, own_bundle / "model.onnx"),
            failed=failed,
            seconds=60,
            memory_gib=8,
        )
    found = onnx.load(str(failed / "subgraph.onnx"))
    assert [node.op_type for node in found.graph.node] == ["Gemm", "Gelu"]
    assert {path.name: path.read_bytes() for path in own_bundle.iterdir()} == before


def test_a_lower_precision_needs_images(vitx: Vitx) -> None:
    code, _, errors = vitx(
        "export", "model:deepvit_digits", "--weights", "random", "--uncertified", "--precision", "int8"
    )
    assert code == 2
    assert "int8 is judged on real images: give --data or --calibration-data" in errors


def test_an_image_too_thin_for_the_network_ends_no_lowering(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found, and with --skip-bad left out and counted, when the images are listed."""
    known, pictures = colour_images(MIN_HALF_IMAGES), tmp_path / "images" / "train" / "a"
    pictures.mkdir(parents=True)
    for index, key in enumerate(known.keys):
        (pictures / key).write_bytes(known.read(index))
    (pictures / "thin.png").write_bytes(encode_png(np.zeros((1, 60000, 3), np.uint8)))
    shutil.copytree(tmp_path / "images" / "train", tmp_path / "images" / "val")
    onnx.save(tiny_graph(), tmp_path / "model.onnx")
    request = PrecisionRequest("fp16", str(tmp_path / "images"), "cpu", "fp32", None, quiet=True, skip_bad=True)
    lowered = targets.lower_file(tmp_path / "model.onnx", request, PREPROCESSING)
    assert lowered.details["held_out_images"] == MIN_HALF_IMAGES
    assert re.fullmatch(r"left out 1 image: .*thin\.png: image of 60000×1 pixels.*\n", capsys.readouterr().err)
    with pytest.raises(InputError, match=r"thin\.png: image of 60000×1 pixels: too thin .* or pass --skip-bad"):
        targets.lower_file(tmp_path / "model.onnx", replace(request, skip_bad=False), PREPROCESSING)


def test_bfloat16_is_certified_by_its_twin_on_a_cpu(
    own_bundle: Path, random_source: SourceRequest, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's CPU cannot load the graph itself."""
    bundle = in_bfloat16(own_bundle)
    with pytest.raises(EnvironmentMissing, match="has no bf16 kernels for a CPU"):
        load_session(bundle, device="cpu")
    source = random_source.load()
    certificate = certify_models(
        model_from_source(source, "cpu"),
        model_from_bundle(bundle, device="cpu", use_twin=True),
        open_images("digits", "val"),
        max_flip_rate=0.1,  # near ties of random weights
        quiet=True,
    )
    assert certificate.verdict == "pass", certificate.reasons
    assert (certificate.runtime["graph"], certificate.runtime["precision"]) == ("float32 twin.onnx", "bf16")
    assert certificate.max_logit_error > 1e-4
    assert list(temporary.iterdir()) == []


def in_bfloat16(path: Path) -> Bundle:
    """Replace a bundle's graph and what its manifest says of it; the witness set stays as it is."""
    graph = HalfGraph(Dataflow(onnx.load(str(path / "model.onnx"))), HALVES["bf16"]).build(())
    onnx.save(graph, path / "model.onnx")
    entry = FileEntry(sha256=sha256_file(path / "model.onnx"), size=(path / "model.onnx").stat().st_size)
    manifest = read_record(path / MANIFEST, Manifest)
    files = {**manifest.files, "model.onnx": entry}
    changed = manifest.model_copy(update={"precision": "bf16", "files": files})
    write_json(path / MANIFEST, changed)
    return Bundle.open(path)
