"""A JSON list of base64 texts: what json.loads and b64decode find, in pieces, and no more JSON than that."""

import base64
import binascii
import json
import random
from typing import Any

import pytest

from vitx.serve.errors import RequestError
from vitx.serve.options import ServeOptions
from vitx.serve.protocol import base64_images as module
from vitx.serve.protocol.base64_images import base64_images
from vitx.serve.protocol.json_pixels import SMALL_BYTES

LIMITS = ServeOptions(max_images=20).limits


def read(body: bytes) -> list[Any]:
    """Bytes, and "error" for a text that is not base64."""
    return [image if isinstance(image, bytes) else "error" for image in base64_images(body, LIMITS)[1]]


def expected(texts: list[str]) -> list[Any]:
    found: list[Any] = []
    for text in texts:
        try:
            found.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            found.append("error")
    return found


@pytest.mark.parametrize("piece", [4, 7, 1 << 16])
def test_texts_are_read_as_the_standard_library_reads_them(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece)
    chance = random.Random(0)
    right = 0
    for _ in range(300):
        texts = [
            base64.b64encode(chance.randbytes(chance.randrange(30))).decode() for _ in range(chance.randrange(1, 5))
        ]
        for number, text in enumerate(texts):
            if text and not chance.randrange(3):
                place = chance.randrange(len(text))
                texts[number] = text[:place] + chance.choice(("=", "A", "", "é", " ", "/", "====")) + text[place + 1 :]
        wanted = expected(texts)
        plain = json.dumps(texts, ensure_ascii=False)
        escaped = plain.replace("+", "\\u002B").replace("=", "\\u003d")  # .NET writes + so
        for body in (json.dumps(texts, indent=2), plain.replace("/", "\\/"), escaped):
            assert read(body.encode()) == wanted, texts
        right += sum(isinstance(image, bytes) for image in wanted)
    assert right > 300


def test_what_is_wrong_with_a_text_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 4)
    texts = {"AA==AAAA": "Excess data after padding", "AAAAA": "Incorrect padding", "AAA": "Incorrect padding"}
    for text, reason in texts.items():
        (found,) = base64_images(json.dumps([text]).encode(), LIMITS)[1]
        assert (type(found), str(found)) == (RequestError, f"not base64: {reason}")


def test_a_backslash_that_stands_for_itself_is_no_base64() -> None:
    for text in ("AAA\\\\", "\\\\", "AAAA\\\\/", "AA\\u00+1A", "AA\\\\u002B", "AAAA\\"):
        assert read(f'["{text}"]'.encode()) == ["error"]


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"[1]", b'["AAAA", 1]', b'{"a": "AAAA"}', b'"AAAA"', b'[["AAAA"]]', b"7"]
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"^the JSON is not a list of one or more images, each a base64 text$"):
        base64_images(body, LIMITS)


@pytest.mark.parametrize("body", [b"", b"[", b'["AAAA"', b'["AAAA" "AAAA"]', b'["AAAA]', b'["AAAA", "', b'["A\\"A"]'])
def test_broken_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"^failed to parse the request's JSON: ") as refused:
        base64_images(body, LIMITS)
    assert refused.value.status == 400


def test_images_and_what_else_the_json_holds_are_bounded() -> None:
    assert len(base64_images(json.dumps(["AAAA"] * 20).encode(), LIMITS)[1]) == 20
    with pytest.raises(RequestError, match=r"^21 images in one request: at most 20$") as refused:
        base64_images(json.dumps(["AAAA"] * 21).encode(), LIMITS)
    assert refused.value.status == 413
    space = b" " * (SMALL_BYTES - 4)
    assert read(b'["AAAA"' + space + b"]") == [bytes(3)]
    for body in (b'["AAAA"' + space + b" ]", b'["AAAA"]' + bytes(10**6), b" " * 10**6, b'[""' + b',""' * 10**5 + b"]"):
        with pytest.raises(RequestError, match=rf"^more than {SMALL_BYTES} bytes of JSON besides the images$") as large:
            base64_images(body, LIMITS)
        assert large.value.status == 413
