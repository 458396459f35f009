"""Images of more pieces than any program writes: Pillow reads each in Python, and a small body has millions."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitx.core.preprocess import ImageError, decode


def image_of(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize(
    ("kind", "before", "piece"),
    [
        ("JPEG", b"\xff\xe0", b"\xff"),
        ("JPEG", b"\xff\xdb", b"\0"),
        ("JPEG", b"\xff\xe0", b"\xff\xfe\0\2"),
        ("JPEG", b"\xff\xe0", b"\xff\xe1\0\x0aExif\0\0ab"),
        ("JPEG", b"\xff\xe0", b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)),
        ("PNG", b"", chunk(b"abcd", b"")),
        ("PNG", b"", chunk(b"IDAT", b"")),
        ("GIF", b",", b"\0"),
        ("GIF", b",", b"!\xfe\1a\0"),
    ],
)
def test_an_image_in_too_many_pieces_is_refused(kind: str, before: bytes, piece: bytes) -> None:
    """64 MiB of them, 64 kB of gzip, took more than 20 s."""
    whole = image_of(kind)
    place = 33 if kind == "PNG" else whole.index(before)
    assert decode(whole[:place] + piece + whole[place:]).size == (16, 16)
    with pytest.raises(ImageError, match=r"^cannot decode the image: it is in too many pieces$"):
        decode(whole[:place] + piece * (2**25 // len(piece)) + whole[place:])


def test_the_longest_colour_profile_of_a_jpeg_is_read() -> None:
    assert decode(image_of("JPEG", icc_profile=bytes(255 * 65_519))).size == (16, 16)


def test_the_long_tags_of_a_tiff_are_read() -> None:
    """An editor keeps its layers in them: here 20 MiB."""
    sizes = [(256, 4, 1, 1), (257, 4, 1, 1), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1), (273, 4, 1, 8)]
    long = [(40_000 + number, 7, 2**20, 8 + number * 2**20) for number in range(20)]
    tags = [*sizes, (278, 4, 1, 1), (279, 4, 1, 1), *long]
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    values = bytes(20 * 2**20)
    data = b"II*\0" + struct.pack("<I", 8 + len(values)) + values + struct.pack("<H", len(tags)) + directory + bytes(4)
    assert decode(data).size == (1, 1)


def test_a_gif_with_long_xmp_is_read() -> None:
    """It is no run of sub-blocks, but read as if it were; a trailer of 257 bytes leads back to one from any place."""
    whole, xmp = image_of("GIF"), bytes(range(32, 127)) * 10_000
    trailer = b"\1" + bytes(range(255, -1, -1)) + b"\0"
    place = whole.index(b",")
    assert decode(whole[:place] + b"!\xff\x0bXMP DataXMP" + xmp + trailer + whole[place:]).size == (16, 16)


def test_a_large_png_in_pieces_of_8_kib_is_read() -> None:
    """As libpng writes it, which is in the smallest pieces."""
    noise = np.random.default_rng(0).integers(0, 256, (4000, 4000, 3), np.uint8)
    pixels = zlib.compress(np.pad(noise.reshape(4000, -1), ((0, 0), (1, 0))).tobytes(), 0)
    pieces = (chunk(b"IDAT", pixels[at : at + 8192]) for at in range(0, len(pixels), 8192))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 4000, 4000, 8, 2, 0, 0, 0))
    data = b"".join((b"\x89PNG\r\n\x1a\n", head, *pieces, chunk(b"IEND", b"")))
    assert np.array_equal(np.asarray(decode(data)), noise)


def test_long_xmp_is_not_searched() -> None:
    """Looking for the orientation in 63 MiB held every other thread up for 0.16 s."""
    turned = b'<x tiff:Orientation="6"/>'
    assert decode(image_with_xmp(turned)).size == (8, 16)
    assert decode(image_with_xmp(turned + bytes(2**20))).size == (16, 8)


def image_with_xmp(xmp: bytes) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 8)).save(file, "WEBP", xmp=xmp)
    return file.getvalue()


def test_a_file_has_the_limits_of_bytes(tmp_path: Path) -> None:
    """Else a folder's check would let an image pass that training then refuses."""
    path, whole = tmp_path / "image.gif", image_of("GIF")
    place = whole.index(b",")
    path.write_bytes(whole[:place] + b"\0" * 2**20 + whole[place:])
    with pytest.raises(ImageError, match="in too many pieces"):
        decode(path)
