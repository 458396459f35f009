"""Pixels that a request brings as JSON, read without building Python objects, a piece at a time.

`json.loads` holds the interpreter for as long as it parses, 0.1 s and more for a few megabytes, and nested lists of
nothing cost a hundred times their text. So the array is cut out of a large body unparsed; only what stands around it
is parsed. Once that has told the shape, the array is compared with what the shape can need, and read in pieces.
"""

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vitx.core.preprocess import UInt8Array
from vitx.serve.errors import RequestError, too_large

# JSON of up to this many bytes is parsed as it is; of a larger body, as much around the array.
SMALL_BYTES = 16 * 2**10
# Text of one number: three digits, a comma, and white space. Brackets come on top, one pair for each row of pixels.
_BYTES_OF_A_NUMBER = 16
_PIECE_BYTES = 64 * 2**10
_SPACE = b" \t\r\n"
_DIGITS = b"0123456789"
_DATA = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
_LAST_SPACE, _COMMA, _ZERO, _NINE, _OPEN, _CLOSE = b" ,09[]"


def cut_out_data(body: bytes) -> tuple[bytes, memoryview]:
    """Return the JSON with null in place of the array "data", and the array's text, empty if there is none.

    Raises RequestError 413 if more than `SMALL_BYTES` would be left to parse.
    """
    found = _DATA.search(body, 0, SMALL_BYTES)
    start = stop = 0
    if found is not None:
        start = found.end()
        # The array of pixels has neither quotes nor braces, and its object goes on with one of them.
        ends = [end for end in (body.find(b'"', start), body.find(b"}", start)) if end >= 0]
        stop = max(start, body.rfind(b"]", start, min(ends, default=len(body))) + 1)
    if (left := len(body) - (stop - start)) > SMALL_BYTES:  # before anything is copied
        raise too_large(f"{left} bytes of JSON besides the pixels: at most {SMALL_BYTES}")
    data = memoryview(body)[start:stop]  # it may be 60 MiB, and be refused for that
    return (body[:start] + b"null" + body[stop:] if data else body), data


def pixels_of(given: bytes | memoryview, shape: Sequence[int], name: str) -> UInt8Array:
    """Return the array of integers from 0 to 255 that `given` is, flat or nested as `shape`.

    Raises RequestError 400 for anything else; `name` is the input's.
    """
    count = math.prod(shape)
    wrong = RequestError(
        f"the data of input '{name}' is not {count} integers from 0 to 255, flat or nested as {list(shape)}"
    )
    if len(given) > _BYTES_OF_A_NUMBER * (count + 1):
        raise wrong
    text = bytes(given)
    values, brackets, read = np.empty(count, np.uint8), bytearray(), 0
    for piece in _pieces(text):
        brackets += piece.translate(None, _DIGITS + _SPACE)
        numbers = _numbers(piece)
        if numbers is None or read + len(numbers) > count or (len(numbers) and numbers.max() > 255):
            raise wrong
        values[read : read + len(numbers)] = numbers
        read += len(numbers)
    if read < count or brackets not in (_brackets([count]), _brackets(shape)):
        raise wrong
    return values.reshape(shape)


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces that end with a comma, but for the last."""
    start = 0
    while start < len(text):
        comma = text.find(b",", start + _PIECE_BYTES)
        stop = comma + 1 or len(text)
        yield text[start:stop]
        start = stop


def _numbers(piece: bytes) -> npt.NDArray[np.uint16] | None:
    """The numbers of a piece; None if they are none. What else is in it its brackets tell."""
    text = np.frombuffer(piece.removesuffix(b",") + b",", np.uint8)
    places = np.flatnonzero(text > _LAST_SPACE)  # of all but white space
    text = text[places]
    digit, bracket = (text >= _ZERO) & (text <= _NINE), text > _NINE
    # A number goes on without a space, and has brackets outside of it alone.
    after = digit[1:] & digit[:-1] & (np.diff(places) > 1)
    opened, closed = digit[:-1] & (text[1:] == _OPEN), digit[1:] & (text[:-1] == _CLOSE)
    if after.any() or opened.any() or closed.any():
        return None
    text = text[~bracket]
    ends = np.flatnonzero(text == _COMMA)
    lengths = np.diff(ends, prepend=-1) - 1
    if lengths.min() < 1 or lengths.max() > 3:
        return None
    digits = text.astype(np.uint16) - _ZERO
    numbers = digits[ends - 1]
    for power in (1, 2):
        longer = lengths > power
        more = digits[ends[longer] - 1 - power]
        if (more[lengths[longer] == power + 1] == 0).any():  # a leading zero
            return None
        numbers[longer] += more * 10**power
    return numbers


def _brackets(shape: Sequence[int]) -> bytes:
    """The brackets and commas of a nested array of this shape."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text
