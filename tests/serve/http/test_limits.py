"""What a client may use of a running server, over real sockets: sizes, depths, connections, and time."""

import gzip
import http.client
import json
import random
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from server_process import HANG, INFER_BODY, ServerProcess, running_server, wait_until
from vitx.serve.options import ServeOptions

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
        "--header-timeout": 1,  # a client that does as it should is held up for less, also on a busy machine
        "--body-timeout": 1,
        "--write-timeout": 0.5,
        "--timeout-ms": 30_000,
    }
    arguments = [str(part) for option in limits.items() for part in option]
    with running_server(bundle.path, "--allow-uncertified", "--shared-memory", *arguments) as started:
        yield started


def post(server: ServerProcess, body: bytes, path: str = INFER, **headers: str) -> tuple[int, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    status, text, _ = server.request("POST", path, body, given)
    return status, json.loads(text)["error"]


def raw(server: ServerProcess) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=HANG)


def read_all(connection: socket.socket) -> tuple[int, str]:
    """Status and error of a reply that ends with the connection; 0 for a connection that ended without one."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    if not data:
        return 0, ""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def open_all(server: ServerProcess, opened: ExitStack) -> None:
    """Open the 8 connections that are allowed. Each makes a request: one that does not is closed after a second."""

    def answered(connection: http.client.HTTPConnection) -> bool:
        connection.request("GET", "/v2/health/live")
        reply = connection.getresponse()
        reply.read()
        return reply.status == 200  # those of the test before may still be counted

    for _ in range(8):
        wait_until(partial(answered, opened.enter_context(closing(server.connect()))))


def send_for(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send the same again and again, until that fails or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(data)
        time.sleep(0.001)


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


def test_a_request_that_brings_no_image_is_small(server: ServerProcess) -> None:
    """60 KB of gzip were parsed on the event loop as 60 MiB of JSON, whatever was asked for."""
    path = "/v2/systemsharedmemory/region/r/register"
    text = b'{"key": "' + b"x" * 17_000 + b'"}'
    for body, headers in ((text, {}), (gzip.compress(text), {"Content_Encoding": "gzip"})):
        found = post(server, body, path, **headers)
        assert found[0] == 413
        assert found[1].startswith("request body of more than 16384 bytes")
    for body in (b"{}", b'{"key": "a"}', b'{"key": "a", "byte_size": 1, "x": 1}'):
        found = post(server, body, path)
        assert found[0] == 400
        assert "expected key, byte_size and, where it is not 0, offset" in found[1]


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
        assert time.monotonic() - started < 9  # ten seconds are the default


def test_a_connection_without_a_request_is_closed(server: ServerProcess) -> None:
    with closing(raw(server)) as connection:
        assert read_all(connection) == (0, "")


def test_a_slow_body_is_408_and_counted_once(server: ServerProcess) -> None:
    slow, gone = (f'vitx_rejections_total{{reason="{reason}"}}' for reason in ("slow_client", "disconnected"))
    before = server.metric(slow), server.metric(gone)
    with closing(raw(server)) as connection:
        connection.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
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
        assert connection.getresponse().read() == b'{"live":true}'
        time.sleep(1.1)  # longer than the time for headers: a connection may rest between two requests
    connection.sock.sendall(b"GET / HT")
    assert read_all(connection.sock) == (408, "the request's headers took too long")


def test_a_head_that_begins_behind_a_whole_request_has_its_time(server: ServerProcess) -> None:
    """It came in one segment with the request before it, and was never timed."""
    with closing(raw(server)) as connection:
        started = time.monotonic()
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /x HTTP/1.1\r\nX-Note: ")
        replies = b""
        while chunk := connection.recv(65536):
            replies += chunk
        assert time.monotonic() - started < 9  # ten seconds are the default
    assert replies.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408 " in replies
    assert b"the request's headers took too long" in replies


def test_a_known_head_inside_a_header_is_no_request(server: ServerProcess) -> None:
    infer = b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(INFER_BODY)
    with closing(raw(server)) as connection:
        connection.sendall(infer + INFER_BODY)  # the head is known from now on
        assert b"HTTP/1.1 200 OK" in connection.recv(65536)
    partial = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Note: "
    with closing(raw(server)) as connection:
        connection.sendall(partial)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(infer)  # the end of the second head: its first line is the value of X-Note
        assert read_all(connection) == (400, "the request has 2 Host headers: expected one")


def test_a_client_that_never_reads_is_dropped(server: ServerProcess) -> None:
    """The socket's buffers held replies for ever."""
    slow = 'vitx_rejections_total{reason="slow_client"}'
    before = server.metric(slow)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(HANG)
        connection.connect((server.host, server.port))
        with pytest.raises(ConnectionError):
            send_for(connection, request, HANG)
    wait_until(lambda: server.metric(slow) == before + 1)


def test_bodies_are_bounded_in_sum(tmp_path: Path) -> None:
    """Twelve bodies of 59 MiB that never ended cost 678 MiB; here two of one MiB are all that fit."""
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    chunks = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
    bundle = write_bundle(tmp_path / "tiny.vitx")
    with running_server(bundle.path, "--allow-uncertified", "--max-memory-mib", "2") as server:

        def refused() -> bool:
            status, text = post(server, bytes(2**17))
            assert status in (413, 503)  # so much JSON is refused anyway, once it was received
            return status == 503 and text == "requests in flight have 2097152 of 2097152 bytes"

        for known in (False, True):
            if known:
                with closing(raw(server)) as connection:
                    connection.sendall(head % len(INFER_BODY) + INFER_BODY)
                    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            with closing(raw(server)) as first, closing(raw(server)) as second:
                for held in (first, second):
                    held.sendall(head % 2**20 + b"{")
                wait_until(refused)  # it comes behind these two, whose heads are read before its body
                assert server.request("POST", INFER, INFER_BODY)[0] == 200  # what is small is not counted
            wait_until(lambda: not refused())  # they hung up

        def full() -> bool:
            """Whether two have all of it; one who asks before they are read takes bytes of theirs."""
            with closing(raw(server)) as first, closing(raw(server)) as second:
                for held in (first, second):
                    held.sendall(chunks + 16 * chunk)
                time.sleep(0.2)
                return refused()

        wait_until(full)
        assert server.metric('vitx_rejections_total{reason="memory"}') >= 3


LARGE_JSON_WAITS = """
import os, time
from vitx.serve.http import app
read = app.decode_infer_request
def held(body, *given):
    while len(body) > app.SMALL_BYTES and os.path.exists(gate):
        open(gate + ".seen", "w").close()
        time.sleep(0.005)
    return read(body, *given)
app.decode_infer_request = held
from vitx.cli import main
main()
"""


def test_a_body_that_a_thread_reads_counts_after_its_client_hung_up(tmp_path: Path) -> None:
    """Fourteen clients that hung up after 48 MiB of JSON cost 3 GB."""
    gate, seen, size = tmp_path / "gate", tmp_path / "gate.seen", 3 * 2**19
    bundle = write_bundle(tmp_path / "tiny.vitx")
    gone = 'vitx_rejections_total{reason="disconnected"}'
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    program = f"gate = {str(gate)!r}" + LARGE_JSON_WAITS
    with running_server(bundle.path, "--allow-uncertified", "--max-memory-mib", "2", program=program) as server:

        def status() -> int:
            return post(server, bytes(size), "/v1/classify")[0]

        def left(number: int) -> bool:
            return server.metric(gone) == number

        for number, known in enumerate((False, True), 1):
            gate.touch()
            if known:
                with closing(raw(server)) as connection:
                    connection.sendall(head % len(INFER_BODY) + INFER_BODY)
                    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            with closing(raw(server)) as connection:
                connection.sendall(head % size + b"{".ljust(size))
                wait_until(seen.exists)
            wait_until(partial(left, number))
            assert status() == 503
            gate.unlink()
            wait_until(lambda: status() == 400)
            seen.unlink()


def test_workers_share_the_memory_of_all_bodies_and_have_room_for_one_each() -> None:
    """Each had all of it."""

    def of_each(workers: int, memory: float, body: float = 64) -> float:
        return ServeOptions(workers=workers, max_memory_mib=memory, max_body_mib=body).limits.memory_bytes / 2**20

    assert [of_each(workers, 1024) for workers in (1, 4, 100)] == [1024, 256, 64]
    assert [of_each(workers, 2) for workers in (1, 3)] == [2, 2]


def test_a_refused_body_is_freed_at_once(tmp_path: Path) -> None:
    """The traceback of the refusal held it until garbage was collected: ten bodies of 48 MiB cost 1.2 GB."""
    bundle = write_bundle(tmp_path / "tiny.vitx")
    numbers = b"[" + b"7, " * (256 * 768 - 1) + b"-".rjust(2 * 2**20) + b"]"
    body = INFER_BODY[: INFER_BODY.index(b"[7")].replace(b"[1, 16", b"[256, 16") + numbers + b"}]}"
    with running_server(bundle.path, "--allow-uncertified") as server:
        used = []
        for _ in range(2):
            for _ in range(20):
                status, reason = post(server, body)
                assert (status, "is not 196608 integers" in reason) == (400, True), reason
            used.append(server.metric("process_resident_memory_bytes"))
        assert used[1] - used[0] < 40 * 2**20


def test_a_compressed_body_counts_as_what_it_becomes(tmp_path: Path) -> None:
    """Pixels that hardly shrink may not be refused for what other bytes could become; a bomb stops at the bound."""
    bundle = write_bundle(tmp_path / "tiny.vitx")
    packed = gzip.compress(random.Random(0).randbytes(256 * 16 * 16 * 3), 1)  # 192 KiB
    binary = {"Content_Encoding": "gzip", "Inference_Header_Content_Length": "0"}

    def answered(server: ServerProcess) -> int:
        return server.request("POST", INFER, packed, {name.replace("_", "-"): text for name, text in binary.items()})[0]

    with running_server(bundle.path, "--allow-uncertified", "--max-memory-mib", "4") as server:
        assert [answered(server) for _ in range(30)] == [200] * 30  # and what was counted is given back
        for size in (5, 60):
            status, text = post(server, gzip.compress(bytes(size * 2**20), 9), **binary)
            assert (status, text.endswith("of 4194304 bytes")) == (503, True)
        for size in (2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20):  # whole pieces, one byte less and more
            status, text = post(server, gzip.compress(bytes(size), 9), **binary)
            assert (status, "images in one request" in text) == (413, True)
        assert answered(server) == 200
        assert server.metric('vitx_rejections_total{reason="memory"}') == 2


def test_a_body_that_goes_on_after_its_refusal_ends_with_the_limit(server: ServerProcess) -> None:
    with closing(raw(server)) as connection:
        connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):  # long before that time
            send_for(connection, b"10000\r\n" + bytes(2**16) + b"\r\n", HANG)


@pytest.mark.parametrize(
    "trailer",
    [
        b"Content-Encoding: gzip",
        b"Inference-Header-Content-Length: 5",
        b"Host: localhost",
        b"Origin: http://elsewhere.example",
        b"Content-Type: text/plain",
    ],
)
def test_trailers_are_no_headers(server: ServerProcess, trailer: bytes) -> None:
    """RFC 9110 §6.5.1: what checks or strips headers in front of the server has not seen them."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(INFER_BODY), INFER_BODY, trailer)
    with closing(raw(server)) as connection:
        connection.sendall(head % INFER.encode() + body)  # in one piece: read before the application starts
        assert b"".join(iter(partial(connection.recv, 65536), b"")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", [INFER, "/v2/models/unknown/infer"])  # one is answered before its trailers come
def test_a_trailer_that_says_close_does_not_leave_later_requests_without_an_answer(
    server: ServerProcess, path: str
) -> None:
    """The parser drops what comes behind it, so the next request on the open connection waited until it timed out."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with closing(raw(server)) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n" % (len(INFER_BODY), INFER_BODY))
        time.sleep(0.2)
        connection.sendall(b"Connection: close\r\n\r\n")
        connection.settimeout(30)  # an open connection would be idle for 75 s
        answer = b"".join(iter(partial(connection.recv, 65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n" if path == INFER else b"HTTP/1.1 404 ")


def test_a_client_of_http_1_0_is_sent_no_interim_reply(server: ServerProcess) -> None:
    head = b"POST %b HTTP/1.0\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with closing(raw(server)) as connection:
        connection.sendall(head % (INFER.encode(), len(INFER_BODY)))
        time.sleep(0.1)
        connection.sendall(INFER_BODY)
        assert b"".join(iter(partial(connection.recv, 65536), b"")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("trailers", [b"a:b\r\n" * 10_000, b"a: " + b"x" * 50_000])
def test_trailers_are_bounded_as_a_head_is(server: ServerProcess, trailers: bytes) -> None:
    with closing(raw(server)) as connection:
        head = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\nx\r\n0\r\n" + trailers)
        assert read_all(connection)[0] == 431


def test_a_connection_too_many_is_closed_whatever_of_its_body_is_to_come(server: ServerProcess) -> None:
    with ExitStack() as opened:
        open_all(server, opened)
        connection = opened.enter_context(closing(http.client.HTTPConnection(server.host, server.port, timeout=HANG)))
        # Read on for a second, up to twice the longest body, or it would be reset.
        connection.request("POST", "/v1/classify", bytes(3 * 2**19))
        assert connection.getresponse().status == 503
        surplus = opened.enter_context(closing(raw(server)))
        surplus.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx")
        assert read_all(surplus) == (503, "8 connections are open")  # and then closed
    wait_until(lambda: server.request("GET", "/v2/health/live")[0] == 200)


def test_a_header_length_beyond_the_body_is_refused_however_often_its_head_was_seen(server: ServerProcess) -> None:
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "images",
                    "datatype": "UINT8",
                    "shape": [1, 16, 16, 3],
                    "parameters": {"binary_data_size": 768},
                }
            ]
        }
    ).encode()
    sent = {"Inference_Header_Content_Length": str(len(header))}
    names = {name.replace("_", "-"): value for name, value in sent.items()}
    for _ in range(2):
        assert server.request("POST", INFER, header + bytes(768), names)[0] == 200
        expected = (400, f"Inference-Header-Content-Length is '{len(header)}': expected 0 to 5, the body's length")
        assert post(server, b"{   }", **sent) == expected


# The event loop runs in the main thread.
LARGE_JSON_FAILS_ON_THE_EVENT_LOOP = """
import threading
from vitx.serve.http import app
read = app.decode_infer_request
def beside(body, *given):
    assert len(body) <= app.SMALL_BYTES or threading.current_thread() is not threading.main_thread()
    return read(body, *given)
app.decode_infer_request = beside
from vitx.cli import main
main()
"""


def test_large_json_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    """Also behind a known head, and where a header says that the whole body is JSON, which held up everybody."""
    bundle = write_bundle(tmp_path / "tiny.vitx")
    large = INFER_BODY.replace(b"[1, 16", b"[64, 16").replace(b'"data": [7', b'"data": [' + b"7, " * (63 * 768) + b"7")
    whole = {"Inference-Header-Content-Length": str(len(large))}
    with running_server(bundle.path, "--allow-uncertified", program=LARGE_JSON_FAILS_ON_THE_EVENT_LOOP) as server:
        assert server.request("POST", INFER, INFER_BODY)[0] == 200  # its head is known from now on
        for headers in ({}, whole, whole):
            assert server.request("POST", INFER, large, headers)[0] == 200


def test_connections_beyond_the_limit_are_503(server: ServerProcess) -> None:
    with ExitStack() as opened:
        open_all(server, opened)
        status, text, headers = server.request("GET", "/v2/health/live")
        assert (status, json.loads(text)) == (503, {"error": "8 connections are open"})
        assert headers["connection"] == "close"
        assert int(headers["retry-after"]) >= 1
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
        assert (found, error) == (413, "more than 16384 bytes of JSON besides the images")
    assert after[0] - before[0] < 5
    assert after[1] - before[1] < 400 * 2**20
