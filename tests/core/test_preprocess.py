"""The one preprocessing, against torchvision's transforms and against files that are not images."""

import ctypes
import errno
import io
import logging
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.transforms.v2 as transforms
from PIL import Image
from sklearn.datasets import load_sample_images

import support.cost_tiff as cost_tiff
from bundle_fixture import damaged_fax
from cli_fixture import run_in_process
from vitx.core.errors import InputError
from vitx.core.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageError,
    Preprocessing,
    TooManyPixels,
    decode,
    ignore_image_warnings,
)
from vitx.core.sandbox import run_limited
from vitx.data.image_set import ImageSet
from vitx.train.loop.inputs.training_data import TrainingData
from vitx.train.recipes.image_and_loss_settings import Augmentation


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def photos() -> list[Image.Image]:
    return [Image.fromarray(image) for image in load_sample_images().images]


@pytest.mark.parametrize(("size", "crop"), [(224, 0.9), (224, 0.875), (384, 1.0), (32, 1.0), (97, 0.73)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("portrait", [False, True])
def test_equals_torchvision(
    photos: list[Image.Image], size: int, crop: float, interpolation: str, portrait: bool
) -> None:
    ours = Preprocessing(image_size=size, crop_fraction=crop, interpolation=interpolation)  # type: ignore[arg-type]
    theirs = transforms.Compose(
        [
            transforms.Resize(int(size / crop), interpolation=transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(size),
        ]
    )
    for photo in photos:
        image = photo.transpose(Image.Transpose.ROTATE_90) if portrait else photo
        np.testing.assert_array_equal(ours.apply(image), np.asarray(theirs(image)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_formats(photos: list[Image.Image], kind: str) -> None:
    image = decode(encoded(photos[0].resize((40, 30)), kind))
    assert (image.mode, image.size) == ("RGB", (40, 30))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(np.full((4, 4, 3), 255, np.uint8)).convert(mode)
    decoded = decode(encoded(image, "TIFF" if mode == "CMYK" else "PNG"))
    assert decoded.mode == "RGB"
    assert np.asarray(decoded).min() == 255


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    grey = Image.fromarray(np.array([[0, 256 * 17], [256 * 200, 65535]], np.uint16))
    assert np.asarray(decode(encoded(grey, "PNG")))[:, :, 0].tolist() == [[0, 17], [200, 255]]


def test_floats_are_refused_as_nothing_says_which_is_white() -> None:
    """Of values from 0 to 1 all became black, NaN too."""
    grey = Image.fromarray(np.array([[0, 0.5], [1, np.nan]], np.float32))
    with pytest.raises(ImageError, match=r"^the pixels are floats, of which none is known to be white: save it with 8"):
        decode(encoded(grey, "TIFF"))


def test_exif_rotation_is_applied() -> None:
    image = Image.fromarray(np.zeros((10, 20, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(image, "JPEG", exif=exif)).size == (10, 20)


# The number of a grey level at each corner of an upright image: top left, top right, bottom left, bottom right.
UPRIGHT = (0, 60, 120, 240)


@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (1, (0, 60, 120, 240)),
        (2, (60, 0, 240, 120)),  # mirrored
        (3, (240, 120, 60, 0)),  # upside down
        (4, (120, 240, 0, 60)),
        (5, (0, 120, 60, 240)),  # transposed
        (6, (60, 240, 0, 120)),  # to be turned clockwise
        (7, (240, 60, 120, 0)),
        (8, (120, 0, 240, 60)),  # to be turned counter-clockwise
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_every_orientation_becomes_upright(orientation: int, stored: tuple[int, ...], kind: str) -> None:
    image = Image.fromarray(np.array(stored, np.uint8).reshape(2, 2))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.asarray(decode(encoded(image, kind, exif=exif)))
    assert pixels.tolist() == [[[level] * 3 for level in UPRIGHT[:2]], [[level] * 3 for level in UPRIGHT[2:]]]


def test_grey_is_three_equal_channels_and_alpha_is_left_out() -> None:
    grey = np.array([[0, 17], [128, 255]], np.uint8)
    alpha = np.array([[0, 255], [1, 128]], np.uint8)
    expected = np.repeat(grey[:, :, None], 3, axis=2).tolist()
    assert np.asarray(decode(encoded(Image.fromarray(grey), "PNG"))).tolist() == expected
    assert (
        np.asarray(decode(encoded(Image.merge("LA", [*map(Image.fromarray, (grey, alpha))]), "PNG"))).tolist()
        == expected
    )
    colours = np.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]], np.uint8)
    transparent = Image.fromarray(np.dstack([colours, alpha]))
    assert transparent.mode == "RGBA"
    assert np.asarray(decode(encoded(transparent, "PNG"))).tolist() == colours.tolist()


def test_the_longer_side_is_cut_in_the_middle() -> None:
    """Without resizing, by hand: the crop of 4 begins at round(5 / 2) = 2 and round(3 / 2) = 2 of the longer side."""
    preprocessing = Preprocessing(image_size=4, interpolation="nearest")
    for width, first in ((9, 2), (7, 2), (8, 2), (5, 0)):
        columns = np.broadcast_to(np.arange(width, dtype=np.uint8)[None, :, None], (4, width, 3))
        wide = Image.fromarray(np.ascontiguousarray(columns))
        high = wide.transpose(Image.Transpose.TRANSPOSE)
        assert preprocessing.apply(wide)[0, :, 0].tolist() == list(range(first, first + 4))
        assert preprocessing.apply(high)[:, 0, 0].tolist() == list(range(first, first + 4))


@pytest.mark.parametrize(
    ("size", "crop", "side"), [(224, 0.9, 248), (224, 0.875, 256), (224, 1.0, 224), (97, 0.73, 132), (10, 0.6, 16)]
)
def test_the_scaled_side_is_rounded_down(size: int, crop: float, side: int) -> None:
    assert Preprocessing(image_size=size, crop_fraction=crop).scaled_side == side


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_each_interpolation_is_pillows(shape: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    scaled = {(5, 3): (12, 20), (3, 5): (20, 12), (4, 4): (12, 12)}[shape]
    left, top = (scaled[0] - 12) // 2, (scaled[1] - 12) // 2
    for name in ("nearest", "bilinear", "bicubic", "lanczos"):
        expected = image.resize(scaled, Image.Resampling[name.upper()]).crop((left, top, left + 12, top + 12))
        found = Preprocessing(image_size=12, interpolation=name).apply(image)
        np.testing.assert_array_equal(found, np.asarray(expected), err_msg=name)


def test_a_draft_resizes_the_same_square_alone() -> None:
    """A smooth slope of 400 × 100 pixels: another square, or a stretched one, would be off by many levels."""
    slope = np.linspace(0, 255, 400)[None, :, None] * np.linspace(0.5, 1, 100)[:, None, None] * np.ones(3)
    wide = Image.fromarray(slope.round().astype(np.uint8))
    preprocessing = Preprocessing(image_size=40, crop_fraction=0.8)
    for image in (wide, wide.transpose(Image.Transpose.TRANSPOSE)):
        whole = preprocessing.apply(image).astype(int)
        draft = preprocessing.apply(image, draft=True).astype(int)
        assert draft.shape == (40, 40, 3)
        assert abs(whole - draft).max() <= 2
    assert int(whole.max()) - int(whole.min()) > 40


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_draft_is_pillows_resize_of_the_square(name: str) -> None:
    """60 × 40 to a shorter side of 20: scaled 30 × 20, of which the square of 10 from (10, 5); in the source from
    (20, 10) to (40, 30)."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    preprocessing = Preprocessing(image_size=10, crop_fraction=0.5, interpolation=name)  # type: ignore[arg-type]
    expected = image.resize((10, 10), Image.Resampling[name.upper()], box=(20, 10, 40, 30))
    np.testing.assert_array_equal(preprocessing.apply(image, draft=True), np.asarray(expected))


@pytest.mark.parametrize(
    ("size", "shorter_side", "decoded"),
    [
        ((64, 48), 24, (32, 24)),
        ((64, 48), 25, (64, 48)),
        ((64, 48), 12, (16, 12)),
        ((64, 48), 6, (8, 6)),
        ((64, 48), 1, (8, 6)),
        ((60, 48), 6, (15, 12)),  # 8 does not divide 60
        ((66, 50), 12, (33, 25)),
        ((65, 48), 12, (65, 48)),
        ((48, 65), 12, (48, 65)),
        ((48, 64), 12, (12, 16)),
    ],
)
def test_a_jpeg_is_decoded_at_the_smallest_fraction_that_has_the_pixels(
    size: tuple[int, int], shorter_side: int, decoded: tuple[int, int]
) -> None:
    data = encoded(Image.new("RGB", size, (90, 60, 30)), "JPEG")
    assert decode(data, shorter_side=shorter_side).size == decoded
    assert decode(data).size == size
    assert decode(encoded(Image.new("RGB", size), "PNG"), shorter_side=shorter_side).size == size


def test_a_draft_has_twice_the_pixels_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 × 256 and a side of 64 a half of it is decoded, not a quarter."""
    sizes = []
    apply = Preprocessing.apply

    def seen(self: Preprocessing, image: Image.Image, *, draft: bool = False) -> object:
        sizes.append((image.size, draft))
        return apply(self, image, draft=draft)

    monkeypatch.setattr(Preprocessing, "apply", seen)
    data = encoded(Image.new("RGB", (256, 256)), "JPEG")
    for draft in (True, False):
        Preprocessing(image_size=64).from_bytes(data, draft=draft)
    assert sizes == [((128, 128), True), ((256, 256), False)]


def test_the_limit_of_pixels_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (6, 5)), "PNG")
    assert decode(data, max_pixels=30).size == (6, 5)
    with pytest.raises(ImageError) as caught:
        decode(data, max_pixels=29)
    assert str(caught.value) == "image of 6×5 pixels: more than the 29 allowed"
    with pytest.raises(ImageError) as caught:
        Preprocessing(image_size=1000).apply(Image.new("RGB", (1, 101)))
    assert str(caught.value) == "image of 1×101 pixels: too thin to be resized to 1000 on its short side"
    monkeypatch.setattr("vitx.core.preprocess.MAX_PIXELS", 1000)  # 10 × 100
    assert Preprocessing(image_size=10).apply(Image.new("RGB", (10, 1))).shape == (10, 10, 3)
    with pytest.raises(ImageError, match="11×1 pixels: too thin"):
        Preprocessing(image_size=10).apply(Image.new("RGB", (11, 1)))


def test_a_thin_image_is_refused_before_it_is_decoded() -> None:
    """Of 32,768 × 1 pixels a side would become 65,536 pixels long, of one more 65,538."""
    cut = {width: encoded(Image.new("L", (width, 1)), "PNG")[:60] for width in (32_768, 32_769)}
    for image_size, crop_mode in ((2, "center"), (2, "squash")):
        small = Preprocessing.model_validate({"image_size": image_size, "crop_mode": crop_mode})
        with pytest.raises(ImageError, match=r"truncated|cannot decode"):
            small.from_bytes(cut[32_768])
        expected = (
            "too thin to be resized to 2 on its short side$" if crop_mode == "center" else r"truncated|cannot decode"
        )
        with pytest.raises(ImageError, match=expected):
            small.from_bytes(cut[32_769])
    small.check_size(10**9, 1)


@pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA"])
def test_other_formats_of_pillow_are_refused(kind: str) -> None:
    with pytest.raises(ImageError, match=r"format that can be read \(JPEG, PNG, WebP, BMP, GIF, TIFF\)"):
        decode(encoded(Image.new("RGB", (32, 32)), kind))


def test_what_a_preprocessing_may_be() -> None:
    plain = Preprocessing(image_size=8)
    assert (plain.crop_fraction, plain.interpolation) == (1.0, "bicubic")
    assert "crop_mode" not in plain.model_dump(mode="json")  # readers refuse fields they do not know (docs/bundle.md)
    assert plain.model_copy(update={"crop_mode": "squash"}).model_dump(mode="json")["crop_mode"] == "squash"
    assert plain.mean == plain.std == (0.5, 0.5, 0.5)
    assert IMAGENET_MEAN == (0.485, 0.456, 0.406)
    assert IMAGENET_STD == (0.229, 0.224, 0.225)
    assert Preprocessing(image_size=1, crop_fraction=1).image_size == 1
    for wrong in ({"image_size": 0}, {"crop_fraction": 0}, {"crop_fraction": 2.01}, {"std": (1, 0, 1)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Preprocessing(**{"image_size": 8} | wrong)


def test_extreme_shapes() -> None:
    for size in ((1, 1), (1, 500), (500, 1), (3, 2)):
        image = Image.new("RGB", size, (10, 20, 30))
        pixels = Preprocessing(image_size=16, crop_fraction=0.9).apply(image)
        assert pixels.shape == (16, 16, 3)
        assert pixels.dtype == np.uint8
        assert (pixels == (10, 20, 30)).all()


def png_claiming(width: int, height: int) -> bytes:
    """A few bytes that claim to be a huge image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image: empty"),
        (b"hello", "not an image in a format that can be read"),
        (png_claiming(30000, 30000), "image of more pixels than the 100,000,000 allowed"),
        (png_claiming(100, 100), "cannot decode the image"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_truncation_is_refused(photos: list[Image.Image], kind: str) -> None:
    whole = encoded(photos[0].resize((64, 64)), kind)
    with pytest.raises(ImageError):
        decode(whole[: len(whole) // 2])


@pytest.mark.parametrize(("tag", "kind"), [(0x0100, 5), (0x0110, 11)], ids=["struct.error", "AttributeError"])
def test_whatever_pillow_trips_over_is_a_damaged_image(tag: int, kind: int) -> None:
    """A tag of another type than its own, in an image to be turned: Pillow writes the others back."""
    entries = sorted([(0x0112, 3, struct.pack(">HH", 6, 0)), (tag, kind, struct.pack(">I", 38))])
    table = b"".join(struct.pack(">HHI", number, of, 1) + value for number, of, value in entries)
    exif = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + table + bytes(4) + struct.pack(">II", 1, 3)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", exif=exif)
    with pytest.raises(ImageError, match=r"^cannot decode the image: "):
        decode(file.getvalue())


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot open the image: No such file"):
        decode(tmp_path / "missing.png")
    with pytest.raises(ImageError, match="cannot open the image: Is a directory"):
        decode(tmp_path)


LARGE = png_claiming(9_500, 9_500)  # Pillow warns of so many pixels, MAX_PIXELS allows them; the file ends at once


def test_pillow_warns_a_program_that_only_imports_vitx() -> None:
    """No import changes the warnings of a process; pytest makes an error of the warning."""
    code = "import numpy, PIL.Image, pydantic, warnings; before = warnings.filters[:]\n"
    code += "import vitx.core.preprocess; assert warnings.filters == before"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(Image.DecompressionBombWarning):
        decode(LARGE)


def test_the_command_line_prints_no_warning_of_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "large.png").write_bytes(LARGE)
    arguments = ("train", "digits-deepvit", "--data", tmp_path, "--out", tmp_path / "run")
    code, _, err = run_in_process(arguments, monkeypatch, capsys)
    assert code == 2
    assert "large.png: cannot decode the image" in err


def tiff(*entry: int) -> bytes:
    """8×8 grey pixels, with this tag (number, type, count, value) too."""
    tags = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 1000)]
    tags += [(278, 3, 1, 8), (279, 4, 1, 64)]
    directory = b"".join(struct.pack("<HHII", *tag) for tag in sorted([*tags, entry]))
    return (b"II*\0" + struct.pack("<IH", 8, len(tags) + 1) + directory).ljust(1000, b"\0") + bytes(64)


def test_what_pillow_logs_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(logging.getLogger("PIL"), "setLevel", levels.append)
    monkeypatch.delattr(ctypes, "CDLL")  # libtiff's handlers stay as they are
    with warnings.catch_warnings():
        ignore_image_warnings()
    assert levels == [logging.CRITICAL]


def test_other_processes_print_no_warning_of_pillow(capfd: pytest.CaptureFixture[str]) -> None:
    preprocessing = Preprocessing(image_size=8)
    for entry in ((274, 3, 2, 1), (1000, 2, 10_000_000, 10)):  # too many orientations; a text beyond the end
        assert run_limited("decoding", preprocessing.from_bytes, tiff(*entry)).shape == (8, 8, 3)
    with pytest.raises(ImageError, match="not an image"):
        run_limited("decoding", preprocessing.from_bytes, tiff(277, 3, 1, 99))  # samples a pixel
    with pytest.raises(ImageError, match="cannot decode the image"):
        run_limited("decoding", preprocessing.from_bytes, LARGE)
    assert run_limited("decoding", preprocessing.from_bytes, damaged_fax(5000)).shape == (8, 8, 3)
    images = ImageSet("one", ("a", "b"), ("large.png",), np.zeros(1, np.int64), read=[LARGE].__getitem__)
    data = TrainingData(images, preprocessing, Augmentation(), batch_size=1, seed=0)
    with pytest.raises(InputError, match=r"large\.png: cannot decode the image"):
        next(data.batches(0, workers=1))
    assert capfd.readouterr().err == ""


def tiled(*sides: tuple[int, int]) -> bytes:
    """16×16 grey pixels in one packbits tile of these sides, given by entries (tag, value) in this order."""
    rows = bytes([129, 0]) * 1000
    tags = [(256, 16), (257, 16), (258, 8), (259, 32773), (262, 1), *sides, (324, 8), (325, len(rows))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(rows)) + rows + struct.pack("<H", len(tags)) + directory + bytes(4)


def test_the_pixels_of_a_tiff_are_those_of_whole_tiles() -> None:
    """A tile is in memory at once: 2 kB took a gibibyte for 16×16 pixels."""
    assert decode(tiled((322, 256), (323, 256))).size == (16, 16)
    with pytest.raises(TooManyPixels, match="image of 32769×32769 pixels"):
        decode(tiled((322, 32769), (323, 32769)))
    for unclear in (
        ((322, 32768), (322, 16), (323, 32768), (323, 16)),  # libtiff takes the first, some Pillows the last
        ((322, 16), (323, 0)),
        ((322, 16),),
    ):
        with pytest.raises(ImageError, match="the size of its tiles or strips is not clear"):
            decode(tiled(*unclear))


@pytest.mark.parametrize(("mode", "whole"), [("L", "16×8000"), ("RGB", "16×16000")])
def test_the_pixels_of_a_jpeg_in_a_tiff_are_those_of_the_blocks_of_its_strips(mode: str, whole: str) -> None:
    """10 kB with a row a strip took 20 s: each of the 100 scans of each strip goes over 8 rows."""
    sizes = {"width": 15, "height": 1000, "pixels": 15_000, "rows": 1}
    data = cost_tiff.tiff({**cost_tiff.SMALLEST, **sizes, "compression": "jpeg", "mode": mode})
    with pytest.raises(TooManyPixels, match=f"image of {whole} pixels"):
        decode(data, max_pixels=100_000)
    assert decode(data).size == (15, 1000)


def test_a_large_grey_image_of_16_bits_is_in_memory_by_rows() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (1100, 700)).astype(np.int32)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF")
    decode(file.getvalue())  # what Pillow imports for it takes memory once
    tracemalloc.start()
    try:
        image = decode(file.getvalue())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(np.asarray(image), (values >> 8)[..., None].repeat(3, axis=2))
    assert peak < 2 * values.nbytes  # the file is one of them


def test_what_is_below_zero_is_black() -> None:
    file = io.BytesIO()
    Image.fromarray(np.array([[-1000, -1, 0, 255, 256, 32767]], np.int32)).save(file, "TIFF")
    assert np.asarray(decode(file.getvalue()))[0, :, 0].tolist() == [0, 0, 0, 0, 1, 127]


def test_too_many_open_files_are_no_fault_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow imports what it needs for the first image of a kind."""

    def full(*given: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", "/lib/PIL/PngImagePlugin.py")

    monkeypatch.setattr(Image, "open", full)
    with pytest.raises(OSError, match="Too many open files") as error:
        decode(b"")
    assert not isinstance(error.value, ImageError)


@pytest.mark.parametrize(("size", "rows", "columns"), [((8, 4), 2, 4), ((4, 8), 4, 2)])
def test_a_border_is_the_mean_around_the_whole_image(size: tuple[int, int], rows: int, columns: int) -> None:
    border = Preprocessing(image_size=4, crop_mode="border", mean=(0.2, 0.4, 0.6), interpolation="nearest")
    square = border.apply(Image.new("RGB", size, (9, 9, 9)))
    inside = (square == 9).all(axis=2)
    assert (inside.any(axis=1).sum(), inside.any(axis=0).sum(), inside.sum()) == (rows, columns, 8)
    assert (square[~inside] == [51, 102, 153]).all()


def test_a_mean_is_within_the_range_of_a_byte() -> None:
    assert Preprocessing(image_size=4, mean=(-255, 0, 255)).mean == (-255, 0, 255)
    for beyond in (-255.5, 255.5):
        with pytest.raises(ValueError, match=r"mean\.1"):
            Preprocessing(image_size=4, mean=(0, beyond, 0))
