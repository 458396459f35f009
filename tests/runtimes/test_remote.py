"""A served model as a session, on a server of the test: what is sent, what is read, and answers that are no such."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.preprocess import Preprocessing
from vitx.runtimes import remote
from vitx.runtimes.remote import RemoteSession

PREPROCESSING = Preprocessing(image_size=4, mean=(0.5, 0.25, 0.125), std=(0.5, 0.25, 0.5))
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
TYPES = {"UINT8": np.uint8, "FP16": np.float16, "FP32": np.float32}


@dataclass
class Model:
    """What the server is like. Its logits are the sum and the largest of an image's numbers.

    instead: the status and the body of an answer, by path.
    """

    inputs: list[dict[str, Any]] = field(
        default_factory=lambda: [{"name": "images", "datatype": "UINT8", "shape": [-1, 4, 4, 3]}]
    )
    outputs: list[dict[str, Any]] = field(
        default_factory=lambda: [{"name": "scores", "datatype": "FP32", "shape": [-1, 2]}]
    )
    config: dict[str, Any] = field(default_factory=lambda: {"max_batch_size": 24})
    instead: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def answer(self, path: str, body: bytes, length: int) -> tuple[int, bytes, int]:
        """The status, the body, and how much of it is JSON."""
        if path in self.instead:
            status, text = self.instead[path]
            return status, text, len(text)
        about = {
            "/v2": {"name": "a server", "version": "1.2"},
            "/v2/models/m": {"inputs": self.inputs, "outputs": self.outputs},
            "/v2/models/m/config": self.config,
        }
        if path in about:
            found = json.dumps(about[path]).encode()
            return 200, found, len(found)
        request = json.loads(body[:length])
        (given,), (wanted,) = request["inputs"], request["outputs"]
        assert given["name"] == self.inputs[0]["name"]
        assert wanted["parameters"] == {"binary_data": True}
        assert given["shape"] == [len(IMAGES), *((4, 4, 3) if given["datatype"] == "UINT8" else (3, 4, 4))]
        assert given["parameters"] == {"binary_data_size": len(body) - length}
        images = np.frombuffer(body[length:], TYPES[given["datatype"]]).reshape(len(IMAGES), -1).astype(np.float64)
        datatype = next(each["datatype"] for each in self.outputs if each["name"] == wanted["name"])
        logits = np.stack([images.sum(1), images.max(1)], 1).astype(TYPES[datatype])
        output = {"name": wanted["name"], "datatype": datatype, "shape": logits.shape}
        head = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": logits.nbytes}}]}).encode()
        return 200, head + logits.tobytes(), len(head)


@contextmanager
def serving(model: Model) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            model.requests.append((self.path, self.headers["Content-Type"], self.headers["Authorization"]))
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            length = int(self.headers["Inference-Header-Content-Length"] or 0)
            status, text, json_length = model.answer(self.path, body, length)
            self.send_response(status)
            for name, value in ({"Inference-Header-Content-Length": str(json_length)} | model.headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v2/models/m"
        finally:
            http.shutdown()
            thread.join()


def test_a_server_of_bundles_gets_pixels() -> None:
    model = Model()
    with serving(model) as url, RemoteSession(url, PREPROCESSING, 2) as session:
        logits = session.infer(IMAGES)
        assert session.describe() == {"runtime": "a server", "version": "1.2", "url": url}
        assert session.max_batch == 24
    pixels = IMAGES.reshape(5, -1)
    assert logits.dtype == np.float32
    assert logits.tolist() == np.stack([pixels.sum(1), pixels.max(1)], 1).tolist()
    assert {token for _, _, token in model.requests} == {None}
    assert [kind for _, kind, _ in model.requests] == [None, None, None, "application/octet-stream"]


@pytest.mark.parametrize(("datatype", "close"), [("FP32", 1e-5), ("FP16", 0.02)])
def test_a_server_of_normalised_images_gets_them_planar(datatype: str, close: float) -> None:
    # Two outputs, of which one is called logits; sizes of any value.
    model = Model(
        inputs=[{"name": "x", "datatype": datatype, "shape": [-1, 3, -1, -1]}],
        outputs=[
            {"name": "tokens", "datatype": "FP32", "shape": [-1, 5, 8]},
            {"name": "logits", "datatype": datatype, "shape": [-1, 2]},
        ],
        config={},
    )
    with serving(model) as url, RemoteSession(url, PREPROCESSING, 2) as session:
        logits = session.infer(IMAGES)
        assert session.max_batch is None
    normalised = (IMAGES / 255.0 - PREPROCESSING.mean) / PREPROCESSING.std
    expected = np.stack([normalised.sum((1, 2, 3)), normalised.max((1, 2, 3))], 1)
    assert logits == pytest.approx(expected, abs=close * np.abs(expected).max())


def test_planes_are_red_green_blue() -> None:
    """The sum and the largest number would be those of any order."""
    imagenet = Preprocessing(image_size=4, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    with serving(Model(inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 3, 4, 4]}])) as url:
        sent = RemoteSession(url, imagenet, 2)._tensor(IMAGES)
    assert sent.shape == (5, 3, 4, 4)
    single = (IMAGES.astype("f4") / 255 - np.array(imagenet.mean, "f4")) / np.array(imagenet.std, "f4")
    np.testing.assert_array_equal(sent, single.transpose(0, 3, 1, 2))  # as networks are normalised, in float32
    assert sent[2, 1, 3, 0] == pytest.approx((IMAGES[2, 3, 0, 1] / 255 - imagenet.mean[1]) / imagenet.std[1])


def test_the_token_goes_with_every_request_and_to_no_other_server() -> None:
    model = Model()
    with serving(model) as url, RemoteSession(f"{url}/", PREPROCESSING, 2, b"0123456789abcdef") as session:
        session.infer(IMAGES)
    paths = ["/v2", "/v2/models/m", "/v2/models/m/config", "/v2/models/m/infer"]
    assert [(path, token) for path, _, token in model.requests] == [(path, "Bearer 0123456789abcdef") for path in paths]
    other = Model()
    with serving(other) as elsewhere:
        moved = Model(instead={"/v2": (307, b"")}, headers={"Location": elsewhere})
        with serving(moved) as url, pytest.raises(InputError, match="answers 307"):
            RemoteSession(url, PREPROCESSING, 2, b"0123456789abcdef")
    assert other.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/v2/models/",
        "http://127.0.0.1:8000/v2/models/m/infer",
        "http://127.0.0.1:8000/v2/models/m?x=1",
        "http://127.0.0.1:99999/v2/models/m",
        "http://name:secret@127.0.0.1:8000/v2/models/m",
        "ftp://127.0.0.1/v2/models/m",
    ],
)
def test_other_urls_are_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(InputError, match="is not the URL of a served model: expected http://HOST:PORT/v2/models/NAME"):
        RemoteSession(url, PREPROCESSING, 2)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"inputs": []}, "takes nothing: expected the reference's images, UINT8 [-1, 4, 4, 3], FP32 or FP16"),
        ({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1, 8, 8, 3]}]}, "takes x UINT8 [-1, 8, 8, 3]: "),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4, 4, 3]}]}, "takes x FP32 [-1, 4, 4, 3]: "),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [8, 3, 4, 4]}]}, "takes x FP32 [8, 3, 4, 4]: "),
        ({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1]}]}, "takes x UINT8 [-1]: "),
        ({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [-1, 4, 4, 3]}]}, "takes x BYTES "),
        ({"inputs": Model().inputs * 2}, "takes images UINT8 [-1, 4, 4, 3], images UINT8 [-1, 4, 4, 3]: "),
        ({"outputs": []}, "gives nothing: expected logits, FP32 or FP16 [-1, 2]"),
        ({"outputs": [{"name": "x", "datatype": "INT64", "shape": [-1, 2]}]}, "gives x INT64 [-1, 2]: "),
        ({"outputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}, "gives x FP32 [-1]: "),
        ({"outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}, "gives x FP32 [-1, 3]: expected logits, "),
        ({"outputs": Model().outputs * 2}, "gives scores FP32 [-1, 2], scores FP32 [-1, 2]: "),
    ],
)
def test_a_model_of_other_tensors_is_refused_with_what_it_has(tensors: dict[str, Any], words: str) -> None:
    with serving(Model(**tensors)) as url, pytest.raises(InputError) as caught:
        RemoteSession(url, PREPROCESSING, 2)
    assert f"{url} {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "instead", "error", "words"),
    [
        ("/v2", (200, b"<html>"), EnvironmentMissing, "/v2 speaks no Open Inference Protocol v2: b'<html>', in which "),
        ("/v2", (200, b"[]"), EnvironmentMissing, "speaks no Open Inference Protocol v2"),
        ("/v2/models/m", (404, b'{"error": "no m"}'), InputError, '/v2/models/m answers 404: {"error": "no m"}'),
        (
            "/v2/models/m/config",
            (200, b'{"max_batch_size": -5}'),
            EnvironmentMissing,
            "should be greater than or equal",
        ),
        ("/v2", (401, b""), InputError, "/v2 asks for a token, or another one: give it with --token-file"),
    ],
)
def test_what_is_no_such_server_is_one_error(
    path: str, instead: tuple[int, bytes], error: type[Exception], words: str
) -> None:
    with serving(Model(instead={path: instead})) as url, pytest.raises(error) as caught:
        RemoteSession(url, PREPROCESSING, 2)
    assert words in str(caught.value)


def test_a_server_without_configurations_takes_any_batch() -> None:
    with serving(Model(instead={"/v2/models/m/config": (404, b"")})) as url:
        assert RemoteSession(url, PREPROCESSING, 2).max_batch is None


def reply(shape: list[int], binary: bytes, **changed: object) -> tuple[int, bytes]:
    return 200, json.dumps(
        {"outputs": [{"name": "x", "datatype": "FP32", "shape": shape, **changed}]}
    ).encode() + binary


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        ((400, b'{"error": "batch-size must be <= 4"}'), '/infer answers 400: {"error": "batch-size must be <= 4"}'),
        (reply([5, 2], b""), "has no logits of 2 classes for 5 images (cannot reshape"),
        (reply([5, 2], b"", data=[0.0] * 9), "has no logits of 2 classes for 5 images (cannot reshape"),
        (reply([5, 2], b"", data=[[0.0, 1.0], [2.0]]), "has no logits of 2 classes for 5 images (setting an array"),
        (reply([5, 2], b"", data={"a": 1}), "has no logits of 2 classes for 5 images (float() argument"),
        (
            reply([5, 2], b"", data=["a"] * 10),
            "has no logits of 2 classes for 5 images (could not convert string to float",
        ),
        (reply([5, 2], b"", data=[10**400] * 10), "has no logits of 2 classes for 5 images (int too large"),
        (reply([5, 3], b"", data=[0.0] * 15), "has no logits of 2 classes for 5 images (it is x FP32 [5, 3])"),
        ((200, b"\x1f\x8b"), "has no logits of 2 classes for 5 images (Invalid JSON"),
        ((200, b"{}"), "has no logits of 2 classes for 5 images (Field required)"),
        ((200, b'{"outputs": []}'), "has no logits of 2 classes for 5 images"),
        (reply([5, 2], b"", datatype="INT32"), "has no logits of 2 classes for 5 images ('INT32')"),
    ],
)
def test_an_answer_without_logits_is_one_error(instead: tuple[int, bytes], words: str) -> None:
    model = Model(instead={"/v2/models/m/infer": instead})
    with serving(model) as url, RemoteSession(url, PREPROCESSING, 2) as session, pytest.raises(CheckFailed) as caught:
        session.infer(IMAGES)
    assert words in str(caught.value)


@pytest.mark.parametrize("data", [[*range(10)], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]])
def test_an_answer_in_json_is_read(data: list[Any]) -> None:
    with serving(Model(instead={"/v2/models/m/infer": reply([5, 2], b"", data=data)})) as url:
        assert RemoteSession(url, PREPROCESSING, 2).infer(IMAGES).tolist() == np.arange(10.0).reshape(5, 2).tolist()


@pytest.mark.parametrize("shape", [[2, 5], [10], [5, 2, 1], [5, 3]])
def test_logits_of_another_shape_are_refused(shape: list[int]) -> None:
    """[5, 2] are asked for; ten numbers come, and are not taken for what they do not say they are."""
    model = Model()
    with serving(model) as url, RemoteSession(url, PREPROCESSING, 2) as session:
        numbers = np.arange(10, dtype=np.float32).tobytes()
        status, text = reply(shape, b"")
        model.answer = lambda path, body, length: (status, text + numbers, len(text))  # type: ignore[method-assign]
        with pytest.raises(CheckFailed, match="has no logits of 2 classes for 5 images"):
            session.infer(IMAGES)


def test_a_server_that_is_gone_is_one_error() -> None:
    with serving(Model()) as url:
        session = RemoteSession(url, PREPROCESSING, 2)
    with (
        session,
        pytest.raises(
            EnvironmentMissing, match=r"no whole HTTP answer from http://.*/infer: \[Errno 111\] Connection refused"
        ),
    ):
        session.infer(IMAGES)


@pytest.mark.parametrize(
    ("status", "head", "begun", "words"),
    [
        (200, "Content-Length: 500", b"x" * 80, "IncompleteRead(80 bytes read, 420 more expected)"),
        (200, "Transfer-Encoding: chunked", b"7\r\nxx", "IncompleteRead"),
        (500, "Transfer-Encoding: chunked", b"7\r\nxx", "IncompleteRead"),
        (200, "Inference-Header-Content-Length: many", b"", "invalid literal for int"),
    ],
)
def test_an_answer_that_breaks_off_is_one_error(status: int, head: str, begun: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(f"HTTP/1.1 {status} X\r\n{head}\r\n\r\n".encode() + begun)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/m"
        with pytest.raises(EnvironmentMissing, match=f"^no whole HTTP answer from {url[:-9]}: ") as caught:
            RemoteSession(url, PREPROCESSING, 2)
        thread.join()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["my m", "é", "100%25", "m\n"])
def test_any_name_is_asked_for(name: str) -> None:
    model = Model()
    known = model.answer("/v2", b"", 0)
    model.answer = lambda path, *_: known if path == "/v2" else (404, b"", 0)  # type: ignore[method-assign]
    with serving(model) as url, pytest.raises(InputError, match="answers 404"):
        RemoteSession(f"{url[:-1]}{name}", PREPROCESSING, 2)
    assert [path for path, _, _ in model.requests] == ["/v2", f"/v2/models/{quote(name, safe='%')}"]


def test_an_answer_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with serving(model) as url, RemoteSession(url, PREPROCESSING, 2) as session:
        _, text, _ = model.answer("/v2", b"", 0)
        model.instead["/v2/models/m/infer"] = 200, text
        monkeypatch.setattr(remote, "_MOST_BYTES", len(text))
        with pytest.raises(CheckFailed, match="has no logits of 2 classes for 5 images"):
            session.infer(IMAGES)
        monkeypatch.setattr(remote, "_MOST_BYTES", len(text) - 1)
        with pytest.raises(CheckFailed, match=f"/infer is longer than {len(text) - 1} bytes"):
            session.infer(IMAGES)


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/m"
        with pytest.raises(EnvironmentMissing, match=r"/v2: timed out"):
            RemoteSession(url, PREPROCESSING, 2)
