"""Images that a request brings as a JSON list of base64 texts, cut out of the JSON unparsed and decoded in pieces.

`json.loads` and `b64decode` hold the interpreter until they are done, a third of a second for the largest body.
"""

import binascii
import re

from vitx.serve.errors import RequestError, too_large
from vitx.serve.limits import Limits, check_most
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import parse_json

_PIECE_BYTES = 64 * 2**10
_ESCAPED, _LONGEST_ESCAPE = re.compile(rb"\\(?:/|u00([0-9a-fA-F]{2}))"), 6


def base64_images(body: bytes, limits: Limits) -> tuple[None, list[bytes | RequestError]]:
    """No names, and the bytes of each image, or the error of a text that is not base64.

    Raises RequestError: 400 for anything but a list of one or more texts, 413 for more than `limits.images`.
    """
    texts: list[tuple[int, int]] = []
    rest, end = b"", 0  # the JSON with empty texts; and how far it goes
    while (start := body.find(b'"', end)) >= 0 and len(rest) <= SMALL_BYTES:
        stop = body.find(b'"', start + 1)
        if stop < 0:
            raise RequestError("failed to parse the request's JSON: its last text has no end")
        rest += body[end : min(start, end + SMALL_BYTES + 1)] + b'""'
        texts.append((start + 1, stop))
        end = stop + 1
    rest += body[end : end + SMALL_BYTES + 1]
    if len(rest) > SMALL_BYTES:
        raise too_large(f"more than {SMALL_BYTES} bytes of JSON besides the images")
    found = parse_json(rest, limits.json_depth)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise RequestError("the JSON is not a list of one or more images, each a base64 text")
    check_most(len(found), limits.images)
    return None, [_decoded(body, start, stop) for start, stop in texts]


def _decoded(body: bytes, start: int, stop: int) -> bytes | RequestError:
    """The bytes of the base64 text from `start` to `stop`, in which JSON may write / as \\/ and + as \\u002B."""
    pieces: list[bytes] = []
    left = b""
    try:
        for place in range(start, stop, _PIECE_BYTES):
            text = left + body[place : min(place + _PIECE_BYTES, stop)]
            cut = text.rfind(b"\\", -_LONGEST_ESCAPE)
            cut = len(text) if cut < 0 or _ESCAPED.match(text, cut) else cut  # the rest of it is in the next piece
            whole = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"/", text[:cut])
            size = len(whole) - len(whole) % 4
            if pieces and size and len(pieces[-1]) % 3:
                raise binascii.Error("Excess data after padding")
            pieces.append(binascii.a2b_base64(whole[:size], strict_mode=True))
            left = whole[size:] + text[cut:]
        if left:
            raise binascii.Error("Incorrect padding")
    except (binascii.Error, ValueError) as error:
        return RequestError(f"not base64: {error}", reason="bad_image")
    return b"".join(pieces)
