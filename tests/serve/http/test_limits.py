"""What a client may use of a running server, over real sockets: sizes, depths, connections, and time."""

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from server_process import ServerProcess, running_server, wait_until

INFER = "/v2/models/tiny/infer"
COMPRESSED_JSON = {"Content_Type": "application/json", "Content_Encoding": "gzip"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")
    limits = {
        "--max-body-mib": 1,
        "--max-images": 3,
        "--max-pixels": 100,
        "--max-header-kib": 2,
        "--max-json-depth": 5,
        "--max-connections": 8,
        "--header-timeout": 0.3,
        "--body-timeout": 0.3,
        "--timeout-ms": 30_000,
    }
    arguments = [str(part) for option in limits.items() for part in option]
    with running_server(bundle.path, "--allow-uncertified", *arguments) as started:
        yield started


def post(server: ServerProcess, body: bytes, path: str = INFER, **headers: str) -> tuple[int, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    status, text, _ = server.request("POST", path, body, given)
    return status, json.loads(text)["error"]


def raw(server: ServerProcess) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=10)


def read_all(connection: socket.socket) -> tuple[int, str]:
    """Status and error of a reply that ends with the connection; 0 for a connection that ended without one."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    if not data:
        return 0, ""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_decompression_bomb_is_refused_before_it_is_large(server: ServerProcess, encoding: str) -> None:
    plain = bytes(200 * 2**20)
    bomb = gzip.compress(plain, 9) if encoding == "gzip" else zlib.compress(plain, 9)
    before = server.metric("process_resident_memory_bytes")
    assert len(bomb) < 2**20
    expected = (413, "request body of more than 1048576 bytes when decompressed")
    assert post(server, bomb, Content_Encoding=encoding) == expected
    assert server.metric("process_resident_memory_bytes") - before < 50 * 2**20


def test_a_compressed_body_must_be_whole_and_alone(server: ServerProcess) -> None:
    body = gzip.compress(b"{}")
    for broken in (body[:-4], body + b"more"):
        status, text = post(server, broken, Content_Encoding="gzip")
        assert (status, text) == (400, "the body is not exactly one gzip stream: is it truncated?")


def test_sizes(server: ServerProcess) -> None:
    assert post(server, bytes(2**20 + 1)) == (413, "request body of more than 1048576 bytes")
    images = json.dumps(["aGVsbG8="] * 4).encode()
    status = post(server, images, "/v1/classify", Content_Type="application/json")
    assert status == (413, "4 images in one request: at most 3")


def test_json_depth_is_of_brackets_and_not_of_texts(server: ServerProcess) -> None:
    deep = b'{"inputs": [[[[[[]]]]]]}'
    assert post(server, deep) == (400, "the request's JSON is nested more than 5 levels deep")
    text = json.dumps({"id": "[" * 100 + '\\"{', "inputs": []}).encode()
    assert post(server, text) == (400, "expected 1 input but got 0 inputs for model 'tiny'")


def test_headers_that_are_too_large_are_431(server: ServerProcess) -> None:
    assert post(server, b"{}", X_Large="x" * 3000) == (431, "request headers of more than 2048 bytes")
    with closing(raw(server)) as connection:  # refused before their end
        connection.sendall(b"GET / HTTP/1.1\r\nX-Large: " + b"x" * 3000)
        assert read_all(connection) == (431, "request headers of more than 2048 bytes")


def test_malformed_http_is_400(server: ServerProcess) -> None:
    with closing(raw(server)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert read_all(connection) == (400, "the request is not valid HTTP/1.1")


def test_slow_headers_are_408(server: ServerProcess) -> None:
    with closing(raw(server)) as connection:
        started = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        for _ in range(3):  # a byte now and then does not help
            time.sleep(0.05)
            connection.sendall(b"x")
        assert read_all(connection) == (408, "the request's headers took too long")
        assert time.monotonic() - started < 3


def test_a_connection_without_a_request_is_closed(server: ServerProcess) -> None:
    with closing(raw(server)) as connection:
        assert read_all(connection) == (0, "")


def test_a_slow_body_is_408_and_counted_once(server: ServerProcess) -> None:
    slow, gone = (f'vitx_rejections_total{{reason="{reason}"}}' for reason in ("slow_client", "disconnected"))
    before = server.metric(slow), server.metric(gone)
    with closing(raw(server)) as connection:
        connection.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        for _ in range(3):
            time.sleep(0.05)
            connection.sendall(b" ")
        assert read_all(connection) == (408, "the request's body took too long")
    wait_until(lambda: server.metric(slow) == before[0] + 1)
    assert server.metric(gone) == before[1]


def test_a_second_request_on_a_connection_has_its_own_time(server: ServerProcess) -> None:
    connection = server.connect()
    for _ in range(2):
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        time.sleep(0.4)  # longer than the time for headers: a connection may rest between two requests
    connection.sock.sendall(b"GET / HT")
    assert read_all(connection.sock) == (408, "the request's headers took too long")


def test_connections_beyond_the_limit_are_503(server: ServerProcess) -> None:
    held = [server.connect() for _ in range(8)]
    for connection in held:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    status, text, headers = server.request("GET", "/v2/health/live")
    assert (status, json.loads(text)) == (503, {"error": "8 connections are open"})
    assert headers["connection"] == "close"
    assert int(headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    wait_until(lambda: server.request("GET", "/v2/health/live")[0] == 200)


def test_a_small_request_costs_little_however_large_its_json_becomes(tmp_path: Path) -> None:
    """60 MiB of JSON in 60 KB: parsed into lists it took 17 s and 2.4 GB, and nobody else was answered meanwhile."""
    lists = b"[" + b"[]," * 20_000_000 + b"[]]"
    shape = b'"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3]'
    bundle = write_bundle(tmp_path / "tiny.vitx")
    with running_server(bundle.path, "--allow-uncertified") as server:
        before = [server.metric(f"process_{name}") for name in ("cpu_seconds_total", "resident_memory_bytes")]
        for text, status, reason in (
            (b'{"inputs": [{' + shape + b', "data": ' + lists + b"}]}", 400, "is not 768 integers from 0 to 255"),
            (b'{"inputs": [{' + shape + b', "data": ' + lists, 400, "failed to parse the request's JSON"),
            (b'{"inputs": ' + lists + b"}", 413, "bytes of JSON besides the pixels: at most 16384"),
        ):
            found, error = post(server, gzip.compress(text, 9), Content_Encoding="gzip")
            assert (found, reason in error) == (status, True), error
        after = [server.metric(f"process_{name}") for name in ("cpu_seconds_total", "resident_memory_bytes")]
        found, error = post(server, gzip.compress(lists, 9), "/v1/classify?model=tiny", **COMPRESSED_JSON)
        assert (found, error) == (413, "JSON of more than 16384 values")
    assert after[0] - before[0] < 5
    assert after[1] - before[1] < 400 * 2**20
