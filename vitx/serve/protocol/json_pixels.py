"""Pixels that a request brings as JSON, read a piece at a time.

`json.loads` holds the interpreter for as long as it parses, and nested lists of nothing cost a hundred times their
text. So the array is cut out unparsed; once what stands around it has told the shape, it is read in pieces.
"""

import json
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.serve.errors import RequestError, too_large

# So much JSON is parsed at once, and around the array.
SMALL_BYTES = 16 * 2**10
# Text of one number: three digits, a comma, and white space. Brackets come on top, one pair for each row of pixels.
_BYTES_OF_A_NUMBER = 16
_PIECE_BYTES = 64 * 2**10
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
CUT_OUT = secrets.token_hex()  # stands for the array, and nobody can send it
# To JSON 7.0 is 7, and clients that read pixels as numbers, such as the protocol's own for Python, write it so.
_NOUGHTS = re.compile(rb"\.(?<=[0-9]\.)0++(?=[ \t\r\n,\]]|$)")
_DATA = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')


def cut_out_data(body: bytes) -> tuple[bytes, memoryview]:
    """Return the JSON with `CUT_OUT` in place of the first array "data", and the array's text, empty if there is none.

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
    return (body[:start] + b'"%b"' % CUT_OUT.encode() + body[stop:] if data else body), data


def pixels_of(given: bytes | memoryview, shape: Sequence[int], name: str) -> UInt8Array:
    """Return the array of integers from 0 to 255 that `given` is, flat or nested as `shape`.

    Raises RequestError 400 for anything else; `name` is the input's.
    """
    count = math.prod(shape)
    text = f"the data of input '{name}' (the JSON's first \"data\", in UTF-8) is not {count} integers from 0 to 255"
    wrong = RequestError(f"{text}, flat or nested as {list(shape)}")
    if len(given) > max(SMALL_BYTES, _BYTES_OF_A_NUMBER * (count + 1)):
        raise wrong
    values, brackets = bytearray(), bytearray()
    for piece in _pieces(bytes(given)):
        order = piece.translate(_DIGITS_ALIKE, b" \t\r\n")
        brackets += order.translate(None, b"0")
        # A number has brackets outside of it alone.
        numbers = None if b"0[" in order or b"]0" in order else _numbers(piece)
        if numbers is None or len(values) + len(numbers) > count:
            raise wrong
        values += numbers
    if len(values) < count or brackets != _brackets(shape if brackets.startswith(b"[[") else [count]):
        raise wrong
    return np.frombuffer(values, np.uint8).reshape(shape)


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces that end with a comma, but for the last; whole numbers without the noughts behind a point."""
    start = 0
    while start < len(text):
        stop = text.find(b",", start + _PIECE_BYTES) + 1 or len(text)
        yield _NOUGHTS.sub(b"", text[start:stop])
        start = stop


def _numbers(piece: bytes) -> bytes | None:
    try:
        return bytes(json.loads(b"[%b]" % piece.removesuffix(b",").translate(_WITHOUT_BRACKETS)))
    except (ValueError, TypeError):  # no JSON, or not integers from 0 to 255; not raised on: it refers to the frames
        return None


def _brackets(shape: Sequence[int]) -> bytes:
    """The brackets and commas of an array of this shape; not by `join`, which takes 80 bytes for each of millions."""
    return reduce(lambda text, size: b"[%b%b]" % ((text + b",") * (size - 1), text), reversed(shape), b"")
