"""`POST /v1/classify`: every format a client may send, as bytes, form and JSON; its deadline; the API's description."""

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import LABELS, colour_image, png, write_bundle
from server_process import SLOW_MODEL, ServerProcess, held_decoding, running_server, wait_until
from vitx.core.preprocess import decode
from vitx.core.probabilities import top_predictions

# Of an image of nines the logits are not finite.
NOT_FINITE = "import numpy as np" + SLOW_MODEL.replace(
    "time.sleep(0.2)", "return self.session.infer(images) / np.float32(images[:, :1, 0, 0] != 9)"
)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the server waits with each large image."""
    return tmp_path_factory.mktemp("gates") / "gate"


@pytest.fixture(scope="module", params=["decoded apart", "decoded with the batch"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, gate: Path
) -> Iterator[ServerProcess]:
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")
    instances = "8" if request.param == "decoded with the batch" else "1"  # as many as decode at most, or fewer
    options = ("--allow-uncertified", "--instances", instances, "--threads", "1")
    with running_server(bundle.path, *options, program=held_decoding(gate)) as started:
        yield started


def classify(server: ServerProcess, body: bytes, content_type: str = "image/*", query: str = "") -> tuple[int, Any]:
    status, text, _ = server.request("POST", f"/v1/classify?{query}", body, {"Content-Type": content_type})
    return status, json.loads(text)


def picture(label: int, size: int = 41) -> Image.Image:
    return Image.fromarray(colour_image(label, np.random.default_rng(1), size=size))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def sixteen_bit(image: Image.Image) -> bytes:
    """A 16-bit grey PNG."""
    grey = np.asarray(image.convert("L")).astype(np.uint16) * 257
    return saved(Image.fromarray(grey), "PNG")


FILES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "jpeg": (3, lambda: saved(picture(3), "JPEG", quality=95)),
    "progressive jpeg": (1, lambda: saved(picture(1), "JPEG", progressive=True)),
    "cmyk jpeg": (3, lambda: saved(picture(3).convert("CMYK"), "JPEG", quality=95)),
    "png": (1, lambda: saved(picture(1), "PNG")),
    "palette png": (0, lambda: saved(picture(0).quantize(32), "PNG")),
    "transparent png": (0, lambda: saved(picture(0).convert("RGBA"), "PNG")),
    "16-bit png": (2, lambda: sixteen_bit(picture(2))),
    "webp": (3, lambda: saved(picture(3), "WEBP")),
    "bmp": (0, lambda: saved(picture(0), "BMP")),
    "gif": (1, lambda: saved(picture(1), "GIF")),
    "animated gif": (1, lambda: saved(picture(1), "GIF", save_all=True, append_images=[picture(3), picture(0)])),
    "animated webp": (0, lambda: saved(picture(0), "WEBP", save_all=True, append_images=[picture(3)])),
}


@pytest.mark.parametrize("name", FILES)
def test_formats(server: ServerProcess, name: str) -> None:
    label, write = FILES[name]
    status, answer = classify(server, write())
    assert (status, answer["predictions"][0]["label"]) == (200, LABELS[label])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_makes_the_image_upright(orientation: int) -> None:
    upright = np.zeros((24, 32, 3), dtype=np.uint8)
    upright[:12, :16] = 200  # the upper left quarter is light
    turns = {2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 6}
    undo = [
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.ROTATE_180,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(undo[turns[orientation]])
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = np.asarray(decode(saved(stored, "JPEG", quality=100, exif=exif)))
    assert decoded.shape == upright.shape
    assert np.abs(decoded.astype(int) - upright).max() < 12


def test_a_list_of_base64_is_answered_one_by_one(server: ServerProcess) -> None:
    images = [png(np.asarray(picture(label))) for label in (0, 1, 3)]
    texts = [base64.b64encode(data).decode() for data in images]
    body = json.dumps([texts[0], "n*t base64", texts[2], base64.b64encode(b"x").decode()]).encode()
    status, answer = classify(server, body, "application/json; charset=utf-8", "top_k=1&timeout_ms=20000&priority=1")
    assert status == 200
    results = answer["results"]
    assert [results[index]["predictions"][0]["label"] for index in (0, 2)] == [LABELS[0], LABELS[3]]
    assert results[1]["error"].startswith("not base64: ")
    assert results[3]["error"].startswith("not an image in a format that can be read")


def test_an_image_whose_logits_are_not_finite_fails_alone(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx")
    with running_server(bundle.path, "--allow-uncertified", program=NOT_FINITE) as server:
        black, grey = (png(np.full((16, 16, 3), value, np.uint8)) for value in (0, 9))
        status, answer = classify(server, grey)
        assert (status, "not all finite" in answer["error"]) == (500, True)
        body = json.dumps([base64.b64encode(data).decode() for data in (black, grey, b"x")]).encode()
        status, answer = classify(server, body, "application/json")
        assert status == 200
        good, overflown, broken = answer["results"]
        assert len(good["predictions"]) == len(LABELS)
        assert "not all finite" in overflown["error"]
        assert "not an image" in broken["error"]
        assert server.metric('vitx_rejections_total{reason="not_finite"}') == 2
        assert server.metric('vitx_rejections_total{reason="bad_image"}') == 1


PARSED = {"Content-Encoding": "identity"}  # a head with this header is never cached


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("", saved(picture(3), "JPEG")),
        ("top_k=2&priority=1&timeout_ms=20000", saved(picture(1), "PNG")),
        ("", b""),
        ("", saved(picture(3), "JPEG")[:-99]),
        ("model=mine", saved(picture(3), "JPEG")),
        ("top_k=2&timeout_ms=1", saved(picture(1, size=1500), "PNG")),
    ],
)
def test_a_cached_head_gets_the_same_answer_as_a_parsed_one(server: ServerProcess, query: str, body: bytes) -> None:
    classify(server, saved(picture(0), "BMP"), query=query)
    told = [
        server.request("POST", f"/v1/classify?{query}", body, {"Content-Type": "image/*", **more})
        for more in ({}, PARSED)
    ]
    known, parsed = (
        (status, re.sub(rb"\d+ ms", b"ms", text), headers.keys() - {"retry-after"}) for status, text, headers in told
    )
    assert known == parsed


def test_the_best_classes_are_those_of_a_whole_sort() -> None:
    rng = np.random.default_rng(0)
    for classes in (1, 2, 7, 1000):
        for count in {1, 5, classes} - set(range(classes + 1, 9)):
            logits = rng.integers(-3, 3, classes).astype(np.float32)  # many are equal
            found = top_predictions(logits, [str(index) for index in range(classes)], count)
            assert [one["index"] for one in found] == np.argsort(-logits, kind="stable")[:count].tolist()


def test_an_image_whose_client_hangs_up_while_it_is_decoded_is_not_computed(server: ServerProcess, gate: Path) -> None:
    gone, images = 'vitx_rejections_total{reason="disconnected"}', "vitx_images_total"
    classify(server, png(np.asarray(picture(0))))  # its head is cached from here on
    large = saved(picture(1, size=1600), "PNG")
    before = server.metric(gone), server.metric(images)
    gate.touch()
    for more in ({}, PARSED):
        for _ in range(3):
            connection = server.connect()
            connection.request("POST", "/v1/classify?", large, {"Content-Type": "image/*", **more})
            connection.close()
    wait_until(lambda: server.metric(gone) == before[0] + 6)
    gate.unlink()
    assert classify(server, png(np.asarray(picture(0))))[0] == 200  # behind all that is being decoded
    assert server.metric(images) == before[1] + 1


@pytest.mark.parametrize("body", [b"{}", b"[]", b"[1]", b'"text"', b"["])
def test_other_json_is_refused(server: ServerProcess, body: bytes) -> None:
    status, answer = classify(server, body, "application/json")
    assert status == 400
    assert "JSON" in answer["error"]


def test_a_deadline_is_taken_from_the_header_too(server: ServerProcess) -> None:
    headers = {"Content-Type": "image/png", "Timeout-Ms": "1"}
    large = saved(picture(1, size=1200), "PNG")  # takes longer than that to decode
    status, text, answered = server.request("POST", "/v1/classify", large, headers)
    assert status == 503
    assert json.loads(text)["error"].startswith("the deadline passed after ")
    assert int(answered["retry-after"]) >= 1


def test_the_description_names_every_route_and_only_those(server: ServerProcess) -> None:
    api = server.json("/openapi.json")
    assert api["openapi"] == "3.1.0"
    for path, item in api["paths"].items():
        concrete = re.sub(r"\{version\}", "1", re.sub(r"\{model\}", "tiny", path)).replace("{region}", "r")
        for method in ("get", "post"):
            status = server.request(method.upper(), concrete, b"" if method == "post" else None)[0]
            if method in item:
                assert str(status) in item[method]["responses"], (method, path, status)
            else:
                assert status == 405, (method, path)


def test_the_pages_need_no_other_host(server: ServerProcess) -> None:
    for path in ("/", "/docs"):
        status, page, headers = server.request("GET", path)
        assert status == 200
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert b"//" not in page.replace(b"// ", b"")
