"""Content-Encoding of bodies, as Triton offers it: gzip and deflate, both ways, never beyond a limit."""

import asyncio
import zlib

from vitx.serve.errors import RequestError, too_large

# What zlib calls the two: a gzip and a zlib header.
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# A reply below one network packet is not made any sooner by being smaller.
WORTH_ENCODING = 1400
_LEVEL = 1  # logits hardly compress: the fastest level is the best bargain


async def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the body without its Content-Encoding.

    Raises RequestError: 415 for another encoding, 400 for a body that is not of it, 413 beyond `limit` bytes.
    """
    if encoding not in _WINDOW:
        raise RequestError(
            f"Content-Encoding '{encoding[:80]}' is not offered: expected gzip, deflate or identity",
            status=415,
            reason="unsupported_media",
        )
    return await asyncio.to_thread(_inflate, body, encoding, limit)


async def encoded(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """The body and its Content-Encoding, by what an Accept-Encoding header names; None: as it is."""
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
    """Whether an Accept-Encoding names this encoding with a quality above 0."""
    for entry in accepted.lower().split(","):
        name, _, quality = entry.partition(";")
        if name.strip() == encoding:
            return quality.strip().removeprefix("q=").rstrip("0") not in ("", "0.") or not quality
    return False
