"""A grammar of requests that may cost a server more than their bytes: JSON, forms, heads, images and gRPC messages.

A request is a kind and some values; `mutated` changes a few of them, so that what was dear is made dearer. What the
values say is written as it stands, right or wrong.
"""

import base64
import functools
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

from support.cost_tiff import CHOICES, SMALLEST, last_scan_again, tiff
from support.fuzz_grpc import SERVICE, good_request, varint
from support.fuzz_http import http
from vitx.serve.grpc.messages import message_class

MOST_BYTES = 1_000_000
_MOST_UNPACKED = 66 * 2**20  # a little more than a server takes
_SIDE = 16  # of an image that is to be small

Choices = tuple[Any, ...]
Values = Mapping[str, Any]


def _mostly(usual: Choices, others: Choices) -> Choices:
    """Nine times of ten a usual one: of a request with several wrong values the first alone is looked at."""
    return usual * (9 * len(others) // len(usual)) + others


# Numbers of things, from none to as many as fit.
_FEW: Choices = (0, 0, 1, 2, 5, 20, 100)
_SOME: Choices = (1, 2, 5, 20, 100, 500, 2_000, 10_000, 50_000, 200_000, 490_000)
_MANY: Choices = _mostly((0,), _SOME)
_TOP_K: Choices = (0, 0, 10, 100, 1_000, 21_841)  # classes, of which a model may have fewer
_MIB: Choices = (0, 0, 1, 8, 30, 63)


class Model(NamedTuple):
    """Its name, and the side of its images in pixels."""

    name: str
    side: int

    @property
    def numbers(self) -> int:
        return 3 * self.side**2

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Request:
    """`target`: "http", or the method of a gRPC call, of which `data` is the message."""

    kind: str
    values: Values
    target: str
    data: bytes


def _limit(size: int, values: Values) -> None:
    """Raise OverflowError for a body that would be too large, before it is written."""
    if size > (_MOST_UNPACKED if values.get("gzip") else MOST_BYTES):
        raise OverflowError


# A MiB of what fills a body up, and how deflate writes it. Thus a large body costs this process little.
_SPACES = b" " * 2**20


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(3, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH)


_DEFLATED_SPACES = _deflated(_SPACES)
_GZIP_HEAD, _DEFLATE_END = b"\x1f\x8b\x08" + bytes(6) + b"\xff", b"\x03\x00"


def _gzipped(pieces: list[bytes]) -> bytes:
    check = 0
    for piece in pieces:
        check = zlib.crc32(piece, check)
    packed = b"".join(_DEFLATED_SPACES if piece is _SPACES else _deflated(piece) for piece in pieces)
    return _GZIP_HEAD + packed + _DEFLATE_END + struct.pack("<II", check, sum(map(len, pieces)))


def _packed(pieces: list[bytes], values: Values, model: Model, path: str, kind: str, *headers: str) -> bytes:
    """A POST of these pieces; with `values["gzip"]` its body is compressed."""
    if values["gzip"]:
        body, headers = _gzipped(pieces), (*headers, "Content-Encoding: gzip")
    else:
        body = b"".join(pieces)
    return http("POST", path.format(model=model), body, f"Content-Type: {kind}", "Connection: close", *headers)


def _infer(values: Values, model: Model) -> bytes:
    count, item = values["numbers"], values["item"]
    count = max(count, -count * model.numbers)
    _limit(values["inputs"] * (count * (len(item) + 1) + 2**20 * values["padding"] + 2 * values["deep"]), values)
    inner = ((item + ",") * count)[:-1]
    data = "[" * values["deep"] + (inner or "0" * (not values["deep"]))
    shape = values["shape"] or [count // model.numbers, model.side, model.side, 3]
    before = f'{{"name": "images", "datatype": "UINT8", "shape": {json.dumps(shape)}, "data": {data}'
    after = "]" * values["deep"] + "}"
    tensor = [before.encode(), *[_SPACES] * values["padding"], after.encode()]
    inputs = ([*tensor, b","] * values["inputs"])[:-1]
    asked = f', "parameters": {{"classification": {values["top_k"]}}}' if values["top_k"] else ""
    outputs = ",".join([f'{{"name": "logits"{asked}}}'] * values["outputs"])
    extra = "".join(f', "x{number}": 1' for number in range(values["fields"]))
    end = f'], "outputs": [{outputs}]{extra}}}'
    body = [f'{{"id": "{"i" * values["id"]}", "inputs": ['.encode(), *inputs, end.encode()]
    length = (f"Inference-Header-Content-Length: {values['length']}",) if values["length"] is not None else ()
    return _packed(body, values, model, "/v2/models/{model}/infer", "application/json", *length)


def _texts(values: Values, model: Model) -> bytes:
    _limit(values["texts"] * (values["length"] + 3) + 2**20 * values["padding"], values)
    text = {"image": base64.b64encode(_png(24)).decode(), "zeros": "A", "escapes": "\\/", "slashes": "\\\\"}
    item = text[values["text"]] * (1 if values["text"] == "image" else values["length"])
    texts = ",".join([f'"{item}"'] * values["texts"])
    body = [f"[{texts}".encode(), *[_SPACES] * values["padding"], b"]"]
    return _packed(body, values, model, _classify(values), "application/json")


def _classify(values: Values) -> str:
    return "/v1/classify?model={model}" + (f"&top_k={values['top_k']}" if values["top_k"] else "")


def _form(values: Values, model: Model) -> bytes:
    _limit(values["parts"] * (2**20 * values["padding"] + min(8000, len(values["mark"]) * values["marks"])), values)
    parameters = (values["mark"] * values["marks"])[:8000]
    header = f'Content-Disposition: form-data; name="i"; filename="x"{values["joint"]}{parameters}'
    lines = "\r\n".join([header, *["X: y"] * values["lines"]])
    part = [f"--b\r\n{lines}\r\n\r\n".encode() + _png(24), *[_SPACES] * values["padding"], b"\r\n"]
    kind = f"multipart/form-data; boundary=b{(values['mark'] * values['in_type'])[:30_000]}"
    return _packed([*part * values["parts"], b"--b--\r\n"], values, model, _classify(values), kind)


def _head(values: Values, model: Model) -> bytes:
    _limit(values["pipelined"] * (values["headers"] * values["length"] + values["query"]), values)
    query = "&".join([values["field"]] * values["query"])
    lines = [f"{values['header']}: {values['value'] * values['length']}"] * values["headers"]
    target = values["path"].format(model=model) + (f"?{query}" if query else "")
    last = http("GET", target, b"", "Connection: close", *lines)
    before: bytes = http("GET", target, b"", *lines) * (values["pipelined"] - 1)
    return before + last


def _control(values: Values, model: Model) -> bytes:
    _limit(values["length"] + 2**20 * values["padding"], values)
    text = (values["text"] * values["length"]).encode()
    body = [b'{"key": "' + text, *[_SPACES] * values["padding"], b'", "byte_size": 1}']
    return _packed(body, values, model, values["path"], "application/json")


def _chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG; the first may stand behind 33 bytes."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@functools.lru_cache(64)
def _png(side: int, mode: str = "RGB", level: int = 1) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


_SAVED: dict[str, dict[str, Any]] = {
    "JPEG": {"progressive": True},
    "TIFF": {"compression": "tiff_adobe_deflate"},
    "PNG": {"compress_level": 1},
    "WEBP": {"method": 0},
}


@functools.lru_cache(256)
def _plain_image(kind: str, mode: str, width: int, height: int, orientation: int) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    options: dict[str, Any] = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
    options |= _SAVED.get(kind, {})
    try:
        Image.new(mode, (width, height)).save(buffer, kind, **options)
    except (OSError, ValueError, KeyError, RuntimeError, MemoryError):  # not every kind has every mode and size
        return b""
    return buffer.getvalue()


def _image(values: Values, model: Model) -> bytes:
    width = values["width"]
    height = min(values["height"], values["pixels"] // width + 1)
    _limit(values["chunks"] * (values["chunk"] >> 10) + (3 * width * height if values["kind"] == "BMP" else 0), values)
    data = _plain_image(values["kind"], values["mode"], width, height, values["orientation"])
    if values["kind"] == "PNG" and values["chunks"]:
        text = b"k\0\0" + zlib.compress(bytes(values["chunk"]), 1)
        data = data[:33] + _chunk(b"zTXt", text) * values["chunks"] + data[33:]
    if values["kind"] == "JPEG" and values["chunks"]:
        data = last_scan_again(data, values["chunks"])
    if values["kind"] == "GIF" and values["chunks"]:
        frame = data[data.find(b",") : -1]
        data = data[:-1] + frame * values["chunks"] + b";"
    return _packed([data], values, model, "/v1/classify?model={model}", "image/png")


def _tiff(values: Values, model: Model) -> bytes:
    return _packed([tiff(values)], values, model, "/v1/classify?model={model}", "image/tiff")


def _chunks(values: Values, model: Model) -> bytes:
    """A PNG, or the chunks of a WebP, with others before its pixels: as they are, empty, or EXIF of shared tags."""
    if values["exif"]:
        data = tiff({**SMALLEST, "tags": values["exif"], "noise": values["length"]})
    else:
        data = bytes(values["length"])
    _limit(values["chunks"] * (12 + len(data)), values)
    name, side = values["name"].encode(), min(values["side"], 4_000)
    if values["webp"]:
        whole = _plain_image("WEBP", "RGBA", side, side, 0)
        chunk = name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        inner = whole[8:12] + chunk * values["chunks"] + whole[12:]
        whole = b"RIFF" + struct.pack("<I", len(inner)) + inner
    else:
        whole = _png(side)
        whole = whole[:33] + _chunk(name, data) * values["chunks"] + whole[33:]
    return _packed([whole], values, model, "/v1/classify?model={model}", "image/png")


def _pieces(values: Values, model: Model) -> bytes:
    """An image with as many of the least pieces of its format before the pixels as are wanted."""
    kind, piece = _LEAST_PIECES[values["piece"]]
    whole = _plain_image(kind, "L", _SIDE, _SIDE, 0)
    place = {"JPEG": whole.find(b"\xff\xdb"), "PNG": 33, "GIF": whole.find(b",")}[kind]
    _limit(values["kib"] << 10, values)
    data = [whole[:place], *[piece * max(1, 2**10 // len(piece))] * values["kib"], b"\0" * values["end"], whole[place:]]
    return _packed(data, values, model, "/v1/classify?model={model}", "image/png")


def _call(values: Values, model: Model) -> bytes:
    size, pixels = values["padding"] << 20, values["images"] * model.numbers
    _limit(9 * min(values["parameters"], 50_000) + values["numbers"] + values["sides"] + size + pixels, values)
    request = good_request(model.name, shape=[values["images"], model.side, model.side, 3])
    del request.raw_input_contents[:]
    tensor = request.inputs[0]
    tensor.shape.extend([1] * values["sides"])
    if values["numbers"]:
        tensor.contents.uint_contents.extend([values["number"] % 2**32] * values["numbers"])
    for number in range(min(values["parameters"], 50_000)):
        request.parameters[f"{number}"].bool_param = True
        tensor.parameters[f"{number}"].bool_param = True
    whole: bytes = request.SerializeToString()
    whole += b"\x2a\x00" * values["inputs"] + b"\x32\x00" * values["outputs"] + b"\x3a\x00" * values["raws"]
    groups: int = values["groups"]
    pieces = [whole + b"\x0b" * groups + b"\x0c" * groups]
    for length in (0 if values["numbers"] else pixels, size):
        if length:
            pieces += [b"\x3a" + varint(length), *[_SPACES] * (length >> 20), _SPACES[: length % 2**20]]
    return _gzipped(pieces) if values["gzip"] else b"".join(pieces)


def _other_call(values: Values, model: Model) -> bytes:
    request = message_class("RepositoryModelLoadRequest")(model_name=values["text"] * values["length"])
    whole: bytes = request.SerializeToString()
    entries: int = values["entries"]
    return whole + b"\x1a\x00" * entries


_LEAST_PIECES = {
    "fill": ("JPEG", b"\xff"),
    "zeros": ("JPEG", b"\0"),
    "scans": ("JPEG", b"\xff\xda"),
    "comments": ("JPEG", b"\xff\xfe\0\2"),
    "exif": ("JPEG", b"\xff\xe1\0\x0aExif\0\0ab"),
    "profiles": ("JPEG", b"\xff\xe2\0\x12ICC_PROFILE\0\1\1ab"),
    "chunks": ("PNG", _chunk(b"abcd", b"")),
    "data": ("PNG", _chunk(b"IDAT", b"")),
    "junk": ("GIF", b"\0"),
    "controls": ("GIF", b"!\xf9\0"),
    "comment": ("GIF", b"!\xfe\1a\0"),
}
_MOST_IMAGES = 256
_SHAPES: Choices = _mostly(
    (None,),  # as the numbers are
    ([1, _SIDE, _SIDE, 3], [_MOST_IMAGES, _SIDE, _SIDE, 3], [-1], [1] * 4000, [2**62, _SIDE, _SIDE, 3], [0]),
)
_PATHS: Choices = (
    "/v2",
    "/metrics",
    "/v1/stats",
    "/openapi.json",
    "/",
    "/v2/models/{model}",
    "/v2/models/" + "%41" * 999,
)
# The first choices together are a request that is answered, but for "control" and "other call".
_KINDS: dict[str, tuple[str, Callable[[Values, Model], bytes], dict[str, Choices]]] = {
    "json": (
        "http",
        _infer,
        {
            "numbers": _mostly((-1, -50, -200, -_MOST_IMAGES), _SOME),  # below none: so many images
            "item": _mostly(
                ("7", "255", " 7"), ("[]", "[[]]", "{}", '""', "1e5", "7.5", "9" * 300, "null", '{"a":[1]}')
            ),
            "deep": _mostly((1,), (0, 4, 15, 17, 5_000, 300_000)),
            "padding": _MIB,
            "shape": _SHAPES,
            "inputs": _mostly((1,), (0, 2, 1_000)),
            "outputs": (0, 1, 1, 1, *_FEW),
            "top_k": _TOP_K,
            "fields": _mostly((0,), _FEW),
            "id": _mostly((0, 1, 20), (10_000, 900_000)),
            "length": _mostly((None,), (0, 100, 10**6)),
            "gzip": (False, True),
        },
    ),
    "base64": (
        "http",
        _texts,
        {
            "text": ("image", "zeros", "escapes", "slashes"),
            "texts": (1, 1, 2, 20, 256, 300, 5_000, 100_000),
            "top_k": _TOP_K,
            "length": (1, 3, 4, 100, 10_000, 900_000, 2**25),
            "padding": _MIB,
            "gzip": (False, True),
        },
    ),
    "form": (
        "http",
        _form,
        {
            "mark": (";", '"', "\\", "; a=b", "%", "; filename*=utf-8''%ff", " ", "=", ";'"),
            "marks": (0, 10, 1_000, 8_000),
            "joint": ("", ";", '; x="', "; x=", "\\"),
            "lines": _FEW,
            "padding": _MIB,
            "in_type": (0, 0, 100, 30_000),
            "parts": (1, 1, 2, 10, 100, 120, 256, 300),
            "top_k": _TOP_K,
            "gzip": (False, True),
        },
    ),
    "head": (
        "http",
        _head,
        {
            "path": _PATHS,
            "field": ("model=a", "a=b", "%41=%41", "", "=", "top_k=1"),
            "query": (0, 0, 10, 1_000, 8_000),
            "header": ("Accept-Encoding", "Accept", "Cookie", "X", "Authorization", "X-Request-Id", "Origin", "Expect"),
            "value": ("a", ",", "gzip;q=0,", "[", "http://", ";"),
            "length": (1, 10, 1_000, 30_000),
            "headers": (0, 1, 10, 1_000, 8_000),
            "pipelined": (1, 1, 10, 200, 2_000, 7_000, 20_000),
        },
    ),
    "control": (
        "http",
        _control,
        {
            "path": (
                "/v2/systemsharedmemory/region/r/register",
                "/v2/systemsharedmemory/region/r/unregister",
                "/v2/repository/index",
                "/v2/repository/models/{model}/load",
            ),
            "text": ("a", "\\u0041", "[", "\\\\"),
            "length": (1, 1_000, 100_000, 900_000),
            "padding": _MIB,
            "gzip": (False, True),
        },
    ),
    "image": (
        "http",
        _image,
        {
            "kind": ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"),
            "mode": ("RGB", "RGB", "L", "1", "P", "RGBA", "CMYK", "I;16", "I", "F", "LA"),
            "width": (1, 16, 300, 1_000, 2_000, 7_000, 7_000, 16_383, 65_000, 1_000_000, 49_000_000),
            "height": (1, 16, 300, 1_000, 2_000, 7_000, 7_000, 16_383, 65_000),
            "pixels": (10**3, 10**5, 10**6, 10**6, 4 * 10**6, 20 * 10**6, 49 * 10**6, 51 * 10**6),
            "orientation": (0, 0, 3, 6, 7),
            "chunks": (0, 0, 1, 10, 100, 1_000, 5_000, 50_000),
            "chunk": (0, 100, 2**20),
            "gzip": (False, False, True),
        },
    ),
    "tiff": ("http", _tiff, {**CHOICES, "gzip": (False, False, True)}),
    "chunks": (
        "http",
        _chunks,
        {
            "webp": (False, False, True),
            "name": ("IDAT", "eXIf", "EXIF", "iCCP", "ICCP", "tEXt", "iTXt", "fdAT", "acTL", "ANMF", "XMP ", "abcd"),
            "exif": (0, 0, 1, 1_000, 5_000, 20_000),
            "length": (0, 0, 1, 100, 60_000, 400_000),
            "chunks": (1, 1, 2, 100, 10_000, 70_000),
            "side": (1, 16, 300, 1_000, 2_000),
            "gzip": (False, False, True),
        },
    ),
    "pieces": (
        "http",
        _pieces,
        {
            "piece": tuple(_LEAST_PIECES),
            "kib": (0, 1, 60, 250, 900, 8_000, 64_000),
            "end": (0, 0, 1),
            "gzip": (False, True, True),
        },
    ),
    "call": (
        SERVICE + "ModelInfer",
        _call,
        {
            "images": _mostly((1, 50, _MOST_IMAGES), (0, 300)),
            "sides": _MANY,
            "numbers": _MANY,
            "number": (7, 255, 256, 2**32 - 1),
            "parameters": _MANY,
            "inputs": _MANY,
            "outputs": _MANY,
            "raws": _MANY,
            "groups": _mostly((0,), _FEW),
            "padding": _mostly((0,), _MIB),
            "gzip": (False, True),
        },
    ),
    "other call": (
        SERVICE + "RepositoryModelLoad",
        _other_call,
        {"text": ("a", "/", "ö"), "length": (*_FEW, 900_000), "entries": _MANY},
    ),
}
KINDS = tuple(_KINDS)


def chosen(kind: str, chance: random.Random) -> Values:
    """Any values of a kind."""
    return {name: chance.choice(choices) for name, choices in _KINDS[kind][2].items()}


def mutated(kind: str, values: Values, chance: random.Random) -> Values:
    """One to three values changed: another of the choices, or a number made larger or smaller."""
    changed = dict(values)
    for name in chance.sample(sorted(values), k=min(len(values), chance.randrange(1, 4))):
        given = values[name]
        if type(given) is int and given > 1 and chance.randrange(2):
            changed[name] = max(1, int(given * chance.choice((0.5, 0.9, 1.1, 1.5, 3))))
        else:
            changed[name] = chance.choice(_KINDS[kind][2][name])
    return changed


def made(kind: str, values: Values, model: Model) -> Request | None:
    """The request of these values; None for one that is too large, packed or unpacked."""
    target, write, _ = _KINDS[kind]
    try:
        data = write(values, model)
    except OverflowError:
        return None
    return Request(kind, values, target, data) if 0 < len(data) <= MOST_BYTES else None
