"""Fixtures of every room: small bundles and runs, the command line in this process."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from bundle_fixture import NumpySession, colour_images, write_bundle, write_image_folder
from cli_fixture import Vitx, run_in_process
from vitx.core.bundle import Bundle
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity import certify
from vitx.parity.certification import record_verdicts
from vitx.runtimes import load_session
from vitx.runtimes.session import executable_of


@pytest.fixture(scope="session")
def colours() -> ImageSet:
    """360 labelled images in memory: without a flip among them the 95 % bound on the flip rate is 0.008287."""
    return colour_images(360)


@pytest.fixture(scope="session")
def colours_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ (360 images) with one folder a class."""
    return write_image_folder(tmp_path_factory.mktemp("colours"), 360)


@pytest.fixture(scope="session")
def reference() -> NumpySession:
    """An independent computation of the bundles' graph."""
    return NumpySession()


@pytest.fixture(scope="session")
def certified_original(tmp_path_factory: pytest.TempPathFactory, colours_folder: Path) -> Bundle:
    bundle = write_bundle(tmp_path_factory.mktemp("bundle") / "tiny.vitx", data=str(colours_folder))
    certificate = certify(
        NumpySession(),
        load_session(bundle, device="cpu", threads=1),
        open_images(str(colours_folder), "val"),
        bundle.manifest.preprocessing,
        reference_name="numpy",
        candidate_name=bundle.manifest.name,
        subject=bundle.subject(),
        quiet=True,
    )
    assert certificate.verdict == "pass", certificate.reasons
    # Tests also run the bundle in the independent computation, or in sessions that are like it.
    record_verdicts(bundle, certificate, [certificate.as_verdict(executable_of(bundle.subject(), NumpySession()))])
    return bundle


@pytest.fixture
def tiny_bundle(tmp_path: Path, certified_original: Bundle) -> Bundle:
    """A certified bundle, which a test may change: labels blue, green, grey, red; input uint8 [N,16,16,3]."""
    return Bundle.open(shutil.copytree(certified_original.path, tmp_path / "tiny.vitx"))


@pytest.fixture
def uncertified_bundle(tmp_path: Path, colours_folder: Path) -> Bundle:
    return write_bundle(tmp_path / "uncertified.vitx", data=str(colours_folder))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, colours_folder: Path) -> RunFolder:
    """A run whose best checkpoint computes the same as the bundles' graph."""
    from run_fixture import write_run

    return write_run(tmp_path_factory.mktemp("runs") / "colours", str(colours_folder))


@pytest.fixture
def vitx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vitx:
    """Call `vitx(verb, …)` as on the command line: (exit code, standard output, standard error)."""
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS
    )  # restored after the test: `vitx serve` sets it to None
    return lambda *arguments: run_in_process(arguments, monkeypatch, capsys)
