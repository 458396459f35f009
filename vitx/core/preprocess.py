"""The one preprocessing: decode → EXIF rotation → RGB → resize → centre crop → uint8 NHWC.

Training's evaluation, parity, the server and offline prediction all call it, so they cannot differ. Normalisation is
not here: it lives inside the exported graph.
"""

import ctypes
import io
import logging
import math
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError, _imaging
from PIL.TiffImagePlugin import (
    COMPRESSION,
    IMAGELENGTH,
    IMAGEWIDTH,
    PHOTOMETRIC_INTERPRETATION,
    ROWSPERSTRIP,
    SAMPLEFORMAT,
    TILELENGTH,
    TILEWIDTH,
    TiffImageFile,
)
from pydantic import Field

from vitx.core.errors import TOO_MANY_FILES, InputError
from vitx.core.files import Record

UInt8Array = npt.NDArray[np.uint8]
Triple = tuple[float, float, float]

# Mean and standard deviation of a pixel by channel, on the scale 0 to 1: ImageNet's, and ½, which maps 0 … 1 to −1 … 1.
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
HALF: Triple = (0.5, 0.5, 0.5)

# Above this many pixels an image is refused before it is decoded (a decompression bomb fits in a small file).
MAX_PIXELS = 100_000_000
# And above this side of the resized image: for a million columns Pillow's table takes a third of a second, during which
# no other thread runs.
MAX_SIDE = 65_536

# Not every format Pillow reads: EPS runs a program, an ICO holds images of other sizes than its header says.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_JPEG_IN_TIFF, _YCBCR = (6, 7), 6  # compression, the old one too; and photometric interpretation
_PARTS = {COMPRESSION, PHOTOMETRIC_INTERPRETATION, ROWSPERSTRIP, TILELENGTH, TILEWIDTH}
# Pillow loops in Python over what stands before the pixels, and copies the EXIF of a JPEG anew for each piece: 64 MiB
# in the least ones took more than 20 s. A JPEG has four reads a segment, and 255 segments of 64 KiB with the longest
# colour profile.
_HEADER_READS, _HEADER_BYTES = 4096, 2**24 + 2**20
_READS = 200_000  # of the pixels: a PNG of 64 MiB has 25,000 as libpng writes it
_XMP_BYTES = 2**20
_ROWS = 256  # of 16-bit grey at once
# Pillow's decoders raise whatever their format makes them trip over; all of it means a damaged file.
_DAMAGE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, AttributeError, AssertionError),
    *(LookupError, ArithmeticError, RecursionError, struct.error, zlib.error),
)
# A draft keeps at least so many times the pixels a side needs; with 1 its pixels would differ five times as much.
DRAFT_MARGIN = 2
# Above 1 the image is resized to less than the square and padded: timm's VOLO networks are evaluated at 1.15.
MAX_CROP_FRACTION = 2

Mean = Annotated[float, Field(ge=-255, le=255)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ImageError(InputError):
    """An image that cannot be read; the message says why."""


class TooManyPixels(ImageError):
    """An image whose header says more pixels than allowed; it is not decoded."""

    def __init__(self, width: int, height: int, allowed: int) -> None:
        super().__init__(f"image of {width}×{height} pixels: more than the {allowed:,} allowed")
        self.width, self.height, self.allowed = width, height, allowed

    def __reduce__(self) -> tuple[type["TooManyPixels"], tuple[int, int, int]]:
        """How it is pickled: an exception's own way would call the constructor with the text."""
        return type(self), (self.width, self.height, self.allowed)

    @property
    def pixels(self) -> int:
        return self.width * self.height


class Preprocessing(Record):
    """How an image becomes the model's input.

    The image is resized to s = ⌊image_size / crop_fraction⌋ pixels, antialiased, and the centre square is cut out. The
    crop modes are timm's: `center` resizes the shorter side to s, `squash` both sides, `border` the longer side.
    Where the resized image is smaller than the square it is padded: with black, in `border` mode with `mean`.
    `mean` and `std` are on the scale 0 to 1 and are applied by the model, not by `apply`.
    """

    image_size: Annotated[int, Field(gt=0, description="side of the square that the network sees, in pixels")]
    crop_fraction: Annotated[
        float,
        Field(ge=0.01, le=MAX_CROP_FRACTION, description="side of that square, as a share of the resized image's"),
    ] = 1.0
    # Not written where it is "center": readers of bundles refuse a field that they do not know, as here they should.
    crop_mode: Annotated[
        Literal["center", "squash", "border"],
        Field(exclude_if=lambda mode: mode == "center", description="which sides are resized: shorter, both, longer"),
    ] = "center"
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = Field(
        default="bicubic", description="of the resizing, antialiased"
    )
    mean: tuple[Mean, Mean, Mean] = Field(default=HALF, description="of the channels, on the scale 0 to 1: subtracted")
    std: tuple[Positive, Positive, Positive] = Field(default=HALF, description="of the channels: divided by")

    @property
    def scaled_side(self) -> int:
        """Pixels of the side, or sides, that `crop_mode` names, before the crop."""
        return math.floor(self.image_size / self.crop_fraction)

    def apply(self, image: Image.Image, *, draft: bool = False) -> UInt8Array:
        """Return uint8 (image_size, image_size, 3) from an RGB image.

        draft: resize the crop alone, a third less work. Pillow then holds the crop's bounds in float32 and may resize
        columns before rows, so some pixels differ by a few grey levels.
        """
        self.check_size(*image.size)
        width, height = image.size
        scaled = self._scaled(width, height)
        size, resampling = self.image_size, Image.Resampling[self.interpolation.upper()]
        padded = min(scaled) < size
        left = round((scaled[0] - size) / 2)
        top = round((scaled[1] - size) / 2)
        if draft and not padded:
            across, down = width / scaled[0], height / scaled[1]
            box = (left * across, top * down, min(width, (left + size) * across), min(height, (top + size) * down))
            return np.asarray(image.resize((size, size), resampling, box=box))
        if scaled != image.size:
            image = image.resize(scaled, resampling)
        if padded:
            return self._padded(image)
        return np.asarray(image.crop((left, top, left + size, top + size)))

    def check_size(self, width: int, height: int) -> None:
        """Raise ImageError for an image that would be resized to too many pixels, or too long a side."""
        scaled = self._scaled(width, height)
        if scaled[0] * scaled[1] > MAX_PIXELS or max(scaled) > MAX_SIDE:  # 1×500,000, say: both sides are enlarged
            raise ImageError(
                f"image of {width}×{height} pixels: too thin to be resized to {self.scaled_side} on its short side"
            )

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height before the crop, rounded as torchvision's Resize and timm's ResizeKeepRatio round them."""
        side = self.scaled_side
        if self.crop_mode == "squash":
            return side, side
        if self.crop_mode == "border":
            ratio = max(width / side, height / side)
            return max(1, round(width / ratio)), max(1, round(height / ratio))
        if width > height:
            return max(side, int(side * width / height)), side
        return side, max(side, int(side * height / width))

    def _padded(self, image: Image.Image) -> UInt8Array:
        """The centre square of an image with a side that is shorter, the odd pixel of the border right and below."""
        size = self.image_size
        fill = tuple(round(255 * level) for level in self.mean) if self.crop_mode == "border" else (0, 0, 0)
        left, top = ((size - side) // 2 if side < size else -round((side - size) / 2) for side in image.size)
        square = Image.new("RGB", (size, size), fill)
        square.paste(image, (left, top))
        return np.asarray(square)

    def from_bytes(self, data: bytes, *, draft: bool = False) -> UInt8Array:
        """Decode and apply; raise ImageError with the reason when the bytes are no whole image.

        draft: faster, with slightly different pixels: a large JPEG is decoded at a fraction of its size, and the crop
        alone is resized.
        """
        shorter_side = DRAFT_MARGIN * self.scaled_side if draft else None
        return self.apply(decode(data, shorter_side=shorter_side, check_size=self.check_size), draft=draft)


def ignore_image_warnings() -> None:
    """Drop what Pillow says about images in this process, but for its exceptions: called where a process starts.

    It would be a line, and an entry that is never freed, for every text that somebody makes up, such as a size beyond
    Pillow's limit (MAX_PIXELS decides here) or the tags of a TIFF. A filter around each call of Pillow is no way out:
    `warnings.catch_warnings` is not safe in threads, and lets every other warning of the process appear again.
    libtiff writes to stderr itself: a line for each row of a damaged fax, 125 MB for a file of 60 KB.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    with suppress(AttributeError, OSError):  # a Pillow without libtiff, or that hides it
        libraries = ctypes.CDLL(_imaging.__file__)
        for set_handler in (libraries.TIFFSetErrorHandler, libraries.TIFFSetWarningHandler):
            set_handler(None)


def decode(
    source: bytes | Path,
    *,
    max_pixels: int = MAX_PIXELS,
    shorter_side: int | None = None,
    check_size: Callable[[int, int], object] | None = None,
) -> Image.Image:
    """Return an upright RGB image.

    check_size: called with width and height before anything is decoded.
    shorter_side: a JPEG is decoded at 1/8, 1/4 or 1/2 of its size if its shorter side then still has so many pixels,
    and only where that divides both sides: else libjpeg pads the last row and column, and all pixels move.
    Raises ImageError when the source is not an image, is truncated, or has more than `max_pixels` pixels, OSError when
    too many files are open.
    """
    try:
        file = _Reads(source.read_bytes() if isinstance(source, Path) else source)
        with Image.open(file, formats=_FORMATS) as image:
            file.reads, file.size = _READS, math.inf
            width, height = _decoded_size(image) if isinstance(image, TiffImageFile) else image.size
            if width * height > max_pixels:
                raise TooManyPixels(width, height, max_pixels)
            if check_size is not None:
                check_size(*image.size)
            if image.mode == "F":  # convert("RGB") takes 255 for white, and most programs 1: all would be black
                raise ImageError("the pixels are floats, of which none is known to be white: save it with 8 or 16 bits")
            if shorter_side is not None:
                _decode_smaller(image, shorter_side)
            for name in ("xmp", "XML:com.adobe.xmp"):  # looked through for the orientation, while no other thread runs
                if len(image.info.get(name, "")) > _XMP_BYTES:
                    del image.info[name]
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # not in place it copies upright images too
            return _to_rgb(image)
    except ImageError:
        raise
    except UnidentifiedImageError:
        if source == b"":
            raise ImageError("not an image: empty") from None
        raise ImageError("not an image in a format that can be read (JPEG, PNG, WebP, BMP, GIF, TIFF)") from None
    except Image.DecompressionBombError as error:  # raised by Image.open, before the size can be asked for
        if max_pixels <= 2 * (Image.MAX_IMAGE_PIXELS or 0):
            raise ImageError(f"image of more pixels than the {max_pixels:,} allowed") from None
        raise ImageError(f"{error} That is PIL.Image.MAX_IMAGE_PIXELS: set it to None") from None
    except _DAMAGE as error:
        if getattr(error, "errno", None) in TOO_MANY_FILES:  # no fault of the image: Pillow imports what it first needs
            raise
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise ImageError(f"cannot open the image: {error.strerror}") from None
        raise ImageError(f"cannot decode the image: {error}") from None


class _Reads(io.BytesIO):
    """The bytes of an image in `reads` reads at most, of `size` bytes in all without those of more than a MiB."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        # A GIF has XMP in pieces of 255 bytes. A TIFF's tags may have a whole layered drawing, and are copied once.
        self.reads = 16 * _HEADER_READS if data.startswith(b"GIF8") else _HEADER_READS
        self.size = math.inf if data.startswith((b"II", b"MM")) else _HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.reads -= 1
        self.size -= len(data) if len(data) <= 2**20 else 0
        if self.reads < 0 or self.size < 0:
            raise ImageError("cannot decode the image: it is in too many pieces")
        return data


def _decoded_size(image: TiffImageFile) -> tuple[int, int]:
    """Width and height of all that libtiff decodes: whole tiles, each in memory at once, also for one pixel of it; of
    JPEG whole blocks, 8 rows for each strip of one.

    Of two entries of a tag libtiff takes the first, Pillow the first of a type that it knows: they are refused.
    """
    assert image.fp is not None
    image.fp.seek(0)
    order, version = ("<" if image.fp.read(2) == b"II" else ">"), image.fp.read(2)
    count, entry = ("Q", 20) if b"+" in version else ("H", 12)  # BigTIFF
    image.fp.seek(image.tag_v2.offset)
    (entries,) = struct.unpack(order + count, image.fp.read(struct.calcsize(order + count)))
    directory = image.fp.read(min(entries, 65_535) * entry)  # libtiff takes no more
    kind = np.dtype({"names": ["tag"], "formats": [f"{order}u2"], "itemsize": entry})
    tags = np.frombuffer(directory, kind, len(directory) // entry)["tag"]
    found = [tag for tag in tags.tolist() if tag in _PARTS]
    value, (width, height) = image.tag_v2.get, (image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH])
    tiled, jpeg = {TILEWIDTH, TILELENGTH} & {*found}, value(COMPRESSION) in _JPEG_IN_TIFF
    twice = len(found) != len({*found})
    if not (tiled or jpeg or twice):
        return image.size
    rows = value(ROWSPERSTRIP) if ROWSPERSTRIP in found else height
    across, down = (value(TILEWIDTH), value(TILELENGTH)) if tiled else (width, rows)
    if twice or not (isinstance(across, int) and isinstance(down, int) and across > 0 and down > 0):
        raise ImageError("cannot decode the image: the size of its tiles or strips is not clear")
    if not tiled and down >= height:
        return image.size
    # libtiff takes how YCbCr is subsampled from the JPEG itself, mostly 2 × 2.
    block = 1 if not jpeg else 16 if value(PHOTOMETRIC_INTERPRETATION) == _YCBCR else 8
    whole = [-(-side // part) * -(-part // block) * block for side, part in ((width, across), (height, down))]
    return whole[0], whole[1]


def _decode_smaller(image: Image.Image, shorter_side: int) -> None:
    """Have a JPEG decoded at the smallest fraction that `decode` allows; other formats ignore `draft`."""
    width, height = image.size
    for scale in (8, 4, 2):
        if width % scale == height % scale == 0 and min(width, height) // scale >= shorter_side:
            image.draft(None, (width // scale, height // scale))
            return


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: keep the high byte, where convert("RGB") would clip to white
        image = _high_bytes(image, signed=getattr(image, "tag_v2", {}).get(SAMPLEFORMAT) == (2,))
    return image if image.mode == "RGB" else image.convert("RGB")


def _high_bytes(image: Image.Image, *, signed: bool) -> Image.Image:
    """Rows by rows: all at once, a large image would be in memory four times. What is below 0 is black."""
    grey = Image.new("L", image.size)
    for top in range(0, image.height, _ROWS):
        box = (0, top, image.width, min(top + _ROWS, image.height))
        values = np.asarray(image.crop(box))
        if values.dtype == np.int32:  # Pillow has unsigned ones in it too
            values = np.maximum(values, 0) if signed else values.view(np.uint32)
        high = values >> 8
        grey.paste(Image.fromarray(np.minimum(high, 255, out=high).astype(np.uint8)), box)
    return grey
