"""What `vitx doctor` says of TensorRT: which release serves plans, and which ONNX Runtime."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli_fixture import Vitx
from vitx.core.tensorrt_plan import InstalledLibrary
from vitx.runtimes import tensorrt_versions
from vitx.runtimes.tensorrt_versions import provider_needs, tensorrt_report


def with_provider(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes | None) -> None:
    (folder / "capi").mkdir()
    if content is not None:
        (folder / "capi" / "libonnxruntime_providers_tensorrt.so").write_bytes(content)
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(tensorrt_versions, "find_spec", lambda name: spec)


def with_library(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def installed(module: str) -> InstalledLibrary | None:
        return InstalledLibrary(module, versions[module]) if module in versions else None

    monkeypatch.setattr(tensorrt_versions, "installed_library", installed)


@pytest.mark.parametrize(
    ("content", "major"), [(b"\0libnvinfer.so.10\0", 10), (b"\0libnvinfer.so.11\0", 11), (b"none", None), (None, None)]
)
def test_the_provider_names_its_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, major: int | None
) -> None:
    with_provider(monkeypatch, tmp_path, content)
    assert provider_needs() == major
    monkeypatch.setattr(tensorrt_versions, "find_spec", lambda name: None)
    assert provider_needs() is None


@pytest.mark.parametrize(
    ("versions", "needed", "said"),
    [
        (
            {},
            10,
            "not installed: vitx[trt] brings the newest, for plans; vitx[trt10] brings 10, for plans and for ONNX ",
        ),
        ({}, None, "not installed: vitx[trt] brings the newest, for plans"),
        ({"tensorrt": "10.16.1.11"}, 10, "10.16.1.11: for plans and for ONNX Runtime"),
        ({"tensorrt": "11.4.0.1"}, 10, "11.4.0.1: for plans, not for ONNX Runtime (vitx[trt10] serves both)"),
        ({"tensorrt": "11.4.0.1"}, None, "11.4.0.1: for plans"),
        ({"tensorrt_lean": "10.16.1.11"}, None, "not installed: vitx[trt] brings the newest, for plans"),
    ],
)
def test_what_the_installed_release_serves(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], needed: int | None, said: str
) -> None:
    with_library(monkeypatch, **versions)
    monkeypatch.setattr(tensorrt_versions, "provider_needs", lambda: needed)
    report = tensorrt_report()
    assert report["tensorrt"].startswith(said)
    assert report["tensorrt"] == said or said.endswith("ONNX ")
    provider = "this ONNX Runtime has no TensorRT provider" if needed is None else "libnvinfer.so.10, TensorRT 10"
    assert report["tensorrt of onnxruntime"] == provider
    assert report["tensorrt-rtx"] == "not installed: pip install 'vitx[trt-rtx]'"
    with_library(monkeypatch, tensorrt_rtx="1.7.1.116")
    assert tensorrt_report()["tensorrt-rtx"] == "1.7.1.116: for its own plans"


def test_the_doctor_says_it_and_the_extra_exists(vitx: Vitx) -> None:
    code, out, _ = vitx("doctor", "--json")
    assert code == 0
    assert tensorrt_report().items() <= json.loads(out).items()
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = provider_needs()
    assert needed is None or f"<{needed + 1}" in extras[f"trt{needed}"][0]
