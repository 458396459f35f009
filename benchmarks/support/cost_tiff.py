"""TIFFs as no program writes them: parts that share their bytes, sizes that disagree, tags by the thousand."""

import functools
import io
import random
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from PIL import Image

_MOST_BYTES, _MOST_PIXELS = 900_000, 2**24  # of the file, and of one part
# Tags and types of their entries (TIFF 6.0).
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _OFFSETS, _SAMPLES, _ROWS, _LENGTHS = (
    256,
    257,
    258,
    259,
    262,
    273,
    277,
    278,
    279,
)
_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_LENGTHS, _FIRST_UNKNOWN = 284, 322, 323, 324, 325, 40_000
_LONG, _UNDEFINED = 4, 7
COMPRESSIONS = {"none": 1, "huffman": 2, "fax3": 3, "fax4": 4, "lzw": 5, "old jpeg": 6, "jpeg": 7, "deflate": 8}
COMPRESSIONS |= {"packbits": 32773, "lzma": 34925, "zstd": 50000, "webp": 50001}
_PILLOW = {
    "huffman": "tiff_ccitt",
    "fax3": "group3",
    "fax4": "group4",
    "lzw": "tiff_lzw",
    "deflate": "tiff_adobe_deflate",
}
_PILLOW |= {kind: kind for kind in ("packbits", "lzma", "zstd", "webp")}
# Of mode and compression: bits and photometric interpretation, unless other ones are given.
_YCBCR = 6
_AS_MODE = {"1": (1, 1), "L": (8, 1), "RGB": (8, 2)}


def _jpeg_of_scans(mode: str, width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again until there are so many; b"" for a size that JPEG has not."""
    buffer = io.BytesIO()
    try:
        Image.new(mode, (width, height)).save(buffer, "JPEG", progressive=True)
    except (OSError, ValueError, MemoryError):
        return b""
    parts = buffer.getvalue().split(b"\xff\xda")  # what is before the first scan, and each scan
    last, more = parts[-1].removesuffix(b"\xff\xd9"), max(1, scans - len(parts) + 2)
    again = [last] * min(more, _MOST_BYTES // len(last) + 1)
    return b"\xff\xda".join(parts[:-1] + again) + b"\xff\xd9"


@functools.lru_cache(64)
def _part(kind: str, mode: str, width: int, height: int, scans: int) -> bytes:
    """One strip or tile of this size, or its beginning. Zeros where Pillow does not write it: a fax has mode "1"."""
    if "jpeg" in kind:
        return _jpeg_of_scans(mode, width, height, scans)
    buffer = io.BytesIO()
    with suppress(OSError):
        one = Image.new(mode, (width, height))
        one.save(buffer, "TIFF", compression=_PILLOW.get(kind), strip_size=2**30)
        with Image.open(buffer) as image:
            (place,), (size,) = image.tag_v2[_OFFSETS], image.tag_v2[_LENGTHS]  # type: ignore[attr-defined]
        return buffer.getvalue()[place : place + min(size, _MOST_BYTES)]
    return bytes(min(width * height, _MOST_BYTES))


def tiff(values: Mapping[str, Any]) -> bytes:
    """A TIFF of `width` × `height` in tiles of `tile` × `tile`, or without them in strips of `rows` rows.

    Raises OverflowError when its parts do not fit.
    """
    width, height = values["width"], min(values["height"], values["pixels"] // values["width"] + 1)
    tile, rows, samples = values["tile"], values["rows"] or height, 3 if values["mode"] == "RGB" else 1
    across, down = (tile, tile) if tile else (width, min(rows, height))
    if across * down > _MOST_PIXELS:
        raise OverflowError
    parts = max(1, -(-width // across) * -(-height // down) * (samples if values["planar"] == 2 else 1))
    parts = min(parts, 2 * _MOST_BYTES // 8)
    data = _part(values["compression"], values["mode"], across, down, values["scans"])
    bits, photometric = _AS_MODE[values["mode"]]
    if values["mode"] == "RGB" and values["compression"] == "jpeg":
        photometric = _YCBCR
    if values["noise"]:
        data = random.Random(0).randbytes(min(values["noise"], 100_000)) + data
    tags = {
        _WIDTH: width,
        _HEIGHT: height,
        _BITS: values["bits"] or bits,
        _COMPRESSION: COMPRESSIONS[values["compression"]],
        _PHOTOMETRIC: photometric if values["photometric"] is None else values["photometric"],
        _SAMPLES: samples,
        _PLANAR: values["planar"],
        **({_TILE_WIDTH: tile, _TILE_HEIGHT: tile} if tile else {_ROWS: values["rows"] or 2**32 - 1}),
    }
    entries = [(tag, _LONG, 1, value % 2**32) for tag, value in tags.items()]
    entries += [(*entries[-1][:3], values["again"] % 2**32)] * bool(values["again"])
    shared = min(values["tags"], 20_000)
    place = 8 + 2 + 12 * (len(entries) + 2 + shared) + 4
    start = place + 8 * parts
    if start + len(data) > _MOST_BYTES:
        raise OverflowError
    offsets, lengths = (_TILE_OFFSETS, _TILE_LENGTHS) if tile else (_OFFSETS, _LENGTHS)
    first, second = (place, place + 4 * parts) if parts > 1 else (start, len(data))
    entries += [(offsets, _LONG, parts, first), (lengths, _LONG, parts, second)]
    entries += [(_FIRST_UNKNOWN + number, _UNDEFINED, max(5, len(data)), start) for number in range(shared)]
    entries.sort(key=lambda entry: entry[0])
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    following = struct.pack("<I", 8 if values["loop"] else 0)  # the next image, or this one again
    lists: bytes = struct.pack("<I", start) * parts + struct.pack("<I", len(data)) * parts
    return b"II*\0" + struct.pack("<I", 8) + directory + following + lists + data
