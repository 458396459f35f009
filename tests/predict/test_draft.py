"""Draft decoding: what it changes, and that it is refused where it would change classes."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from bundle_fixture import NumpySession, colour_image, listed_names
from cli_fixture import Vitx
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import DRAFT_MARGIN, ImageError, Preprocessing, UInt8Array, decode
from vitx.parity.statistics import clopper_pearson_upper
from vitx.predict import PREDICTIONS, SUMMARY, predict
from vitx.predict.inputs.inventory import Inventory, Item
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.ledger import Shard
from vitx.predict.options import PredictOptions
from vitx.predict.pipeline import draft
from vitx.predict.pipeline.draft import SAMPLE_IMAGES, check_draft


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


@pytest.mark.parametrize("size", [(1600, 1064), (1064, 1600), (640, 427), (100, 90), (1, 1), (900, 4)])
@pytest.mark.parametrize(("pixels", "crop"), [(224, 0.9), (64, 1.0), (33, 0.73)])
def test_a_drafts_pixels_are_close(photo: Image.Image, size: tuple[int, int], pixels: int, crop: float) -> None:
    """On a photograph. Edges differ most: the discrete cosine transform shrinks them differently than a resize."""
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


def test_a_broken_image_is_the_same_error_as_a_draft(photo: Image.Image) -> None:
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
    assert "draft was True, is False now" in err


class FirstPixel(NumpySession):
    """A model that decides by one pixel's lowest bit: its class of a draft is random."""

    def _infer(self, images: UInt8Array) -> Any:
        odd = images[:, 8, 8, 0] % 2
        return np.stack([odd, 1 - odd, 0 * odd, 0 * odd], axis=1).astype(np.float32)


def test_draft_that_changes_classes_is_refused(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        CheckFailed, match=r"--draft changes the class of \d+ of 400 images of the input: .*: leave it out"
    ):
        predict(tiny_bundle, FirstPixel(), photos, out, PredictOptions(draft=True), quiet=True)
    assert not out.exists()
    assert predict(tiny_bundle, FirstPixel(), photos, out, quiet=True).images == 401


def test_too_few_images_cannot_show_it(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(photos.iterdir())[:100]:
        (few / path.name).write_bytes(path.read_bytes())
    expected = r"changes the class of 0 of 100 .*at most 0\.0295 \(95 %\), allowed 0\.01, which takes 299"
    with pytest.raises(CheckFailed, match=expected):
        predict(tiny_bundle, NumpySession(), few, tmp_path / "out", PredictOptions(draft=True), quiet=True)


def test_the_certificates_rate_is_the_limit(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    (tiny_bundle.path / CERTIFICATE).unlink()
    summary = predict(
        *(tiny_bundle, NumpySession(), photos, tmp_path / "out"),
        PredictOptions(draft=True, allow_uncertified=True),
        quiet=True,
    )
    assert summary.draft is not None
    assert summary.draft.max_flip_rate == 0.01
    assert SAMPLE_IMAGES >= 299
    assert DRAFT_MARGIN >= 1


def test_the_sample_is_spread_over_the_shards(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    """401 files in shards of 3: every shard gives its share of the sample."""
    summary = predict(
        tiny_bundle,
        NumpySession(),
        photos,
        tmp_path / "out",
        PredictOptions(draft=True, shard_size=3, batch_size=8),
        quiet=True,
    )
    assert summary.draft is not None
    assert summary.draft.images == 400


def sampled(folder: Path, count: int, shard_size: int, *, known: bool = True) -> list[int]:
    """The numbers of the images that are sampled from shards of a list of `count`."""
    shards = tuple(listed_names(folder / "list", (str(index) for index in range(count)), shard_size))
    if not known:
        shards = tuple(Shard("tar", str(index)) for index in range(len(shards)))
    decoder = SimpleNamespace(from_bytes=lambda data, draft=False: data)
    with patch.object(draft, "read_item", lambda item: item._replace(source=item.key.encode())):
        found = draft._pairs(Inventory("", shards, ""), folder / "list", TableColumns(), decoder)  # type: ignore[arg-type]
        return [int(bytes(full)) for full, _ in found]


@pytest.mark.parametrize(
    ("count", "shard_size", "expected"),
    [
        (3, 10, [0, 1, 2]),
        (15, 15, [0, 1, 3, 5, 7, 9, 11, 13]),  # to the end, although not twice as many as are taken
        (16, 16, [0, 2, 4, 6, 8, 10, 12, 14]),
        (8, 8, list(range(8))),
        (30, 15, [0, 3, 7, 11, 15, 18, 22, 26]),
        (30, 10, [0, 3, 7, 11, 15, 18, 22, 26]),  # over all of them, whatever their shards
        (9, 8, list(range(8))),  # a last shard of one image takes no half of the sample
        (24, 2, [0, 3, 6, 9, 12, 15, 18, 21]),
    ],
)
def test_the_sample_is_evenly_spaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, shard_size: int, expected: list[int]
) -> None:
    monkeypatch.setattr(draft, "SAMPLE_IMAGES", 8)
    assert sampled(tmp_path, count, shard_size) == expected


def test_of_a_shard_of_unknown_size_the_first_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def items(shard: Shard, *_: object) -> Any:
        nonlocal taken
        for index in range(100):
            taken += 1
            yield Item(f"{100 * int(shard.location) + index}", b"")

    monkeypatch.setattr(draft, "SAMPLE_IMAGES", 8)
    monkeypatch.setattr(draft, "read_shard", items)
    assert sampled(tmp_path, 4, 2, known=False) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert taken == 8


def test_row_groups_without_a_row_take_no_part_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard("parquet", "a", start=min(index, 1) * 8, count=8 * (index == 0)) for index in range(9)]

    def items(shard: Shard, *_: object) -> Any:
        return (Item(str(index), b"") for index in range(shard.count or 0))

    monkeypatch.setattr(draft, "SAMPLE_IMAGES", 8)
    monkeypatch.setattr(draft, "read_shard", items)
    decoder: Any = SimpleNamespace(from_bytes=lambda data, draft=False: data)
    assert len([*draft._pairs(Inventory("", tuple(shards)), Path("list"), TableColumns(), decoder)]) == 8


class ByLevel(NumpySession):
    """Logits of one grey level: at 100 or more the second class, by as much as the level is above it."""

    def _infer(self, images: UInt8Array) -> Any:
        level = images[:, 0, 0, 0].astype(np.float32)
        return np.stack([0 * level, level - 99.5, 0 * level - 500, 0 * level - 500], axis=1)


def test_every_field_of_the_check_by_hand(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images: equal, three levels up in one pixel, six levels down over the limit of two classes, unreadable."""
    (tiny_bundle.path / CERTIFICATE).unlink()
    full, lower = np.full((4, 16, 16, 3), 100, dtype=np.uint8), np.full((4, 16, 16, 3), 100, dtype=np.uint8)
    lower[1, 5, 5, 1] = 103
    lower[2] = 94

    def from_bytes(self: Preprocessing, data: bytes, *, draft: bool = False) -> UInt8Array:
        if data == b"3":
            raise ImageError("torn")
        return np.asarray((lower if draft else full)[int(data)])

    monkeypatch.setattr(Preprocessing, "from_bytes", from_bytes)
    monkeypatch.setattr(draft, "MAX_FLIP_RATE", 0.9)
    for index in range(4):
        (tmp_path / str(index)).write_bytes(b"%d" % index)
    inventory = Inventory(str(tmp_path), tuple(listed_names(tmp_path / "list", [*map(str, range(4)), "absent"])))
    for batch_size in (1, 2, 3):
        found = check_draft(tiny_bundle, ByLevel(), inventory, tmp_path / "list", TableColumns(), batch_size=batch_size)
        assert found.model_dump() == {
            "images": 3,
            "drafted": 2,
            "flips": 1,
            "flip_rate_bound": pytest.approx(0.8646497, abs=1e-6),  # (1 − p)³ + 3p(1 − p)² = 0.05
            "max_flip_rate": 0.9,
            "max_logit_difference": 6.0,
            "max_grey_difference": 6,
        }
    bound = found.flip_rate_bound
    monkeypatch.setattr(draft, "MAX_FLIP_RATE", bound)
    check_draft(tiny_bundle, ByLevel(), inventory, tmp_path / "list", TableColumns(), batch_size=4)
    monkeypatch.setattr(draft, "MAX_FLIP_RATE", bound - 1e-9)
    with pytest.raises(CheckFailed, match=r"--draft changes the class of 1 of 3 images"):
        check_draft(tiny_bundle, ByLevel(), inventory, tmp_path / "list", TableColumns(), batch_size=4)


def test_an_input_without_a_readable_image_proves_nothing(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"")
    inventory = Inventory(str(tmp_path), tuple(listed_names(tmp_path / "list", ["bad"])))
    with pytest.raises(CheckFailed, match=r"the class of 0 of 0 images of the input: flip rate at most 1\.0000"):
        check_draft(tiny_bundle, ByLevel(), inventory, tmp_path / "list", TableColumns(), batch_size=4)


class NotFinite(NumpySession):
    """Logits that are the grey level; not finite at 50 and at 60, and beyond float32's difference at 200 and 210."""

    def _infer(self, images: UInt8Array) -> Any:
        level = images[:, 0, 0, 0]
        first = level.astype(np.float32)
        for at, value in ((50, np.nan), (60, np.inf), (200, 3e38), (210, -3e38)):
            first[level == at] = value
        none = np.zeros_like(first)
        return np.stack([first, none + 55, none, none], axis=1)


def test_logits_that_are_not_finite_are_an_error_row_and_no_number(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite; in neither way; as a draft alone; in full alone; so far apart that float32 has no number for it."""
    (tiny_bundle.path / CERTIFICATE).unlink()
    full, drafts = (100, 50, 60, 70, 200), (103, 60, 80, 50, 210)

    def from_bytes(self: Preprocessing, data: bytes, *, draft: bool = False) -> UInt8Array:
        return np.full((16, 16, 3), (drafts if draft else full)[int(data)], np.uint8)

    monkeypatch.setattr(Preprocessing, "from_bytes", from_bytes)
    monkeypatch.setattr(draft, "MAX_FLIP_RATE", 0.99)
    folder, out = tmp_path / "images", tmp_path / "out"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.png").write_bytes(b"%d" % index)
    options = PredictOptions(draft=True, allow_uncertified=True)
    summary = predict(tiny_bundle, NotFinite(), folder, out, options, quiet=True)
    assert summary.draft is not None
    found = summary.draft
    assert (found.images, found.drafted, found.flips, found.max_grey_difference) == (4, 4, 3, 20)
    assert found.max_logit_difference == pytest.approx(6e38)
    assert json.loads((out / SUMMARY).read_text())["draft"]["images"] == 4
    errors = [row["error"] for row in pq.read_table(out / PREDICTIONS).to_pylist()]
    assert errors == [None, "the model's output is not finite", None, "the model's output is not finite", None]
