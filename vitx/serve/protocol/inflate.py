"""Decompresses request bodies and messages on threads, a counted piece at a time."""

import asyncio
import zlib
from collections.abc import Callable

from vitx.serve.errors import RequestError, too_large

# zlib's `wbits` for a gzip header and for a zlib header.
WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_MOST_GROWTH = 1032  # times, of what deflate makes smallest
_PIECE = 2**20  # bytes that a body is inflated to at once: counted before, so that what is not counted cannot grow


async def inflated(body: bytes, encoding: str, limit: int, reserve: Callable[[int], object]) -> bytes:
    """Return the decompressed body; `reserve` is called with the bytes of each piece before it is inflated.

    `encoding`: one of WINDOW. Raises RequestError 400 for a broken body, 413 beyond `limit`, and what `reserve` raises.
    """
    stream = zlib.decompressobj(wbits=WINDOW[encoding])
    pieces, room, left, place = list[bytes](), limit + 1, b"", 0
    spare = 0  # reserved, and not used yet
    while room and not stream.eof and (left or place < len(body)):  # its checksum is behind all that it gives
        if not left:  # given all of the body, each call would copy what it leaves, while no other thread runs
            left, place = body[place : place + _PIECE], place + _PIECE
        size = min(_PIECE, room)
        reserve(more := max(0, min(size, _MOST_GROWTH * len(left)) - spare))
        try:
            piece = await asyncio.to_thread(stream.decompress, left, size)
        except zlib.error as error:
            raise RequestError(f"the body is not valid {encoding}: {error}") from None
        pieces.append(piece)
        left, room, spare = stream.unconsumed_tail, room - len(piece), spare + more - len(piece)
    if not room:
        raise too_large(f"request body of more than {limit} bytes when decompressed")
    if not stream.eof or stream.unused_data or place < len(body):
        raise RequestError(f"the body is not exactly one {encoding} stream: is it truncated?")
    return await asyncio.to_thread(b"".join, pieces)
