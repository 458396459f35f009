"""Pixels in JSON, read as text: what json.loads and numpy find, for every text, and no more than a shape can need."""

import json
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from vitx.serve.errors import RequestError
from vitx.serve.protocol import json_pixels
from vitx.serve.protocol.json_pixels import CUT_OUT, SMALL_BYTES, cut_out_data, pixels_of

SHAPE = (2, 2, 1, 3)


def whole(text: str) -> float:
    """7 of "7.0": a number with a point is one of pixels if nothing but noughts stands behind it."""
    number, _, behind = text.partition(".")
    return int(number) if behind and not behind.strip("0") else float(text)


def expected(text: bytes) -> Any:
    """The pixels by json.loads; None where they are not integers from 0 to 255 of this shape."""
    try:
        value = json.loads(text, parse_float=whole)
        array = np.array(value, dtype=object)
    except ValueError:
        return None
    if not isinstance(value, list) or array.shape not in (SHAPE, (12,)):
        return None
    if not all(type(number) is int and 0 <= number <= 255 for number in array.flat):
        return None
    return array.astype(np.uint8).reshape(SHAPE)


def read(text: bytes) -> Any:
    try:
        return pixels_of(text, SHAPE, "images")
    except RequestError:
        return None


def texts() -> list[bytes]:
    """Arrays flat and nested, written in several ways, and each with one to three bytes changed, added or removed."""
    generator = random.Random(0)
    numbers = np.array([0, 7, 10, 99, 100, 255, 256, 1, 2, 3, 4, 5])
    found = []
    for values in (np.minimum(numbers, 255), numbers):
        for value in (values.tolist(), values.reshape(SHAPE).tolist(), values.reshape(4, 3).tolist()):
            found += [json.dumps(value, separators=pair, indent=indent).encode() for pair, indent in FORMS]
        found.append(json.dumps(values.astype(float).reshape(SHAPE).tolist()).encode())  # 7.0, as some clients write
    for text in list(found):
        for _ in range(100):
            changed = bytearray(text)
            for _ in range(generator.randint(1, 3)):
                place = generator.randrange(len(changed))
                byte = generator.choice(b'0159,[] \n-.e"t')
                match generator.randrange(3):
                    case 0:
                        changed[place] = byte
                    case 1:
                        changed.insert(place, byte)
                    case _:
                        del changed[place]
            found.append(bytes(changed))
    return found


FORMS: list[tuple[tuple[str, str], int | None]] = [((",", ":"), None), ((", ", ": "), None), ((" ,\t", ": "), 1)]


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_a_text_is_read_as_json_loads_reads_it(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(json_pixels, "_PIECE_BYTES", piece)
    found = 0
    for text in texts():
        wanted, got = expected(text), read(text)
        if wanted is None:
            assert got is None, text
        elif got is None:  # -0, which JSON has and no writer of integers writes
            assert b"-0" in text, text
        else:
            assert np.array_equal(got, wanted), text
            assert got.dtype == np.uint8
            found += 1
    assert found > 90


def test_a_bracket_on_the_wrong_side_of_a_number_is_refused() -> None:
    """The brackets and the numbers are those of the shape, each by itself."""
    text = json.dumps(np.arange(12).reshape(SHAPE).tolist())
    assert read(text.encode()) is not None
    for right, changed in (("[3", "3["), ("[3", "3 ["), ("5]", "]5"), ("5]", "] 5")):
        wrong = text.replace(right, changed)
        assert read(wrong.encode()) is None, wrong


def test_no_more_text_than_the_shape_can_need_is_read() -> None:
    shape, flat = (2048,), b"[" + b",".join([b"1"] * 2048) + b"]"
    room = b" " * (16 * 2049 - len(flat))
    assert pixels_of(flat + room, shape, "images").tolist() == [1] * 2048
    message = r"in UTF-8\) is not 2048 integers from 0 to 255, flat or nested as \[2048\]$"
    with pytest.raises(RequestError, match=message):
        pixels_of(flat + room + b" ", shape, "images")


@pytest.mark.parametrize("nested", [False, True])
def test_reading_takes_a_few_times_the_memory_of_the_text(nested: bool) -> None:
    """It took 45 times: the brackets of a flat array of 33 million were joined, and the server stood for 8 s."""
    shape = (4, 224, 224, 3)
    values = np.full(shape, 7, np.uint8)
    text = json.dumps((values if nested else values.ravel()).tolist(), separators=(",", ":")).encode()
    tracemalloc.start()
    try:
        assert np.array_equal(pixels_of(text, shape, "images"), values)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text) + 2**22
    finally:
        tracemalloc.stop()


def body(data: bytes, rest: str = '"datatype": "UINT8"') -> bytes:
    return b'{"inputs": [{"name": "images", "data" : ' + data + b", " + rest.encode() + b"}]}"


def test_the_array_is_cut_out() -> None:
    for data in (b"[1,2]", b"[[1, 2],\n[3]]", b"[" * 40_000 + b"]" * 40_000):
        rest, found = cut_out_data(body(data))
        assert found == data
        assert json.loads(rest) == {"inputs": [{"name": "images", "data": CUT_OUT, "datatype": "UINT8"}]}
    last = b'{"inputs": [{"shape": [2], "data": [1, 2] } ] }'
    rest, found = cut_out_data(last)
    assert json.loads(rest) == {"inputs": [{"shape": [2], "data": CUT_OUT}]}
    assert bytes(found) == b"[1, 2]"
    for without in (b'{"inputs": []}', b'{"data": 5}', b'{"data": [1', b'{"data"', b""):
        rest, found = cut_out_data(without)
        assert (rest, bytes(found)) == (without, b"")


@pytest.mark.parametrize(
    "large",
    [
        b'{"inputs": [' + b"[]," * SMALL_BYTES + b"[]]}",
        body(b"[1]", '"id": "' + "x" * SMALL_BYTES + '"'),
        b" " * SMALL_BYTES + body(b"[1]"),
        body(b'["' + b"x" * SMALL_BYTES + b'"]'),
        body(b"[" + b"{}," * SMALL_BYTES + b"{}]"),
    ],
)
def test_what_else_is_large_is_not_parsed(large: bytes) -> None:
    with pytest.raises(RequestError, match=rf"bytes of JSON besides the pixels: at most {SMALL_BYTES}") as caught:
        cut_out_data(large)
    assert caught.value.status == 413
