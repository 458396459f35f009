"""The limit on an image's pixels: only --max-pixels counts, not Pillow's own limit."""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from bundle_fixture import write_bundle
from server_process import ServerProcess, running_server
from vitx.core.preprocess import ImageError, decode

PILLOWS_LIMIT = 2 * 89_478_485  # beyond, it raises while it opens a file


def png_that_says(width: int, height: int) -> bytes:
    """A small file whose header is of a huge grey picture; its pixels end at once."""
    chunks = ((b"IHDR", struct.pack(">II5B", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(100))))
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.fixture(scope="module", params=[50_000_000, 250_000_000])
def limited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, ServerProcess]]:
    bundle = write_bundle(tmp_path_factory.mktemp("pixels") / "tiny.vitx")
    with running_server(bundle.path, "--allow-uncertified", "--max-pixels", str(request.param)) as server:
        yield request.param, server


@pytest.mark.parametrize("side", [8_000, 14_000, 15_000, 30_000])  # 64, 196, 225 and 900 million
def test_max_pixels_alone_decides(limited: tuple[int, ServerProcess], side: int) -> None:
    limit, server = limited
    refused = server.metric('vitx_rejections_total{reason="bad_image"}')
    status, text, _ = server.request("POST", "/v1/classify", png_that_says(side, side), {"Content-Type": "image/png"})
    error = json.loads(text)["error"]
    assert status == 400
    if side * side > limit:
        assert error == f"image of {side}×{side} pixels: more than the {limit:,} allowed"
    else:  # it was allowed, and read
        assert error.startswith("cannot decode the image: ")
        assert "truncated" in error
    assert server.metric('vitx_rejections_total{reason="bad_image"}') == refused + 1
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_a_program_with_pillows_limit_gets_an_image_error() -> None:
    huge = png_that_says(14_000, 14_000)
    assert 14_000**2 > PILLOWS_LIMIT == 2 * (Image.MAX_IMAGE_PIXELS or 0)
    with pytest.raises(ImageError, match=r"^image of more pixels than the 100,000,000 allowed$"):
        decode(huge)
    with pytest.raises(ImageError, match=r"That is PIL\.Image\.MAX_IMAGE_PIXELS: set it to None"):
        decode(huge, max_pixels=250_000_000)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "EPS"])
def test_other_formats_are_not_tried(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image"
    Image.new("RGB", (32, 32)).save(path, kind)
    with pytest.raises(ImageError, match=r"^not an image in a format that can be read"):
        decode(path)
