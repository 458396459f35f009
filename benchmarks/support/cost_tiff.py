"""TIFFs as no program writes them: parts that share their bytes, sizes that disagree, tags by the thousand."""

import functools
import io
import random
import struct
from collections.abc import Mapping
from typing import Any

from PIL import Image
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    COMPRESSION,
    COMPRESSION_INFO_REV,
    IMAGELENGTH,
    IMAGEWIDTH,
    PHOTOMETRIC_INTERPRETATION,
    PLANAR_CONFIGURATION,
    ROWSPERSTRIP,
    SAMPLESPERPIXEL,
    STRIPBYTECOUNTS,
    STRIPOFFSETS,
    TILEBYTECOUNTS,
    TILELENGTH,
    TILEOFFSETS,
    TILEWIDTH,
    TiffImageFile,
)

_MOST_BYTES, _MOST_PIXELS = 900_000, 2**24  # of the file, and of one part
_FIRST_UNKNOWN = 40_000  # of the tags, numbers that nobody uses
_LONG, _UNDEFINED = 4, 7  # types of an entry
# Of a mode: bits and photometric interpretation, unless other ones are given.
_YCBCR = 6
_AS_MODE = {"1": (1, 1), "L": (8, 1), "RGB": (8, 2)}
# Compressions have Pillow's names.
CHOICES: dict[str, tuple[Any, ...]] = {
    "width": (16, 1, 60, 112, 300, 1_000, 7_000, 65_000),
    "height": (16, 1, 300, 1_000, 7_000, 16_383, 65_000, 110_000),
    "pixels": (10**4, 10**6, 10**6, 4 * 10**6, 20 * 10**6, 49 * 10**6, 51 * 10**6),
    "tile": (0, 0, 1, 16, 24, 256, 1_000, 7_000, 32_768),
    "rows": (0, 1, 1, 7, 8, 16, 100, 2**31),
    "compression": (
        *("raw", "tiff_ccitt", "group3", "group4", "tiff_lzw", "tiff_jpeg", "jpeg"),
        *("tiff_adobe_deflate", "packbits", "lzma", "zstd", "webp"),
    ),
    "mode": ("L", "RGB", "1"),
    "bits": (0, 0, 0, 0, 0, 0, 1, 4, 16, 32),  # 0: of the mode
    "photometric": (None, None, None, None, None, None, 0, 3, 5, 6, 8),
    "planar": (1, 1, 1, 1, 2),
    "scans": (1, 1, 12, 90, 101, 1_000),
    "noise": (0, 0, 0, 0, 0, 100, 100_000),
    "tags": (0, 0, 100, 5_000, 20_000),
    "again": (0, 0, 0, 0, 0, 0, 16, 32_768),
    "loop": (False, False, True),
}
SMALLEST = {name: choices[0] for name, choices in CHOICES.items()}


def last_scan_again(jpeg: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more: scans refine the first, as often as they come."""
    scans = jpeg.split(b"\xff\xda")
    return b"\xff\xda".join(scans[:-1] + [scans[-1].removesuffix(b"\xff\xd9")] * (1 + times)) + b"\xff\xd9"


@functools.lru_cache(64)
def _part(kind: str, mode: str, width: int, height: int, scans: int) -> bytes:
    """One strip or tile of this size, or its beginning. Zeros where Pillow does not write it: a fax has mode "1"."""
    jpeg, buffer = kind in ("jpeg", "tiff_jpeg"), io.BytesIO()
    try:
        how: dict[str, Any] = {"progressive": True} if jpeg else {"compression": kind, "strip_size": 2**30}
        Image.new(mode, (width, height)).save(buffer, "JPEG" if jpeg else "TIFF", **how)
    except (OSError, ValueError):
        return bytes(min(width * height, _MOST_BYTES))
    data = buffer.getvalue()
    if jpeg:
        return last_scan_again(data, max(0, min(scans - data.count(b"\xff\xda"), _MOST_BYTES // len(data))))
    buffer.seek(0)
    with TiffImageFile(buffer) as image:
        (place,), (size,) = image.tag_v2[STRIPOFFSETS], image.tag_v2[STRIPBYTECOUNTS]
    return data[place : place + min(size, _MOST_BYTES)]


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
        IMAGEWIDTH: width,
        IMAGELENGTH: height,
        BITSPERSAMPLE: values["bits"] or bits,
        COMPRESSION: COMPRESSION_INFO_REV[values["compression"]],
        PHOTOMETRIC_INTERPRETATION: photometric if values["photometric"] is None else values["photometric"],
        SAMPLESPERPIXEL: samples,
        PLANAR_CONFIGURATION: values["planar"],
        **({TILEWIDTH: tile, TILELENGTH: tile} if tile else {ROWSPERSTRIP: values["rows"] or 2**32 - 1}),
    }
    entries = [(tag, _LONG, 1, value % 2**32) for tag, value in tags.items()]
    entries += [(*entries[-1][:3], values["again"] % 2**32)] * bool(values["again"])
    shared = min(values["tags"], 20_000)
    place = 8 + 2 + 12 * (len(entries) + 2 + shared) + 4
    start = place + 8 * parts
    if start + len(data) > _MOST_BYTES:
        raise OverflowError
    offsets, lengths = (TILEOFFSETS, TILEBYTECOUNTS) if tile else (STRIPOFFSETS, STRIPBYTECOUNTS)
    first, second = (place, place + 4 * parts) if parts > 1 else (start, len(data))
    entries += [(offsets, _LONG, parts, first), (lengths, _LONG, parts, second)]
    entries += [(_FIRST_UNKNOWN + number, _UNDEFINED, max(5, len(data)), start) for number in range(shared)]
    entries.sort(key=lambda entry: entry[0])
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    following = struct.pack("<I", 8 if values["loop"] else 0)  # the next image, or this one again
    lists: bytes = struct.pack("<I", start) * parts + struct.pack("<I", len(data)) * parts
    return b"II*\0" + struct.pack("<I", 8) + directory + following + lists + data
