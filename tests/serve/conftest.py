"""Bundles that every test of the serving stage can use."""

from pathlib import Path

import pytest
from bundle_fixture import NumpySession, colour_images, write_bundle, write_image_folder

from vitx.core.bundle import CERTIFICATE, Bundle, Certificate, timestamp
from vitx.core.files import write_json
from vitx.core.images import ImageSet


@pytest.fixture(scope="session")
def colours() -> ImageSet:
    """360 labelled images in memory: with no flip among them the bound is .008287."""
    return colour_images(360)


@pytest.fixture(scope="session")
def colours_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ (360 images) with one folder a class."""
    return write_image_folder(tmp_path_factory.mktemp("colours"), 360)


@pytest.fixture(scope="session")
def reference() -> NumpySession:
    return NumpySession()


@pytest.fixture
def uncertified_bundle(tmp_path: Path, colours_folder: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx", data=str(colours_folder))


@pytest.fixture
def tiny_bundle(uncertified_bundle: Bundle) -> Bundle:
    """A certified bundle: labels red, green, blue, grey; input uint8 [N,16,16,3]."""
    certificate = Certificate(
        verdict="pass",
        reasons=(),
        subject=uncertified_bundle.subject(),
        reference="numpy",
        reference_sha256="0" * 64,
        candidate=str(uncertified_bundle.path),
        runtime={"runtime": "onnxruntime"},
        data="colours",
        data_sha256="0" * 64,
        images=360,
        batch_sizes=(1, 2, 7, 32),
        accuracy_reference=1.0,
        accuracy_candidate=1.0,
        flips=(),
        flip_rate_bound=0.008287,
        max_flip_rate=0.01,
        mcnemar_p=1.0,
        max_logit_error=0.0,
        mean_logit_error=0.0,
        max_logit_error_by_batch_size={},
        max_logit_error_allowed=1e-4,
        max_neighbour_error=0.0,
        created=timestamp(),
    )
    write_json(uncertified_bundle.path / CERTIFICATE, certificate)
    return uncertified_bundle
