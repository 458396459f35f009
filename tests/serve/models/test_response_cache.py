"""The response cache over real sockets: whose answer it gives, what it never keeps, what it tells."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, colour_image, png, with_embedding, write_bundle
from cli_fixture import Vitx
from server_process import ServerProcess, grpc_address, running_server, wait_until
from vitx.core.files import replace_folder
from vitx.serve.options import ServeOptions

Pixels = npt.NDArray[np.uint8]
TOKEN, MANAGEMENT = "a-token-of-clients", "a-token-of-management"
KEY = {"Authorization": f"Bearer {TOKEN}"}

# While the file FAULT exists, the model adds what it says to the logits, or raises what is no number.
FAULTY = """
from pathlib import Path
from vitx.runtimes import Session
from vitx.serve.models import loading
load, fault = loading.load_session, Path("FAULT")
class Faulty(Session):
    def __init__(self, session):
        super().__init__()
        self.session = session
        self.outputs = session.outputs
    def describe(self):
        return self.session.describe()
    def _infer(self, images):
        return self.session.infer(images) + (float(fault.read_text()) if fault.exists() else 0)
    def _infer_outputs(self, images):
        return self.session.infer_outputs(images)
loading.load_session = lambda *args, **options: Faulty(load(*args, **options))
from vitx.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    (root / "token").write_text(TOKEN)
    (root / "management").write_text(MANAGEMENT)
    with_embedding(write_bundle(root / "tiny.vitx"))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    tokens = ("--token-file", folder / "token", "--management", "--management-token-file", folder / "management")
    more = ("--allow-uncertified", "--metrics", "open", "--grpc-port", "0", "--canary-seconds", "0", *tokens)
    log = ("--access-log", folder / "log")
    program = FAULTY.replace("FAULT", str(folder / "fault"))
    with running_server(folder / "tiny.vitx", "--cache", "1MiB", *more, *log, program=program) as started:
        grpc_address(started)
        yield started


@pytest.fixture
def lookups(server: ServerProcess) -> Callable[[], tuple[int, int]]:
    """How often an answer was found, and how often not, since the last call."""
    before = [0.0, 0.0]

    def since() -> tuple[int, int]:
        names = (f'vitx_cache_lookups_total{{model="tiny",result="{result}"}}' for result in ("hit", "miss"))
        now = [server.metric(name) for name in names]
        changed = int(now[0] - before[0]), int(now[1] - before[1])
        before[:] = now
        return changed

    since()
    return since


def pixels(seed: int, count: int = 1) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def triton(server: ServerProcess, protocol: Any, images: Pixels, outputs: Any = None, **options: Any) -> Any:
    address, headers = (
        (server.url, KEY) if protocol is http_client else (server.grpc_url, {"authorization": KEY["Authorization"]})
    )
    with protocol.InferenceServerClient(address) as client:
        tensor = protocol.InferInput("images", list(images.shape), "UINT8")
        tensor.set_data_from_numpy(images)
        return client.infer("tiny", [tensor], outputs=outputs, **{"headers": headers, **options})


def statistics(server: ServerProcess) -> Any:
    reply = server.request("GET", "/v2/models/tiny/stats", headers=KEY)
    return json.loads(reply[1])["model_stats"][0]


def classify(server: ServerProcess, body: bytes, query: str = "", kind: str = "image/png") -> tuple[int, Any]:
    status, text, _ = server.request("POST", f"/v1/classify?{query}", body, {**KEY, "Content-Type": kind})
    return status, json.loads(text)


def test_a_tensor_is_answered_once_by_the_model_whatever_is_asked_of_the_answer(
    server: ServerProcess, lookups: Callable[[], tuple[int, int]]
) -> None:
    images, before = pixels(1, 2), statistics(server)
    first = triton(server, http_client, images).as_numpy("logits")
    np.testing.assert_allclose(first, NumpySession().infer(images), rtol=1e-4)
    assert lookups() == (0, 1)
    assert np.array_equal(triton(server, grpc_client, images).as_numpy("logits"), first)
    as_json = http_client.InferRequestedOutput("logits", binary_data=False)
    classes = http_client.InferRequestedOutput("logits", class_count=1)
    assert np.array_equal(triton(server, http_client, images, [as_json], request_id="x").as_numpy("logits"), first)
    best = triton(server, http_client, images, [classes], priority=1).as_numpy("logits")
    assert [text.decode().split(":")[2] for text in best.ravel()] == [LABELS[number] for number in first.argmax(1)]
    assert lookups() == (3, 0)
    after = statistics(server)
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_count"] - before["inference_count"] == 2
    grown = {
        name: after["inference_stats"][name]["count"] - was["count"] for name, was in before["inference_stats"].items()
    }
    computed = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), 1)
    assert grown == {"success": 4, "fail": 0, "queue": 4, **computed, "cache_hit": 3, "cache_miss": 1}


def test_what_grpc_asked_first_is_known_over_http(
    server: ServerProcess, lookups: Callable[[], tuple[int, int]]
) -> None:
    first = triton(server, grpc_client, pixels(9)).as_numpy("logits")
    assert np.array_equal(triton(server, http_client, pixels(9)).as_numpy("logits"), first)
    assert lookups() == (1, 1)


def test_other_content_and_other_outputs_are_not_answered_with_it(
    server: ServerProcess, lookups: Callable[[], tuple[int, int]]
) -> None:
    images = pixels(2, 2)
    first = triton(server, http_client, images).as_numpy("logits")
    flipped = images.copy()
    flipped[1, 3, 4, 1] ^= 1
    for other in (flipped, images[:1], images[::-1].copy()):
        found = triton(server, http_client, other).as_numpy("logits")
        np.testing.assert_allclose(found, NumpySession().infer(other), rtol=1e-4)
    both = [http_client.InferRequestedOutput(name) for name in ("embedding", "logits")]
    result = triton(server, http_client, images, both)
    assert (result.as_numpy("embedding").shape, result.as_numpy("logits").shape) == ((2, 3), first.shape)
    assert lookups() == (0, 5)
    assert triton(server, http_client, images, both[:1]).as_numpy("embedding").shape == (2, 3)
    assert triton(server, grpc_client, images).as_numpy("embedding") is None
    assert lookups() == (2, 0)


def test_an_image_is_decoded_and_run_once(server: ServerProcess, lookups: Callable[[], tuple[int, int]]) -> None:
    picture = colour_image(1, np.random.default_rng(3), size=40)
    image, other = png(picture), png(255 - picture)
    decoded = server.metric("vitx_decode_seconds_count")
    _, best = classify(server, image, "top_k=1")
    status, all_of_them = classify(server, image, "top_k=4&priority=3&timeout_ms=5000")
    assert (status, all_of_them["predictions"][:1], len(all_of_them["predictions"])) == (200, best["predictions"], 4)
    assert "embedding" in classify(server, image, "top_k=1&outputs=embedding")[1]["outputs"]
    assert lookups() == (1, 2)
    parts = [b"broken", image, other, image]
    form = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="i"; filename="f"\r\n\r\n' + part + b"\r\n" for part in parts
    )
    for found in ((2, 2), (3, 1)):  # what cannot be read never has an answer
        status, several = classify(server, form + b"--x--\r\n", "top_k=1", "multipart/form-data; boundary=x")
        assert (status, "error" in several["results"][0]) == (200, True)
        assert several["results"][1]["predictions"] == several["results"][3]["predictions"] == best["predictions"]
        assert several["results"][2]["predictions"] == classify(server, other, "top_k=1")[1]["predictions"]
        assert lookups() == (found[0] + 1, found[1])
    assert server.metric("vitx_decode_seconds_count") - decoded == 3


def test_a_model_that_is_loaded_again_or_unloaded_leaves_no_answer(
    server: ServerProcess, folder: Path, lookups: Callable[[], tuple[int, int]]
) -> None:
    def manage(what: str) -> int:
        headers = {"Authorization": f"Bearer {MANAGEMENT}"}
        return server.request("POST", f"/v2/repository/models/tiny/{what}", b"", headers)[0]

    images, image = pixels(4), png(colour_image(1, np.random.default_rng(4), size=40))
    first, label = triton(server, http_client, images).as_numpy("logits"), classify(server, image, "top_k=1")
    fresh = with_embedding(write_bundle(folder / "fresh", fault="bgr"))
    replace_folder(fresh.path, folder / "tiny.vitx")
    assert triton(server, http_client, images).as_numpy("logits") == pytest.approx(first)
    assert manage("load") == 200
    assert not np.allclose(triton(server, http_client, images).as_numpy("logits"), first)
    assert classify(server, image, "top_k=1") != label
    replace_folder(with_embedding(write_bundle(folder / "fresh")).path, folder / "tiny.vitx")
    assert (manage("unload"), manage("load")) == (200, 200)
    lookups()
    assert triton(server, http_client, images).as_numpy("logits") == pytest.approx(first)
    assert classify(server, image, "top_k=1") == label
    assert lookups() == (0, 2)


def test_an_error_is_not_kept(server: ServerProcess, folder: Path) -> None:
    images, image = pixels(5), png(colour_image(2, np.random.default_rng(5), size=40))
    fault = folder / "fault"
    try:
        fault.write_text("no number")
        with pytest.raises(InferenceServerException, match="inference failed"):
            triton(server, http_client, images)
        assert classify(server, image)[0] == 500
        fault.write_text("nan")
        assert np.isnan(triton(server, http_client, images).as_numpy("logits")).all()
        assert classify(server, image)[0] == 500
    finally:
        fault.unlink()
    np.testing.assert_allclose(
        triton(server, grpc_client, images).as_numpy("logits"), NumpySession().infer(images), rtol=1e-4
    )
    assert classify(server, image)[0] == 200


def test_many_who_ask_the_same_at_once_get_the_same(
    server: ServerProcess, lookups: Callable[[], tuple[int, int]]
) -> None:
    images, body = pixels(6), b""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "images",
                    "datatype": "UINT8",
                    "shape": list(images.shape),
                    "parameters": {"binary_data_size": images.nbytes},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    body, headers = head + images.tobytes(), {**KEY, "Inference-Header-Content-Length": str(len(head))}

    def client(_: int) -> set[bytes]:
        connection, replies = server.connect(), set()
        for _ in range(25):
            connection.request("POST", "/v2/models/tiny/infer", body, headers)
            replies.add(connection.getresponse().read())
        return replies

    with ThreadPoolExecutor(8) as pool:
        replies = set().union(*pool.map(client, range(8)))
    for reply in replies:  # the first ones may have run in batches of different sizes, and so differ in the last bit
        np.testing.assert_allclose(np.frombuffer(reply[-16:], "<f4"), NumpySession().infer(images)[0], rtol=1e-4)
    hits, misses = lookups()
    assert hits + misses == 200
    assert 1 <= misses <= 8
    # Requests sent ahead of their replies are answered in order, hits as others.
    connection = server.connect()
    connection.connect()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    one = (
        f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    connection.sock.sendall(3 * one)
    received = b""
    while received.count(b"model_name") < 3:
        data = connection.sock.recv(65536)
        assert data
        received += data
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert len({part[-16:] for part in received.split(b"HTTP/1.1 200 OK")[1:]}) == 1
    assert lookups() == (3, 0)


def test_those_without_the_token_learn_nothing(
    server: ServerProcess, folder: Path, lookups: Callable[[], tuple[int, int]]
) -> None:
    images = pixels(7)
    triton(server, http_client, images)
    lookups()
    for protocol in (http_client, grpc_client):
        for headers in ({}, {"authorization": "Bearer another-token-of-clients"}):
            with pytest.raises(InferenceServerException, match="token"):
                triton(server, protocol, images, headers=headers)
    assert lookups() == (0, 0)


def test_the_log_has_its_images_and_no_time_in_queue_or_model(server: ServerProcess, folder: Path) -> None:
    def lines(id: str) -> list[str]:
        return [line for line in (folder / "log").read_text().splitlines() if f'"id": "{id}"' in line]

    images = pixels(8, 2)
    for protocol, computed in ((http_client, [True, False]), (grpc_client, [False, False])):
        for number, ran in enumerate(computed):
            id = f"{protocol.__name__}-{number}"
            triton(server, protocol, images, headers={"authorization": KEY["Authorization"], "x-request-id": id})
            wait_until(lambda id=id: lines(id))
            found = json.loads(lines(id)[0])
            assert (found["images"], "compute_ms" in found) == (2, ran)


@pytest.mark.parametrize("given", ["much", "-1", "1e3", "inf", ""])
def test_a_size_that_is_none_is_refused(given: str, vitx: Vitx) -> None:
    expected = "expected bytes, such as 268435456 or 256MiB"
    assert vitx("serve", "none.vitx", "--cache", given) == (2, "", f"error: --cache {given}: {expected}\n")


@pytest.mark.parametrize(("given", "size"), [("0", 0), ("1000", 1000), ("1.5 GiB", 3 * 2**29), ("10mb", 10_000_000)])
def test_sizes(given: str, size: int) -> None:
    assert ServeOptions(cache=given).cache == size  # type: ignore[arg-type]
