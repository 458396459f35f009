"""Compressed bodies of all sizes around a piece, what is counted for them, and bodies that are no stream."""

import asyncio
import gzip
import random
import zlib
from typing import Any

import pytest

from vitx.serve.errors import RequestError
from vitx.serve.protocol import inflate
from vitx.serve.protocol.inflate import inflated

PIECE = 100


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each call of the library is given; a piece is small."""
    sizes: list[int] = []

    class Stream:
        def __init__(self, wbits: int) -> None:
            self._stream = make(wbits=wbits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            sizes.append(len(data))
            return self._stream.decompress(data, most)

    make = zlib.decompressobj
    monkeypatch.setattr(inflate, "_PIECE", PIECE)
    monkeypatch.setattr(zlib, "decompressobj", Stream)
    return sizes


def inflate_all(body: bytes, encoding: str = "gzip", limit: int = 10_000) -> tuple[bytes, int]:
    """What it becomes, and the bytes that were counted."""
    counted: list[int] = []
    return asyncio.run(inflated(body, encoding, limit, counted.append)), sum(counted)


def refusal(body: bytes, encoding: str = "gzip", limit: int = 10_000) -> tuple[int, str]:
    with pytest.raises(RequestError) as error:
        inflate_all(body, encoding, limit)
    return error.value.status, str(error.value)


@pytest.mark.parametrize("alphabet", [1, 2, 16, 256])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 7777])
def test_a_body_is_what_it_was(given: list[int], alphabet: int, size: int) -> None:
    data = bytes(random.Random(size).choices(range(alphabet), k=size))
    for encoding, body in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data))):
        found, counted = inflate_all(body, encoding, limit=size)
        assert found == data
        assert size <= counted <= size + PIECE
        if size:
            text = f"request body of more than {size - 1} bytes when decompressed"
            assert refusal(body, encoding, limit=size - 1) == (413, text)


def test_each_byte_is_given_to_the_library_a_few_times_at_most(given: list[int]) -> None:
    """Given all of it at once, 64 MiB were copied 64 times, each for some hundredths of a second without a break."""
    body = gzip.compress(random.Random(0).randbytes(9_000))
    assert len(inflate_all(body)[0]) == 9_000
    assert max(given) <= PIECE
    assert sum(given) <= 2 * len(body)


def test_a_piece_is_a_mebibyte_both_ways(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls: list[int] = []
    body, to_thread = gzip.compress(random.Random(0).randbytes(5 * 2**19)), asyncio.to_thread

    async def counted(work: Any, data: Any, *most: int) -> Any:
        calls.append(len(data))
        return await to_thread(work, data, *most)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    assert len(inflate_all(body, limit=2**22)[0]) == 5 * 2**19
    assert max(calls) == 2**20
    assert len(calls) <= 6 + 1  # and one that joins the pieces


def test_a_body_that_becomes_too_large_is_inflated_no_further(given: list[int]) -> None:
    body = gzip.compress(bytes(10_000))
    assert refusal(body, limit=250) == (413, "request body of more than 250 bytes when decompressed")
    assert len(given) == 3


def test_a_body_is_exactly_one_stream(given: list[int]) -> None:
    body, text = (
        gzip.compress(random.Random(0).randbytes(500)),
        "the body is not exactly one gzip stream: is it truncated?",
    )
    for broken in (b"", body[:5], body[:-1], body + b"x", body + body, body + bytes(5 * PIECE)):
        assert refusal(broken) == (400, text)
    for broken, encoding in (
        (b"no stream", "deflate"),
        (zlib.compress(b"a"), "gzip"),
        (gzip.compress(b"a"), "deflate"),
    ):
        status, text = refusal(broken, encoding)
        assert (status, text.partition(":")[0]) == (400, f"the body is not valid {encoding}")


def test_nothing_is_inflated_that_could_not_be_counted(given: list[int]) -> None:
    def full(size: int) -> None:
        raise RequestError("no room", status=503)

    with pytest.raises(RequestError, match="no room"):
        asyncio.run(inflated(gzip.compress(b"data"), "gzip", 10, full))
    assert given == []
