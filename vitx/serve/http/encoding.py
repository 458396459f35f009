"""Content-Encoding of requests and replies: gzip and deflate, as in Triton, with a limit on the decompressed size."""

import asyncio
import zlib

from vitx.serve.errors import RequestError, too_large

# zlib's `wbits` for a gzip header and for a zlib header.
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
MOST_GROWTH = 1032  # times, of what deflate makes smallest
WORTH_ENCODING = 1400  # bytes: a reply that fits into one network packet gains nothing from compression
_LEVEL = 1  # logits hardly compress, so the fastest level


async def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises RequestError: 415 for an unknown encoding, 400 for a broken body, 413 for more than `limit` bytes.
    """
    if encoding not in _WINDOW:
        raise RequestError(
            f"Content-Encoding '{encoding[:80]}' is not offered: expected gzip, deflate or identity",
            status=415,
            reason="unsupported_media",
        )
    return await asyncio.to_thread(_inflate, body, encoding, limit)


async def encoded(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """Compress by what an Accept-Encoding header names; return the body and its Content-Encoding, None if unchanged."""
    for encoding in _WINDOW:
        if _accepts(accepted, encoding):
            return await asyncio.to_thread(_deflate, body, encoding), encoding
    return body, None


def _inflate(body: bytes, encoding: str, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=_WINDOW[encoding])
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from None
    if len(plain) > limit:
        raise too_large(f"request body of more than {limit} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise RequestError(f"the body is not exactly one {encoding} stream: is it truncated?")
    return plain


def _deflate(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, wbits=_WINDOW[encoding])
    return stream.compress(body) + stream.flush()


def _accepts(accepted: str, encoding: str) -> bool:
    """Whether an Accept-Encoding header names this encoding with a quality above 0."""
    for entry in accepted.lower().split(","):
        name, _, quality = entry.partition(";")
        if name.strip() == encoding:
            return quality.strip().removeprefix("q=").rstrip("0") not in ("", "0.") or not quality
    return False
