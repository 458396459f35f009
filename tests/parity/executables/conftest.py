"""Bundles that a test may change, and a machine that has never seen them."""

import shutil
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from vitx.core.bundle import Bundle
from witnessed_bundle import certify_bundle, seal_manifest, write_ir


@pytest.fixture(scope="package")
def witnessed_original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    bundle = write_bundle(tmp_path_factory.mktemp("witnessed") / "tiny.vitx")
    write_ir(bundle.path)
    assert certify_bundle(seal_manifest(bundle.path)).verdict == "pass"
    return Bundle.open(bundle.path)


@pytest.fixture
def witnessed(tmp_path: Path, witnessed_original: Bundle) -> Bundle:
    """A certified bundle with a witness set, model.onnx and IR."""
    return Bundle.open(shutil.copytree(witnessed_original.path, tmp_path / "tiny.vitx"))


@pytest.fixture
def bare(tmp_path: Path) -> Bundle:
    """The same without a witness set: certified in ONNX Runtime on this machine."""
    bundle = write_bundle(tmp_path / "bare.vitx")
    write_ir(bundle.path)
    certify_bundle(seal_manifest(bundle.path), witness_images=0)
    return Bundle.open(bundle.path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine that has seen no bundle yet."""
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
