"""Malformed HTTP requests, each made from a seed and its number, and what a server answers them with."""

import base64
import gzip
import io
import json
import random
import re
import socket
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image

PATIENCE_SECONDS = 10.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SIDE = 16  # of the tensors sent; a bundle of another size refuses their shape, which is as good

Maker = Callable[[random.Random, str], bytes]


def http(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    """A request whose framing is right, unless `headers` say otherwise."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body


def picture(chance: random.Random, kind: str | None = None, side: int = 24) -> bytes:
    """A good image of random noise."""
    buffer = io.BytesIO()
    pixels = Image.frombytes("RGB", (side, side), chance.randbytes(3 * side * side))
    pixels.save(buffer, kind or chance.choice(("PNG", "JPEG", "BMP", "GIF", "WEBP")))
    return buffer.getvalue()


def hostile_image(chance: random.Random) -> bytes:
    """Bytes that no decoder may take for a whole image of at most a million pixels."""
    png = picture(chance, "PNG")
    choice = chance.randrange(6)
    if choice == 0:
        return png[: chance.randrange(len(png) - 64)]  # its end holds no pixels
    if choice == 1:
        jpeg = picture(chance, "JPEG")
        return jpeg[: chance.randrange(len(jpeg) // 2)]
    if choice == 2:  # a bomb: the header promises a huge picture
        size = struct.pack(">II", chance.choice((20_000, 2**31 - 1)), chance.choice((20_000, 2**31 - 1)))
        header = b"IHDR" + size + png[24:29]
        return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]
    if choice == 3:
        return picture(chance, chance.choice(("GIF", "WEBP")))[: chance.randrange(24)]
    if choice == 4:
        return chance.choice((b"", b"GIF89a", b"BM", b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"\xff\xd8\xff", b"<svg/>"))
    return b"\x00" + chance.randbytes(chance.randrange(400))


def image_requests(chance: random.Random, model: str) -> bytes:
    kind = chance.choice(("image/png", "image/jpeg", "application/octet-stream"))
    return http("POST", f"/v1/classify?model={model}", hostile_image(chance), f"Content-Type: {kind}")


def flipped_images(chance: random.Random, model: str) -> bytes:
    """Some bytes of a good image are changed: it may still be one."""
    image = bytearray(picture(chance))
    for _ in range(chance.randrange(1, 8)):
        image[chance.randrange(len(image))] = chance.randrange(256)
    return http("POST", f"/v1/classify?model={model}", bytes(image), "Content-Type: image/png")


@cache
def bombs() -> tuple[bytes, bytes]:
    """Eight MiB of zeros in gzip, and in deflate."""
    return gzip.compress(bytes(8 * 2**20), 9, mtime=0), zlib.compress(bytes(8 * 2**20), 9)


def encoded_requests(chance: random.Random, model: str) -> bytes:
    """Content encodings: bombs, cut and broken streams, unknown names."""
    bomb, other_bomb = bombs()
    name, body = chance.choice(
        (
            ("gzip", bomb),
            ("deflate", other_bomb),
            ("gzip", bomb[: chance.randrange(len(bomb))]),
            ("gzip", gzip.compress(bomb, mtime=0)),
            ("gzip", chance.randbytes(64)),
            ("deflate", chance.randbytes(64)),
            ("br", b"{}"),
            ("gzip, gzip", bomb),
            ("\u00e9", b"{}"),
        )
    )
    target = chance.choice((f"/v1/classify?model={model}", f"/v2/models/{model}/infer"))
    return http("POST", target, body, f"Content-Encoding: {name}", "Content-Type: image/png")


def path_requests(chance: random.Random, model: str) -> bytes:
    """Names that try to be paths, and paths that try to be names."""
    plain = ("../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%5c..%5cwindows", "%00", "%ff%fe", "%", "%zz")
    odd = ("a" * 4000, "\u202e", ".", "..", "~root", "$(id)", "%0d%0aX: y", f"/{model}")
    near = ("%00", "/..", ";x", "/versions/2", "/versions/-1", "/versions/%2e", "%20")
    name = chance.choice((*plain, *odd, *(model + end for end in near)))
    method, rest = chance.choice((("POST", "/infer"), ("GET", "/nothing"), ("GET", "/config/x"), ("PUT", "/infer")))
    return http(method, f"/v2/models/{name}{rest}", b"{" if method == "POST" else b"")


def query_requests(chance: random.Random, model: str) -> bytes:
    key, value = chance.choice(
        [(name, value) for name in ("top_k", "timeout_ms", "priority") for value in ("-1", "nan", "1e999", "x", "%00")]
        + [("model", "../x"), ("model", "%ff"), ("top_k", "9" * 5000), ("top_k", "0"), ("nothing", "1")]
    )
    target = f"/v1/classify?model={model}&{key}={value}" if key != "model" else f"/v1/classify?model={value}"
    return http("POST", target, hostile_image(chance), "Content-Type: image/png")


def header_requests(chance: random.Random, model: str) -> bytes:
    """Broken framing and header lines."""
    target = f"/v2/models/{model}/infer"
    length = chance.choice(("-1", "+5", "1e3", "abc", "0x10", "", "9" * 30, "5, 6", "5 5", "\u0665"))
    chunk = chance.choice(
        (b"zz\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabc\r\n", b"1\r\nabcdef\r\n0\r\n\r\n")
    )
    return chance.choice(
        (
            http("POST", target, b"12345", f"Content-Length: {length}"),
            http("POST", target, b"12345", "Content-Length: 5", "Content-Length: 6"),
            http("POST", target, chunk, "Transfer-Encoding: chunked"),
            http("POST", target, b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"),
            http("POST", target, b"{}", "Transfer-Encoding: gzip", "Connection: close"),
            http("POST", target, b"{}", "no colon here"),
            http("POST", target, b"{}", "X-\x00: y"),
            http("POST", target, b"{}", "X: a\x00b"),
            http("POST", target, b"{}", "X: " + "a" * 40_000),
            http("POST", target, b"{}", *(f"X{index}: y" for index in range(4000))),
            http("POST", target + "?" + "a" * 40_000, b"{}"),
            http("POST", target, b"{}", f"Inference-Header-Content-Length: {length}"),
            http("POST", target, b"{}", f"Timeout-Ms: {length}"),
            http("post\x01", target, b"{}"),
            http("PATCH", target, b"{}"),
            f"POST {target} HTTP/9.9\r\nHost: localhost\r\n\r\n".encode(),
            f"POST {target}\r\n\r\n".encode(),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(64),  # TLS on a plain port
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            chance.randbytes(chance.randrange(1, 200)) + b"\r\n\r\n",
        )
    )


def tensor(**changes: Any) -> dict[str, Any]:
    """The one input of a good request, changed."""
    whole = {"name": "images", "datatype": "UINT8", "shape": [1, _SIDE, _SIDE, 3], "data": [7] * (3 * _SIDE * _SIDE)}
    return {**whole, **changes}


def json_requests(chance: random.Random, model: str) -> bytes:
    """Broken JSON, and JSON that is not a request."""
    odd: Any = chance.choice((None, True, -1, 1.5, 10**40, "x", [], {}, [[]], {"a": 1}, "\ud800", "\x00"))
    changed = chance.choice(("name", "datatype", "shape", "data"))
    shape = chance.choice(([0, 16, 16, 3], [-1, 16, 16, 3], [2**62, 16, 16, 3], [1, 16, 16], [True] * 4, [1] * 5000))
    good = json.dumps({"inputs": [tensor()]}).encode()
    values = chance.choice(([256] * 768, [-1] * 768, ["7"] * 768, [7] * 767, [[7]] * 768, [1.5] * 768, [None] * 768))
    depth = chance.choice((17, 2000))
    body = chance.choice(
        (
            good[: chance.randrange(len(good) - 1)],
            good + b"}",
            b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}",
            json.dumps(odd).encode(),
            json.dumps({"inputs": odd}).encode(),
            json.dumps({"inputs": [odd]}).encode(),
            json.dumps({"inputs": [tensor(**{changed: odd})]}).encode(),
            json.dumps({"inputs": [tensor(shape=shape)]}).encode(),
            json.dumps({"inputs": [tensor(data=values)]}).encode(),
            json.dumps({"inputs": [tensor(), tensor()]}).encode(),
            json.dumps({"inputs": [tensor()], "outputs": [{"name": "nothing"}]}).encode(),
            json.dumps({"inputs": [tensor()], "parameters": {"nothing": 1}}).encode(),
            json.dumps({"inputs": [tensor()], "parameters": {"timeout": -1}}).encode(),
            json.dumps({"inputs": [tensor()], "parameters": {"priority": 99}}).encode(),
            json.dumps({"inputs": [tensor(data=[float("nan")])]}).encode(),
            b'{"inputs": "\xff\xfe"}',
            b'{"inputs": [{"data": ' + b"9" * 5000 + b"}]}",
            b"\xef\xbb\xbf{}",
        )
    )
    return http("POST", f"/v2/models/{model}/infer", body, "Content-Type: application/json")


def base64_requests(chance: random.Random, model: str) -> bytes:
    """JSON lists for classify; a bad image in a list fails alone."""
    text = base64.b64encode(hostile_image(chance)).decode()
    body = chance.choice(([], [1], ["!"], [text], [text] * 9, {"a": text}, [[text]], "x", None))
    return http("POST", f"/v1/classify?model={model}", json.dumps(body).encode(), "Content-Type: application/json")


def multipart_requests(chance: random.Random, model: str) -> bytes:
    """Forms; a bad image in one fails alone."""
    part = b'--b\r\nContent-Disposition: form-data; name="i"; filename="x"\r\n\r\n' + hostile_image(chance) + b"\r\n"
    form = part * chance.choice((1, 2, 9)) + b"--b--\r\n"
    kind, body = chance.choice(
        (
            ("multipart/form-data", form),
            ("multipart/form-data; boundary=", form),
            ("multipart/form-data; boundary=c", form),
            ("multipart/form-data; boundary=" + "b" * 300, form),
            ("multipart/form-data; boundary=b", form),
            ("multipart/form-data; boundary=b", form[: chance.randrange(len(form))]),
            ("multipart/form-data; boundary=b", b"--b--\r\n"),
            ("multipart/form-data; boundary=b", b"--b\r\n" * 2000),
            ("multipart/form-data; boundary=b", b"--b\r\n" + b"X: y\r\n" * 2000),
            ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--"),
        )
    )
    return http("POST", f"/v1/classify?model={model}", body, f"Content-Type: {kind}")


def length_requests(chance: random.Random, model: str) -> bytes:
    """Binary tensors whose lengths do not agree, and bodies shorter than they were said to be."""
    size = chance.choice((0, 1, 767, 769, -1, 2**40, "768", None, 7.5))
    head = json.dumps({"inputs": [{**tensor(parameters={"binary_data_size": size}), "data": None}]}).encode()
    head = head.replace(b', "data": null', b"")
    length = chance.choice((len(head), 0, len(head) - 1, len(head) + 10_000))
    body = head + bytes(chance.choice((0, 767, 768, 2000)))
    target = f"/v2/models/{model}/infer"
    if chance.randrange(2):
        return http("POST", target, body, f"Content-Length: {len(body) + chance.randrange(1, 9999)}")
    return http("POST", target, body, f"Inference-Header-Content-Length: {length}")


def half_requests(chance: random.Random, model: str) -> bytes:
    """A good request that ends anywhere before its end."""
    whole = http("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor()]}).encode())
    return whole[: chance.randrange(1, len(whole) - 1)]


def memory_requests(chance: random.Random, model: str) -> bytes:
    """Shared memory regions that belong to others, or do not exist."""
    key = chance.choice(
        ("/../../etc/passwd", "..", "/proc/self/mem", "", "/", "sem.x", "nobody\x00", "a" * 300, 7, None)
    )
    size = chance.choice((0, -1, 2**63, 1, "1", None, True))
    region = chance.choice(("r", "%2e%2e", "a" * 500, "%00"))
    register = json.dumps({"key": key, "offset": chance.choice((0, -1, 2**70)), "byte_size": size}).encode()
    where = {"shared_memory_region": region, "shared_memory_byte_size": 768, "shared_memory_offset": size}
    infer = {"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, _SIDE, _SIDE, 3], "parameters": where}]}
    return chance.choice(
        (
            http("POST", f"/v2/systemsharedmemory/region/{region}/register", register),
            http("POST", f"/v2/models/{model}/infer", json.dumps(infer).encode()),
        )
    )


MAKERS: dict[str, Maker] = {
    "image": image_requests,
    "flipped": flipped_images,
    "encoding": encoded_requests,
    "path": path_requests,
    "query": query_requests,
    "header": header_requests,
    "json": json_requests,
    "base64": base64_requests,
    "multipart": multipart_requests,
    "length": length_requests,
    "half": half_requests,
    "memory": memory_requests,
}
# What may be answered with 200: a flipped bit that is still an image, and lists in which a bad image fails alone.
MAY_PASS = ("flipped", "base64", "multipart")
# After these the client ends its side, as they may be shorter than they say; a server may take that for a hang-up.
SHORT = ("header", "length", "half")


def make_request(seed: int, number: int, model: str) -> tuple[str, bytes]:
    """The kind and the bytes of one request."""
    chance = random.Random(f"{seed}/{number}")
    kind = chance.choice(tuple(MAKERS))
    return kind, MAKERS[kind](chance, model)


def is_refused(kind: str, answer: str) -> bool:
    """Whether this answer to a request of this kind is right."""
    return answer == "closed" or answer.startswith("4") or (answer == "200" and kind in MAY_PASS)


def asker(address: tuple[str, int], seed: int, model: str, stop_every: int = 500) -> Callable[[int], tuple[str, str]]:
    """What sends the request of a number; of the short ones a few stay open until the server ends them."""

    def one(number: int) -> tuple[str, str]:
        kind, request = make_request(seed, number, model)
        return kind, ask(address, request, end=kind in SHORT and number % stop_every >= len(MAKERS))

    return one


def ask(address: tuple[str, int], request: bytes, *, end: bool = False) -> str:
    """Send one request on a connection of its own, whose sending side is then closed with `end`.

    Returns the first answer's status, "closed" when the connection ended without one, or "hang".
    """
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
        try:
            try:
                connection.sendall(request)
                if end:
                    connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it had all: the answer may be there
            return _answer(connection)
        except TimeoutError:
            return "hang"
        except OSError:
            return "closed"


def _answer(connection: socket.socket) -> str:
    data = b""
    while data_now := connection.recv(2**16):
        data += data_now
        end = data.find(b"\r\n\r\n")
        length = _LENGTH.search(data, 0, end) if end >= 0 else None
        if length is not None and len(data) >= end + 4 + int(length[1]):
            break
    return data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.") else "closed"
