"""Content-Encoding of requests and replies: gzip and deflate, as in Triton, with a limit on the decompressed size."""

import asyncio
import zlib
from collections.abc import Callable

from vitx.serve.errors import RequestError, too_large

# zlib's `wbits` for a gzip header and for a zlib header.
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_MOST_GROWTH = 1032  # times, of what deflate makes smallest
_PIECE = 2**20  # bytes that a body is inflated to at once: counted before, so that what is not counted cannot grow
WORTH_ENCODING = 1400  # bytes: a reply that fits into one network packet gains nothing from compression
_LEVEL = 1  # logits hardly compress, so the fastest level


async def decoded(body: bytes, encoding: str, limit: int, reserve: Callable[[int], object]) -> bytes:
    """Return the decompressed body; `reserve` is called with the bytes of each piece before it is inflated.

    Raises RequestError: 415 for an unknown encoding, 400 for a broken body, 413 for more than `limit` bytes, and what
    `reserve` does.
    """
    if encoding not in _WINDOW:
        raise RequestError(
            f"Content-Encoding '{encoding[:80]}' is not offered: expected gzip, deflate or identity",
            status=415,
            reason="unsupported_media",
        )
    stream = zlib.decompressobj(wbits=_WINDOW[encoding])
    pieces: list[bytes] = []
    left, room = body, limit + 1
    while room and not stream.eof:
        size = min(_PIECE, room)
        reserve(min(size, _MOST_GROWTH * len(left)))
        try:
            piece = await asyncio.to_thread(stream.decompress, left, size)
        except zlib.error as error:
            raise RequestError(f"the body is not valid {encoding}: {error}") from None
        pieces.append(piece)
        left, room = stream.unconsumed_tail, room - len(piece)
        if len(piece) < size and not left:
            break
    if not room:
        raise too_large(f"request body of more than {limit} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise RequestError(f"the body is not exactly one {encoding} stream: is it truncated?")
    return await asyncio.to_thread(b"".join, pieces)


def deflated(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, wbits=_WINDOW[encoding])
    return stream.compress(body) + stream.flush()


def accepted_encoding(accepted: str) -> str | None:
    """The first of our encodings that an Accept-Encoding header names with a quality above 0."""
    entries = [entry.partition(";") for entry in reversed(accepted.lower().split(","))]
    qualities = {name.strip(): quality.strip().removeprefix("q=") or "1" for name, _, quality in entries}
    return next((name for name in _WINDOW if qualities.get(name, "0").rstrip("0") not in ("", "0.")), None)
