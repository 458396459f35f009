"""Draft decoding: what it changes, and that it is refused where it would change classes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from bundle_fixture import NumpySession, colour_image
from cli_fixture import Vitx
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import DRAFT_MARGIN, ImageError, Preprocessing, UInt8Array, decode
from vitx.parity.statistics import clopper_pearson_upper
from vitx.predict import PREDICTIONS, SUMMARY, predict
from vitx.predict.pipeline.draft import SAMPLE


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_images().images[1]).resize((1600, 1064))


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(None, 1600), (1065, 1600), (533, 1600), (532, 800), (267, 800), (266, 400), (134, 400), (133, 200), (1, 200)],
)
def test_a_jpeg_keeps_the_pixels_that_are_needed(photo: Image.Image, needed: int | None, expected: int) -> None:
    decoded = decode(jpeg(photo), shorter_side=needed)
    assert decoded.width == expected
    assert decoded.width / decoded.height == photo.width / photo.height


@pytest.mark.parametrize(
    ("size", "expected"), [((1600, 1066), (800, 533)), ((1600, 1065), (1600, 1065)), ((1604, 1064), (401, 266))]
)
def test_a_side_is_never_padded(photo: Image.Image, size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert decode(jpeg(photo.resize(size)), shorter_side=1).size == expected


def test_only_jpegs_come_smaller(photo: Image.Image) -> None:
    buffer = io.BytesIO()
    photo.save(buffer, "BMP")
    assert decode(buffer.getvalue(), shorter_side=10).size == photo.size


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_drafts_are_turned_upright_and_become_rgb(photo: Image.Image, mode: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    draft = decode(jpeg(photo.convert(mode), exif=exif), shorter_side=500)
    assert (draft.mode, draft.size) == ("RGB", (532, 800))


@pytest.mark.parametrize("size", [(1600, 1064), (1064, 1600), (640, 427), (100, 90), (1, 1), (900, 3)])
@pytest.mark.parametrize(("pixels", "crop"), [(224, 0.9), (64, 1.0), (33, 0.73)])
def test_a_drafts_pixels_are_near(photo: Image.Image, size: tuple[int, int], pixels: int, crop: float) -> None:
    """On a photograph; edges, which the discrete cosine transform reduces in another way, differ most."""
    preprocessing = Preprocessing(image_size=pixels, crop_fraction=crop)
    data = jpeg(photo.resize(size))
    full, draft = (preprocessing.from_bytes(data, draft=draft).astype(np.int16) for draft in (False, True))
    assert draft.shape == full.shape
    assert np.abs(full - draft).mean() < 2
    assert np.abs(full - draft).max() <= 64


def test_the_crop_alone_differs_in_rounding_only(photo: Image.Image) -> None:
    preprocessing = Preprocessing(image_size=224, crop_fraction=0.9)
    full, draft = (preprocessing.apply(photo, draft=draft).astype(np.int16) for draft in (False, True))
    assert np.abs(full - draft).max() <= 1
    assert (full != draft).mean() < 0.001


def test_what_is_no_image_is_no_draft(photo: Image.Image) -> None:
    preprocessing = Preprocessing(image_size=32)
    for data in (b"", b"text", jpeg(photo)[:2000]):
        with pytest.raises(ImageError) as full:
            preprocessing.from_bytes(data)
        with pytest.raises(ImageError) as draft:
            preprocessing.from_bytes(data, draft=True)
        assert str(draft.value).split(":")[0] == str(full.value).split(":")[0]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy patches of the classes' colours, six times the model's 16 pixels, and one file that is no image."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(400):
        patch = Image.fromarray(colour_image(index % 4, rng, size=96))
        (folder / f"{index:03d}.jpg").write_bytes(jpeg(patch))
    (folder / "bad.jpg").write_text("no image")
    return folder


def test_draft_is_measured_and_recorded(tiny_bundle: Bundle, photos: Path, tmp_path: Path, vitx: Vitx) -> None:
    arguments = (tiny_bundle.path, photos, "--device", "cpu", "--quiet")
    code, _, err = vitx("predict", *arguments, "--out", tmp_path / "draft", "--draft")
    assert code == 0, err
    vitx("predict", *arguments, "--out", tmp_path / "full")
    summaries = {name: json.loads((tmp_path / name / SUMMARY).read_text()) for name in ("draft", "full")}
    assert summaries["full"]["draft"] is None
    found = summaries["draft"]["draft"]
    paths = sorted(photos.glob("[0-9]*.jpg"))
    preprocessing = tiny_bundle.manifest.preprocessing
    full, draft = (
        np.stack([preprocessing.from_bytes(path.read_bytes(), draft=draft) for path in paths])
        for draft in (False, True)
    )
    logits, drafted = NumpySession().infer(full), NumpySession().infer(draft)
    flips = int((logits.argmax(axis=1) != drafted.argmax(axis=1)).sum())
    assert (found["images"], found["flips"]) == (400, flips)
    assert found["drafted"] == (full != draft).any(axis=(1, 2, 3)).sum() > 300
    assert found["flip_rate_bound"] == clopper_pearson_upper(flips, 400) <= found["max_flip_rate"] == 0.01
    assert found["max_logit_difference"] == pytest.approx(np.abs(logits - drafted).max(), rel=1e-3)
    rows = pq.read_table(tmp_path / "draft" / PREDICTIONS).to_pylist()
    assert [row["class_index"] for row in rows[:400]] == drafted.argmax(axis=1).tolist()
    assert rows[400]["error"] is not None
    code, _, err = vitx("predict", *arguments, "--out", tmp_path / "draft")
    assert code == 2
    assert "draft True there, False here" in err


class FirstPixel(NumpySession):
    """A model that decides by one pixel's lowest bit: what it says of a draft is chance."""

    def infer(self, images: UInt8Array) -> Any:
        odd = images[:, 8, 8, 0] % 2
        return np.stack([odd, 1 - odd, 0 * odd, 0 * odd], axis=1).astype(np.float32)


def test_draft_that_changes_classes_is_refused(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        CheckFailed, match=r"--draft changes the class of \d+ of 400 images of the input: .*: leave it out"
    ):
        predict(tiny_bundle, FirstPixel(), photos, out, draft=True, quiet=True)
    assert not out.exists()
    assert predict(tiny_bundle, FirstPixel(), photos, out, quiet=True).images == 401


def test_too_few_images_cannot_show_it(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(photos.iterdir())[:100]:
        (few / path.name).write_bytes(path.read_bytes())
    expected = r"changes the class of 0 of 100 .*at most 0\.0295 \(95 %\), allowed 0\.01, for which 299 without"
    with pytest.raises(CheckFailed, match=expected):
        predict(tiny_bundle, NumpySession(), few, tmp_path / "out", draft=True, quiet=True)


def test_the_certificates_rate_is_the_limit(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    (tiny_bundle.path / CERTIFICATE).unlink()
    summary = predict(
        *(tiny_bundle, NumpySession(), photos, tmp_path / "out"), draft=True, allow_uncertified=True, quiet=True
    )
    assert summary.draft is not None
    assert summary.draft.max_flip_rate == 0.01
    assert SAMPLE >= 299
    assert DRAFT_MARGIN >= 1


def test_the_sample_is_spread_over_the_shards(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    """401 files in shards of 3: every shard gives its share, so that nothing depends on the order."""
    summary = predict(
        tiny_bundle, NumpySession(), photos, tmp_path / "out", draft=True, shard_size=3, batch_size=8, quiet=True
    )
    assert summary.draft is not None
    assert summary.draft.images == 400
