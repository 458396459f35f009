"""The one preprocessing, against torchvision's transforms and against files that are not images."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torchvision.transforms.v2 as transforms
from PIL import Image
from sklearn.datasets import load_sample_images

from vitx.core.preprocess import ImageError, Preprocessing, decode


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


def test_exif_rotation_is_applied() -> None:
    image = Image.fromarray(np.zeros((10, 20, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(image, "JPEG", exif=exif)).size == (10, 20)


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


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot open the image: No such file"):
        decode(tmp_path / "missing.png")
