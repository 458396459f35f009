"""A candidate that fails: the error names what is wrong with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import (
    BIAS,
    PREPROCESSING,
    WEIGHT,
    Fault,
    Float32Array,
    NumpySession,
    colour_images,
    write_bundle,
)
from cli_fixture import Vitx
from gpu_fixture import add_plan
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.parity.certification import (
    _default_batch_sizes,
    bundle_batch_sizes,
    check_engines,
)
from vitx.parity.diagnosis import Diagnosis, diagnose
from vitx.parity.loaded_model import model_from_bundle
from vitx.runtimes import load_session
from vitx.runtimes.session import Session

ALLOWED = 1e-4


class Normalized(NumpySession):
    """The reference with another mean and std."""

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def _infer(self, images: UInt8Array) -> Float32Array:
        normal = (images.astype(np.float64) / 255 - self.mean) / self.std
        return np.asarray(normal.mean(axis=(1, 2)) @ WEIGHT + BIAS, dtype=np.float32)


class Texture(NumpySession):
    """A classifier that sees edges, so that the filter which resized its images matters."""

    def _infer(self, images: UInt8Array) -> Float32Array:
        pixels = images.astype(np.float64) / 255
        edges = np.abs(np.diff(pixels, axis=1)).mean(axis=(1, 2))
        return np.asarray((edges * 10 + pixels.mean(axis=(1, 2))) @ WEIGHT + BIAS, dtype=np.float32)


class Wrapped(NumpySession):
    """A reference that prepares its images otherwise before it sees them."""

    def __init__(self, of: Session, change: Any) -> None:
        super().__init__()
        self.of, self.change = of, change

    def _infer(self, images: UInt8Array) -> Float32Array:
        return self.of.infer(self.change(images))


def diagnosed(candidate: Session, images: ImageSet, reference: Session | None = None, **options: Any) -> Diagnosis:
    options = {"renormalized": Normalized, "allowed": ALLOWED, **options}
    return diagnose(reference or NumpySession(), candidate, images, PREPROCESSING, **options)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("mean_std", "normalisation: mean and std are swapped"),
        ("bgr", "BGR: the candidate reads the colour channels in reverse"),
        ("class_off_by_one", "labels are off by +1"),
        ("batch_mean", "batch-dependent graph: rows move by"),
        ("position", "batch-dependent graph: rows move by"),
        ("drift", "bias of the classifier dropped or changed: class"),
        ("nan", "overflow: logits are NaN or infinite"),
    ],
)
def test_a_planted_mistake_of_the_graph_is_named(tmp_path: Path, colours: ImageSet, fault: Fault, name: str) -> None:
    session = load_session(write_bundle(tmp_path / "graph.vitx", fault=fault), device="cpu", threads=1)
    found = diagnosed(session, colours)
    assert found.cause is not None
    assert found.cause.startswith(name)


def test_bgr_in_the_pixels_is_named(colours: ImageSet) -> None:
    found = diagnosed(Wrapped(NumpySession(), lambda images: images[..., ::-1]), colours)
    assert found.cause == "BGR: the candidate reads the colour channels in reverse"
    assert str(found).endswith("0 once it is undone)")


@pytest.mark.parametrize("name", ["nearest", "bilinear", "lanczos"])
def test_the_wrong_interpolation_is_named(name: Any) -> None:
    images = colour_images(80)
    reference = PREPROCESSING.model_copy(update={"image_size": 8})
    other = reference.model_copy(update={"interpolation": name})
    found = diagnose(
        Texture(), Texture(), images, reference, candidate_preprocessing=other, renormalized=None, allowed=ALLOWED
    )
    assert found.cause == f"interpolation: images are resized {name}, not bicubic"


def test_the_wrong_crop_is_named() -> None:
    other = PREPROCESSING.model_copy(update={"crop_fraction": 0.875})
    found = diagnosed(Texture(), colour_images(80), Texture(), candidate_preprocessing=other)
    assert found.cause == "crop: fraction 0.875, not 1"


@pytest.mark.parametrize(
    ("mean", "std", "name"),
    [
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "mean and std are left out"),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "mean and std are ImageNet's"),
        ((0.4 / 255, 0.45 / 255, 0.5 / 255), (0.2 / 255, 0.25 / 255, 0.3 / 255), "pixels are not divided by 255"),
    ],
)
def test_other_normalisations_are_named(colours: ImageSet, mean: Any, std: Any, name: str) -> None:
    assert diagnosed(Normalized(mean, std), colours).cause == f"normalisation: {name}"


def test_a_scale_of_the_logits_is_named(colours: ImageSet) -> None:
    class Doubled(NumpySession):
        def _infer(self, images: UInt8Array) -> Float32Array:
            return 2 * super()._infer(images)

    assert diagnosed(Doubled(), colours).cause == "logits scaled by 2"


def test_logits_that_change_from_run_to_run_are_named(colours: ImageSet) -> None:
    class Dropout(NumpySession):
        random = np.random.default_rng(0)

        def _infer(self, images: UInt8Array) -> Float32Array:
            return super()._infer(images) * (1 + np.float32(0.01) * (self.random.random((len(images), 1)) < 0.02))

    found = diagnosed(Dropout(), colours)
    assert str(found).startswith("not deterministic, as of dropout that is left on: an image run twice alone moves by ")


def test_batch_sizes_are_the_ends_of_the_profiles_and_one_below(tmp_path: Path) -> None:
    bundle = add_plan(write_bundle(tmp_path / "tiny.vitx"), "tensorrt")
    check_engines(bundle)
    assert bundle_batch_sizes(bundle) == (1, 2, 7, 8, 9, 31, 32)
    with model_from_bundle(bundle, device="cpu") as model:
        assert _default_batch_sizes(model, 31, quiet=True) == (1, 2, 7, 8, 9, 31)
        served = replace(model, bundle=None)
        served.session.max_batch = 9
        assert _default_batch_sizes(served, 31, quiet=True) == (1, 2, 7, 9)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("mean_std", "normalisation: mean and std are swapped"),
        ("bgr", "BGR: the candidate reads the colour channels in reverse"),
        ("class_off_by_one", "labels are off by +1"),
        ("batch_mean", "batch-dependent graph: rows move by"),
        ("drift", "bias of the classifier dropped or changed"),
        ("nan", "overflow: logits are NaN or infinite"),
    ],
)
def test_the_command_names_the_mistake(
    tiny_run: RunFolder, colours_folder: Path, tmp_path: Path, vitx: Vitx, fault: Fault, name: str
) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", fault=fault, data=str(colours_folder))
    code, _, err = vitx("parity", tiny_run.path, bundle.path, "--device", "cpu", "--quiet")
    assert code == 1
    assert name in err


def test_preprocessing_of_the_tests_is_what_the_mistakes_assume() -> None:
    assert Preprocessing(image_size=16).crop_fraction == 1
    assert PREPROCESSING.interpolation == "bicubic"
