"""The routes of a running server: images, tensors, limits, metrics, bad requests beside good ones, and hang-ups."""

import gzip
import http.client
import io
import json
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, colour_image, png, write_bundle
from server_process import HANG, INFER_BODY, INFER_PATH, ServerProcess, running_server, wait_until
from vitx.core.bundle import Bundle

BOUNDARY = "frontier"
HANG_UPS = 200
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    bundles: list[Path] = [write_bundle(folder / f"{name}.vitx", name=name).path for name in ("tiny", "other")]
    with running_server(*bundles, "--allow-uncertified") as started:
        yield started


@pytest.fixture(scope="module")
def pngs() -> list[bytes]:
    rng = np.random.default_rng(0)
    return [png(colour_image(label, rng)) for label in range(len(LABELS))]


def classify(
    server: ServerProcess, body: bytes, headers: Mapping[str, str] | None = None, query: str = "model=tiny"
) -> tuple[int, Any]:
    status, text, _ = server.request(
        "POST", f"/v1/classify?{query}", body, headers or {"Content-Type": "application/octet-stream"}
    )
    return status, json.loads(text)


def form(*files: bytes) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="{index}.png"\r\n\r\n'.encode() + data
        for index, data in enumerate(files)
    ]
    return b"\r\n".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def infer(server: ServerProcess, body: Any, path: str = "/v2/models/tiny/infer") -> tuple[int, Any]:
    status, text, _ = server.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
    return status, json.loads(text)


def tensor(images: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"name": "images", "datatype": "UINT8", "shape": list(images.shape), "data": images.ravel().tolist()}


def test_an_image_is_classified(server: ServerProcess, pngs: list[bytes]) -> None:
    for label, data in enumerate(pngs):
        status, answer = classify(server, data, {"Content-Type": "image/png"})
        assert status == 200
        assert answer["model"] == "tiny"
        assert [set(entry) for entry in answer["predictions"]] == [{"label", "score", "index"}] * 4
        assert answer["predictions"][0]["label"] == LABELS[label]
        assert answer["predictions"][0]["index"] == label
        assert sum(entry["score"] for entry in answer["predictions"]) == pytest.approx(1)


def test_scores_are_the_softmax_of_the_preprocessed_image(server: ServerProcess) -> None:
    pixels = colour_image(2, np.random.default_rng(5))
    logits = NumpySession().infer(pixels[None])[0].astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum()
    _, answer = classify(server, png(pixels), query="model=tiny&top_k=2")
    assert [entry["index"] for entry in answer["predictions"]] == np.argsort(-expected)[:2].tolist()
    assert [entry["score"] for entry in answer["predictions"]] == pytest.approx(np.sort(expected)[::-1][:2], rel=1e-4)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP", "GIF"])
def test_other_formats_and_sizes(server: ServerProcess, kind: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(colour_image(1, np.random.default_rng(1), size=41)).save(buffer, format=kind)
    status, answer = classify(server, buffer.getvalue())
    assert (status, answer["predictions"][0]["label"]) == (200, LABELS[1])


def test_a_truncated_jpeg_is_400_with_the_reason(server: ServerProcess) -> None:
    buffer = io.BytesIO()
    Image.fromarray(colour_image(1, np.random.default_rng(1), size=64)).save(buffer, format="JPEG")
    data = buffer.getvalue()
    status, answer = classify(server, data[: len(data) // 2], {"Content-Type": "image/jpeg"})
    assert status == 400
    assert answer["error"].startswith("cannot decode the image: image file is truncated")


def test_one_bad_image_of_a_form_fails_alone(server: ServerProcess, pngs: list[bytes]) -> None:
    status, answer = classify(server, form(pngs[0], pngs[1][:60], b"", pngs[3]), FORM)
    assert status == 200
    results = answer["results"]
    assert [result["filename"] for result in results] == ["0.png", "1.png", "2.png", "3.png"]
    assert [results[index]["predictions"][0]["label"] for index in (0, 3)] == [LABELS[0], LABELS[3]]
    assert "truncated" in results[1]["error"]
    assert results[2]["error"] == "not an image: empty"


def test_a_form_without_one_good_image_has_only_errors(server: ServerProcess) -> None:
    status, answer = classify(server, form(b"x"), FORM)
    assert status == 200
    assert [set(result) for result in answer["results"]] == [{"filename", "error"}]


def test_neighbours_of_a_bad_image_are_unaffected(server: ServerProcess, pngs: list[bytes]) -> None:
    bodies = [pngs[index % 4] if index % 3 else pngs[index % 4][:70] for index in range(60)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: classify(server, body), bodies))
    for index, (status, answer) in enumerate(answers):
        assert status == (200 if index % 3 else 400)
        if index % 3:
            assert answer["predictions"][0]["index"] == index % 4


@pytest.mark.parametrize(
    ("query", "headers", "status", "text"),
    [
        ("", {}, 400, "several models are served, choose one with ?model=: tiny, other"),
        ("model=mine", {}, 404, "Request for unknown model: 'mine' is not found"),
        ("model=tiny&top_k=0", {}, 400, "top_k is '0': expected 1 to 4, the number of classes"),
        ("model=tiny&top_k=5", {}, 400, "top_k is '5': expected 1 to 4, the number of classes"),
        (
            "model=tiny&topk=1",
            {},
            400,
            "unknown query parameter 'topk': known: model, version, top_k, priority, timeout_ms, outputs",
        ),
        ("model=tiny&model=tiny", {}, 400, "query parameter 'model' is given 2 times"),
        (
            "model=tiny",
            {"Content-Type": "text/plain"},
            415,
            "Content-Type 'text/plain' is not offered: "
            "expected image/*, application/octet-stream, multipart/form-data or application/json",
        ),
        ("model=tiny&priority=4", {}, 400, "priority is '4': expected 0 to 3"),
        ("model=tiny&timeout_ms=0", {}, 400, "timeout_ms is '0': expected 1 to 3600000"),
        (
            "model=tiny&timeout_ms=9",
            {"Timeout-Ms": "9"},
            400,
            "the timeout is given twice: as query parameter timeout_ms and as header Timeout-Ms",
        ),
        (
            "model=tiny",
            {"Content-Encoding": "br"},
            415,
            "Content-Encoding 'br' is not offered: expected gzip, deflate or identity",
        ),
        (
            "model=tiny",
            {"Content-Encoding": "gzip"},
            400,
            "the body is not valid gzip: Error -3 while decompressing data: incorrect header check",
        ),
        ("model=tiny", {}, 400, "not an image in a format that can be read (JPEG, PNG, WebP, BMP, GIF, TIFF)"),
    ],
)
def test_classify_refusals(server: ServerProcess, query: str, headers: dict[str, str], status: int, text: str) -> None:
    assert classify(server, b"no image", {"Content-Type": "image/png", **headers}, query) == (status, {"error": text})


@pytest.mark.parametrize("encodings", [("gzip", "gzip"), ("identity", "gzip"), ("gzip", "identity"), ("gzip", "br")])
def test_lines_of_one_header_mean_what_one_line_with_commas_means(
    server: ServerProcess, pngs: list[bytes], encodings: tuple[str, str]
) -> None:
    """RFC 9110 §5.3: or a proxy that joins them makes another request of it."""
    connection = server.connect()
    connection.putrequest("POST", "/v1/classify?model=tiny")
    for encoding in encodings:
        connection.putheader("Content-Encoding", encoding)
    connection.putheader("Content-Length", str(len(body := gzip.compress(pngs[0]))))
    connection.endheaders(body)
    reply = connection.getresponse()
    text = f"Content-Encoding '{', '.join(encodings)}' is not offered: expected gzip, deflate or identity"
    assert (reply.status, json.loads(reply.read())) == (415, {"error": text})
    connection.close()


def test_limits_of_body_images_and_pixels(server: ServerProcess, pngs: list[bytes]) -> None:
    connection = server.connect()
    connection.putrequest("POST", "/v2/models/tiny/infer")
    connection.putheader("Content-Length", str(64 * 2**20 + 1))
    connection.endheaders()  # refused by its Content-Length, before the body is sent
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())) == (413, {"error": "request body of more than 67108864 bytes"})
    connection.close()
    assert classify(server, form(*[pngs[0]] * 257), FORM) == (413, {"error": "more than 256 parts in one request"})
    bomb = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bomb, format="PNG")
    assert classify(server, bomb.getvalue()) == (
        400,
        {"error": "image of 8000×8000 pixels: more than the 50,000,000 allowed"},
    )


def test_json_tensors_are_inferred(server: ServerProcess) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for path in ("/v2/models/tiny/infer", "/v2/models/tiny/versions/1/infer"):
        status, answer = infer(server, {"id": "a", "inputs": [tensor(images)]}, path)
        assert status == 200
        assert {key: answer[key] for key in ("id", "model_name", "model_version")} == {
            "id": "a",
            "model_name": "tiny",
            "model_version": "1",
        }
        (output,) = answer["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [3, 4])
        np.testing.assert_allclose(
            np.reshape(output["data"], (3, 4)), NumpySession().infer(images), rtol=1e-4, atol=1e-4
        )


def test_a_request_larger_than_a_batch_is_split_and_joined(server: ServerProcess) -> None:
    images = np.random.default_rng(1).integers(0, 256, (100, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    status, answer = infer(server, {"inputs": [tensor(images)]})
    assert status == 200
    logits = np.reshape(answer["outputs"][0]["data"], (100, 4))
    np.testing.assert_allclose(logits, NumpySession().infer(images), rtol=1e-4, atol=1e-4)


def test_a_large_reply_is_compressed_for_a_cached_head_too(server: ServerProcess) -> None:
    body = json.dumps({"inputs": [tensor(np.zeros((100, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8))]}).encode()
    told = []
    for _ in range(3):  # the first is parsed
        status, text, headers = server.request("POST", "/v2/models/tiny/infer", body, {"Accept-Encoding": "gzip"})
        assert (status, headers["content-encoding"]) == (200, "gzip")
        told.append(gzip.decompress(text))
    plain = server.request("POST", "/v2/models/tiny/infer", body, {"Accept-Encoding": "br"})[1]
    assert told == [plain] * 3


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/mine/infer", 404, "Request for unknown model: 'mine' is not found"),
        ("/v2/models/tiny/versions/2/infer", 404, "Request for unknown model: 'tiny' version 2 is not found"),
        ("/v2/models/../infer", 404, "Request for unknown model: '..' is not found"),
        ("/v2/models/tiny/infer/more", 404, "Not Found"),
        ("/v2/models/tiny", 405, "Method Not Allowed"),
    ],
)
def test_unknown_models_and_routes(server: ServerProcess, path: str, status: int, text: str) -> None:
    assert infer(server, {}, path) == (status, {"error": text})


def test_what_is_off_is_501_whatever_is_asked_of_it(server: ServerProcess) -> None:
    for path in ("/v2/systemsharedmemory/region/r/register", "/v2/repository/index"):
        assert server.request("POST", path, b"{}")[0] == 501


def test_wrong_methods_are_405(server: ServerProcess) -> None:
    for path in ("/v2/models/tiny/infer", "/v1/classify"):
        status, _, headers = server.request("GET", path)
        assert (status, headers["allow"]) == (405, "POST")


def test_metadata_shows_what_is_served(server: ServerProcess) -> None:
    assert server.json("/v2")["extensions"] == [
        "binary_tensor_data",
        "classification",
        "model_configuration",
        "schedule_policy",
        "statistics",
    ]
    about = server.json("/v2/models/tiny")
    assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, IMAGE_SIZE, IMAGE_SIZE, 3]}]
    assert about["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 4]}]
    assert (about["certified"], about["vitx"]["certificate"]) == (False, None)
    assert about["vitx"]["labels"] == list(LABELS)
    assert server.json("/v2/models/tiny/config")["max_batch_size"] == 32
    assert server.json("/v2/models/tiny/config")["dynamic_batching"]["preferred_batch_size"][0] in range(1, 33)
    assert server.json("/v2/models/tiny/ready") == {"ready": True}
    assert server.request("GET", "/v2/models/mine/ready")[0] == 404
    # KServe's client reads them, and raised an exception for an empty answer.
    assert (server.json("/v2/health/live"), server.json("/v2/health/ready")) == ({"live": True}, {"ready": True})


def test_metrics_count_what_happened(server: ServerProcess, pngs: list[bytes]) -> None:
    names = {
        'vitx_requests_total{route="classify",status="200",model="other"}': 2,
        'vitx_requests_total{route="classify",status="400",model="other"}': 1,
        'vitx_rejections_total{reason="bad_image",model="other"}': 2,
        'vitx_requests_total{route="infer",model="tiny"}': 3,
        'vitx_requests_total{route="infer",status="400",model="tiny"}': 1,
        'vitx_rejections_total{reason="bad_request",model="tiny"}': 1,
        'vitx_requests_total{route="infer",status="404",model=""}': 2,  # names that clients make up are no labels
        'vitx_rejections_total{reason="unknown_model",model=""}': 2,
        'vitx_images_total{model="other",version="1"}': 3,
        "vitx_decode_seconds_count": 3,
        'vitx_queue_seconds_count{model="other",version="1"}': 2,
        'vitx_batch_size_sum{model="other",version="1"}': 3,
    }
    before = {name: server.metric(name) for name in names}
    assert classify(server, pngs[0], query="model=other")[0] == 200
    assert classify(server, pngs[0][:50], query="model=other")[0] == 400
    assert classify(server, form(pngs[0], b"x", pngs[1]), FORM, query="model=other")[0] == 200
    for path, body, status in (
        (INFER_PATH, INFER_BODY, 200),
        (INFER_PATH, INFER_BODY, 200),  # a head that is known
        (INFER_PATH, INFER_BODY.replace(b"UINT8", b"INT64"), 400),
        ("/v2/models/made-up/infer", INFER_BODY, 404),
        ("/v2/models/another/infer", INFER_BODY, 404),
    ):
        assert server.request("POST", path, body)[0] == status
    assert {name: server.metric(name) - before[name] for name in names} == names
    assert server.metric('vitx_queue_depth{model="other",version="1"}') == 0
    text = server.request("GET", "/metrics")[1].decode()
    assert 'vitx_model_info{certificate="uncertified",model="tiny",precision="fp32",provider="' in text


def test_the_page_is_self_contained_and_its_figures_are_json(server: ServerProcess) -> None:
    status, page, headers = server.request("GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b"http://" not in page
    assert b"https://" not in page
    stats = server.json("/v1/stats")
    assert stats["ready"] is True
    assert [model["name"] for model in stats["models"]] == ["tiny", "other"]


def test_a_connection_survives_its_refusals(server: ServerProcess, pngs: list[bytes]) -> None:
    connection: http.client.HTTPConnection = server.connect()
    for body, status in ((b"{", 400), (b"x" * 200_000, 413), (b"[]", 400)):
        connection.request("POST", "/v2/models/tiny/infer", body)
        reply = connection.getresponse()
        assert (reply.status, set(json.loads(reply.read()))) == (status, {"error"})
    connection.request("POST", "/v1/classify?model=tiny", pngs[0], {"Content-Type": "image/png"})
    assert connection.getresponse().status == 200
    connection.close()


def test_the_content_type_that_curl_sends_is_accepted(server: ServerProcess, pngs: list[bytes]) -> None:
    """`curl --data-binary @image.png` calls any body a form."""
    as_form = classify(server, pngs[0], {"Content-Type": "application/x-www-form-urlencoded"}, "model=tiny")
    assert as_form == classify(server, pngs[0], {"Content-Type": "image/png"}, "model=tiny")
    assert as_form[0] == 200


def test_a_body_that_was_compressed_on_its_way_is_refused(server: ServerProcess) -> None:
    """RFC 9112 §6.1; taken as it came, the compressed bytes would be pixels."""
    for codings, status in (("gzip, chunked", 415), ("identity, chunked", 200), ("chunked", 200)):
        connection = server.connect()
        headers = {"Transfer-Encoding": codings, "Content-Type": "application/json"}
        connection.request("POST", INFER_PATH, iter([INFER_BODY]), headers, encode_chunked=True)
        assert connection.getresponse().status == status


def test_a_cached_answer_that_nobody_waits_for_is_counted_once(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Counted twice, fewer than no requests were on their way, and a drain waited for them or cut others off."""
    body = png(np.zeros((16, 16, 3), np.uint8))
    request = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    log = tmp_path / "access.log"
    with running_server(tiny_bundle.path, "--cache", "1MiB", "--access-log", log) as server:
        address = (server.host, server.port)
        with socket.create_connection(address, timeout=HANG) as connection:
            for _ in range(2):  # afterwards the head is known, and the answer
                connection.sendall(request)
                answer = b""
                while not answer.endswith(b"]}"):
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
        for _ in range(HANG_UPS):
            with socket.create_connection(address, timeout=HANG) as connection:
                connection.sendall(request)

        def classified() -> int:
            return log.read_text().count("/v1/classify")

        wait_until(lambda: classified() >= 2 + HANG_UPS)
        assert server.stop() == 0
        assert classified() == 2 + HANG_UPS


def test_an_idle_connection_is_closed_when_it_was_told(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--idle-timeout", "0.3") as server:
        with socket.create_connection((server.host, server.port), timeout=60) as connection:  # less than the default
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200") == 1
        assert b"Connection: close" not in received
        assert server.stop() == 0
