"""The Triton model repository: its configuration is read back with Triton's own schema."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import onnx
import onnxruntime
import pytest

from bundle_fixture import LABELS, certificate, write_bundle
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.certificate import Executable, Verdict
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_bytes, sha256_file, write_json
from vitx.core.tensorrt_plan import PlanInfo, PlanOptions, read_sidecar
from vitx.export.engines.profiles import profiles_for, write_plan
from vitx.export.triton import triton_repository

schema = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient[grpc] is not installed")
text_format = pytest.importorskip("google.protobuf.text_format")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx")


def parsed(model: Path) -> Any:
    """The configuration as Triton parses it; an unknown field is an error."""
    return text_format.Parse((model / "config.pbtxt").read_text(), schema.ModelConfig())


def write_classic_plan(
    path: Path,
    bundle: Bundle,
    flavor: str = "tensorrt",
    onnx_sha256: str | None = None,
    sizes: tuple[int, ...] = (1, 8, 32),
) -> Path:
    data = b"a plan"
    info = {
        "flavor": flavor,
        "version": "10.16.1.11",
        "architectures": ("sm89",),
        "profiles": profiles_for(sizes),
        "precision": "fp16",
        "options": PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False),
        "onnx_sha256": onnx_sha256 or sha256_file(bundle.model_path),
        "sha256": sha256_bytes(data),
        "size": len(data),
        "build_seconds": 1.0,
        "layers": 1,
        "created": "2026-01-01T00:00:00+00:00",
    }
    write_plan(path, data, PlanInfo.model_validate(info))
    return path


def test_onnx_repository(bundle: Bundle, tmp_path: Path) -> None:
    model = triton_repository(bundle.path, tmp_path / "models", allow_uncertified=True)
    assert sorted(p.relative_to(model).as_posix() for p in model.rglob("*")) == [
        "1",
        "1/model.onnx",
        "config.pbtxt",
        "labels.txt",
    ]
    assert model.name == "tiny"
    config = parsed(model)
    assert (config.name, config.backend, config.default_model_filename) == ("tiny", "onnxruntime", "model.onnx")
    assert config.max_batch_size == 32
    assert (config.input[0].name, list(config.input[0].dims)) == ("images", [16, 16, 3])
    assert config.input[0].data_type == schema.TYPE_UINT8
    assert (config.output[0].name, list(config.output[0].dims)) == ("logits", [4])
    assert config.output[0].data_type == schema.TYPE_FP32
    assert config.output[0].label_filename == "labels.txt"
    assert tuple((model / "labels.txt").read_text().splitlines()) == LABELS
    assert config.instance_group[0].kind == schema.ModelInstanceGroup.KIND_CPU
    assert config.instance_group[0].count == 1
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert [entry.batch_size for entry in config.model_warmup] == [1, 32]
    warm = config.model_warmup[0].inputs["images"]
    assert (list(warm.dims), warm.random_data, warm.data_type) == ([16, 16, 3], True, schema.TYPE_UINT8)
    assert config.parameters["vitx.manifest_sha256"].string_value == sha256_file(bundle.path / "manifest.json")


def test_the_configuration_fits_the_graph(bundle: Bundle, tmp_path: Path) -> None:
    model = triton_repository(bundle.path, tmp_path / "models", allow_uncertified=True)
    config = parsed(model)
    session = onnxruntime.InferenceSession(str(model / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert [images.name, *images.shape[1:]] == [config.input[0].name, *config.input[0].dims]
    assert [logits.name, *logits.shape[1:]] == [config.output[0].name, *config.output[0].dims]
    assert onnx.load(str(model / "1" / "model.onnx")).graph.input[0].type.tensor_type.elem_type == 2  # uint8


def test_plan_repository(bundle: Bundle, tmp_path: Path) -> None:
    plan = write_classic_plan(tmp_path / "a.plan", bundle)
    model = triton_repository(bundle.path, tmp_path / "models", plan=plan, allow_uncertified=True)
    config = parsed(model)
    assert (config.backend, config.default_model_filename) == ("tensorrt", "model.plan")
    assert (model / "1" / "model.plan").read_bytes() == b"a plan"
    assert list(config.instance_group[0].profile) == ["0", "1", "2"]
    assert config.instance_group[0].kind == schema.ModelInstanceGroup.KIND_GPU
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
    assert [entry.batch_size for entry in config.model_warmup] == [1, 8, 32]
    assert "# The plan is of TensorRT 10.16.1.11 for sm89" in (model / "config.pbtxt").read_text()


def test_a_plan_needs_a_verdict_of_its_own(bundle: Bundle, tmp_path: Path) -> None:
    """A certificate that passes is of the graph in ONNX Runtime first of all."""
    plan = write_classic_plan(tmp_path / "a.plan", bundle)
    run = Executable(
        runtime="tensorrt", version="10.16.1.11", provider="GPU", architecture="sm89", precision="fp32",
        artefacts={"engines/tensorrt.plan": read_sidecar(plan).sha256},
    )  # fmt: skip

    def certify(*verdicts: Verdict) -> None:
        sealed = certificate(verdict="pass", subject=bundle.subject(), executables=verdicts).sealed()
        write_json(bundle.path / CERTIFICATE, sealed)

    def verdict(said: Literal["pass", "fail", "not run"], *reasons: str) -> Verdict:
        return Verdict(executable=run, verdict=said, reasons=reasons, evidence="none")

    certify()
    with pytest.raises(CheckFailed, match=r"says of '.*a\.plan': nothing; certify it on its GPU"):
        triton_repository(bundle.path, tmp_path / "models", plan=plan)
    certify(verdict("not run", "no GPU was here"))
    with pytest.raises(CheckFailed, match="not run: no GPU was here"):
        triton_repository(bundle.path, tmp_path / "models", plan=plan)
    certify(verdict("fail", "3 flips"))
    with pytest.raises(CheckFailed, match="fail: 3 flips"):
        triton_repository(bundle.path, tmp_path / "models", plan=plan)
    assert not (tmp_path / "models").exists()
    triton_repository(bundle.path, tmp_path / "graph")
    certify(verdict("pass"))
    model = triton_repository(bundle.path, tmp_path / "models", plan=plan)
    assert (model / "1" / "model.plan").is_file()


@pytest.mark.parametrize(("sizes", "largest"), [((1, 8), 8), ((1, 8, 128), 32)])
def test_batches_are_no_larger_than_the_profiles(
    bundle: Bundle, tmp_path: Path, sizes: tuple[int, ...], largest: int
) -> None:
    plan = write_classic_plan(tmp_path / "a.plan", bundle, sizes=sizes)
    model = triton_repository(bundle.path, tmp_path / "models", plan=plan, allow_uncertified=True)
    assert parsed(model).max_batch_size == largest


def test_plans_that_cannot_be_served(bundle: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "models"
    plan = write_classic_plan(tmp_path / "a.plan", bundle)
    info = read_sidecar(plan)
    write_plan(plan, b"a plan", info.model_copy(update={"profiles": info.profiles[1:]}))
    with pytest.raises(InputError, match=r"'.*a\.plan' takes no single image"):
        triton_repository(bundle.path, out, plan=plan, allow_uncertified=True)
    rtx = write_classic_plan(tmp_path / "b.plan", bundle, flavor="tensorrt-rtx")
    with pytest.raises(InputError, match="for which Triton has no backend"):
        triton_repository(bundle.path, out, plan=rtx, allow_uncertified=True)
    other = write_classic_plan(tmp_path / "c.plan", bundle, onnx_sha256="0" * 64)
    with pytest.raises(CheckFailed, match="was not built from the graph of"):
        triton_repository(bundle.path, out, plan=other, allow_uncertified=True)
    assert not out.exists()


def test_an_uncertified_bundle_is_not_handed_over(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="has no certificate"):
        triton_repository(bundle.path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_foreign_folder_is_left_alone_and_a_model_replaced(bundle: Bundle, tmp_path: Path) -> None:
    foreign = tmp_path / "models" / "tiny"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="exists and is no Triton model"):
        triton_repository(bundle.path, tmp_path / "models", allow_uncertified=True)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    (foreign / "config.pbtxt").write_text("")
    model = triton_repository(bundle.path, tmp_path / "models", allow_uncertified=True)
    assert not (model / "thesis.txt").exists()
    assert parsed(model).name == "tiny"


@pytest.mark.skipif("TRITON_SERVER" not in os.environ, reason="TRITON_SERVER does not name a tritonserver")
def test_tritons_own_server_reads_the_repositories(tmp_path: Path) -> None:
    """Up to the backend and the GPU that are missing. What it said on a dated run: benchmarks/results, `triton`."""
    bundle, root = tmp_path / "d.vitx", Path(__file__).parents[2]
    export = ("export", "model:deit_digits", "--weights", "random", "--uncertified", "--out", str(bundle), "--quiet")
    subprocess.run([sys.executable, "-m", "vitx", *export], check=True)
    script = root / "benchmarks" / "export" / "triton_reads.py"
    ran = subprocess.run(
        [sys.executable, script, bundle, "--server", os.environ["TRITON_SERVER"]], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "no GPUs are available" in ran.stdout
