"""A strict parser of multipart/form-data (RFC 7578), with the whole body in memory."""

from dataclasses import dataclass
from email.message import Message

from vitx.serve.errors import RequestError, too_large

_MAX_HEADER_BYTES = 8192  # of one part


@dataclass(frozen=True, slots=True)
class Part:
    """One field of the form; `filename` is None for a plain value."""

    name: str
    filename: str | None
    data: bytes


def parse_multipart(content_type: str, body: bytes, max_parts: int) -> list[Part]:
    """Return the parts in order; raise RequestError 400 for a malformed body, 413 for more than `max_parts`."""
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise RequestError("multipart body does not begin with its boundary")
    parts: list[Part] = []
    position = len(delimiter)
    while not body.startswith(b"--", position):
        if not body.startswith(b"\r\n", position):
            raise RequestError("multipart boundary is not followed by a line end")
        if len(parts) == max_parts:
            raise too_large(f"more than {max_parts} parts in one request")
        end = body.find(b"\r\n" + delimiter, position)
        if end < 0:
            raise RequestError("multipart body ends before its closing boundary: is it truncated?")
        parts.append(_parse_part(body, position + 2, end))
        position = end + 2 + len(delimiter)
    return parts


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if not boundary or len(boundary) > 70 or not boundary.isascii():
        raise RequestError("multipart/form-data has no valid boundary (1 to 70 ASCII characters)")
    return boundary.encode("ascii")


def _parse_part(body: bytes, start: int, end: int) -> Part:
    headers_end = body.find(b"\r\n\r\n", start, min(end, start + _MAX_HEADER_BYTES))
    if headers_end < 0:
        raise RequestError("a multipart part has no headers, or more than 8192 bytes of them")
    disposition = _header(body[start:headers_end], b"content-disposition")
    message = Message()
    message["content-disposition"] = disposition
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise RequestError("a multipart part has no Content-Disposition: form-data with a name")
    return Part(name, message.get_filename(), body[headers_end + 4 : end])


def _header(block: bytes, wanted: bytes) -> str:
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == wanted:
            return value.strip().decode("utf-8", errors="replace")
    return ""
