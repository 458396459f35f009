"""Real sockets: what holds for a request holds alike whether the head cache knows its head or not."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import pytest

from server_process import HANG, INFER_BODY, INFER_PATH, ServerProcess, held_model, running_server, wait_until, waiting
from vitx.core.bundle import Bundle

PAIRS = pytest.mark.parametrize("known", [False, True], ids=["new head", "known head"])
FOUR = json.dumps(
    {"inputs": [{"name": "images", "datatype": "UINT8", "shape": [4, 16, 16, 3], "data": [9] * 4 * 768}]}
).encode()


def raw(body: bytes, path: str = INFER_PATH) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status of the next reply, and its body; (0, b"") if the connection ends."""
    file = connection.makefile("rb")
    if not (line := file.readline()):
        return 0, b""
    length = 0
    while (header := file.readline().lower()) != b"\r\n":
        if header.startswith(b"content-length:"):
            length = int(header.split(b":")[1])
    return int(line.split()[1]), file.read(length)


@contextmanager
def connection_to(server: ServerProcess, known: bool, path: str = INFER_PATH) -> Iterator[socket.socket]:
    with closing(socket.create_connection((server.host, server.port), timeout=HANG)) as connection:

        def answered() -> bool:
            connection.sendall(raw(INFER_BODY, path))
            return answer(connection)[0] == 200

        if known:
            wait_until(answered)  # a busy machine may miss a short deadline
        yield connection


@PAIRS
def test_a_deadline_counts_from_the_arrival_of_the_head(tiny_bundle: Bundle, known: bool) -> None:
    with running_server(tiny_bundle.path, "--timeout-ms", "1500") as server, connection_to(server, known) as connection:
        data = raw(INFER_BODY)
        connection.sendall(data[:-100])
        time.sleep(1.6)
        connection.sendall(data[-100:])
        status, text = answer(connection)
        assert (status, b"deadline" in text) == (503, True)


@PAIRS
def test_an_upload_that_had_begun_is_answered_while_the_server_drains(tiny_bundle: Bundle, known: bool) -> None:
    with running_server(tiny_bundle.path) as server, connection_to(server, known) as connection:
        data = raw(INFER_BODY)
        connection.sendall(data[:-100])
        assert server.request("GET", "/v2/health/live")[0] == 200  # so what came before has been read
        codes: list[int] = []
        stopping = Thread(target=lambda: codes.append(server.stop()))
        stopping.start()
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 503)
        assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 503
        time.sleep(3)
        connection.sendall(data[-100:])
        assert answer(connection)[0] == 200
        stopping.join()
        assert codes == [0]


@PAIRS
def test_who_hangs_up_within_a_body_is_counted_and_who_is_slow_counts_once(
    tiny_bundle: Bundle, tmp_path: Path, known: bool
) -> None:
    log = tmp_path / "access.log"
    with running_server(tiny_bundle.path, "--access-log", log, "--body-timeout", "2") as server:
        with connection_to(server, known) as connection:
            connection.sendall(raw(INFER_BODY)[:-100])
            assert server.request("GET", "/v2/health/live")[0] == 200  # so what came before has been read
        wait_until(lambda: server.metric('vitx_rejections_total{reason="disconnected"}') == 1)
        with connection_to(server, known) as connection:
            connection.sendall(raw(INFER_BODY)[:-100])
            assert answer(connection)[0] == 408
        wait_until(lambda: server.metric('vitx_rejections_total{reason="slow_client"}') == 1)
        assert server.metric('vitx_rejections_total{reason="disconnected"}') == 1
        assert server.stop() == 0
    lines = [line for line in map(json.loads, log.read_text().splitlines()) if line["path"] == INFER_PATH]
    assert [line["status"] for line in lines if line["status"] != 200] == [499]


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", raw(FOUR)])
@PAIRS
def test_who_hangs_up_with_requests_behind_the_first_is_noticed(
    tmp_path: Path, tiny_bundle: Bundle, behind: bytes, known: bool
) -> None:
    """12 images of clients that stay, and 20 of others, which never run."""
    gate = tmp_path / "gate"
    with running_server(tiny_bundle.path, "--max-batch", "4", program=held_model(gate)) as server:
        path = f"{INFER_PATH}?{known}"
        if known:
            with connection_to(server, known, path):
                pass
        ran = server.metric("vitx_images_total")
        gate.touch()
        sockets = [socket.create_connection((server.host, server.port), timeout=HANG) for _ in range(8)]
        for place, each in enumerate(sockets):
            each.sendall(raw(FOUR, path if known else f"{path}{place}") + (b"" if place < 3 else behind))
            wait_until(lambda count=4 * (place + 1): waiting(server) == count)
        for each in sockets[3:]:
            each.close()
        wait_until(lambda: server.metric('vitx_rejections_total{reason="disconnected"}') == 5)
        gate.unlink()
        for each in sockets[:3]:
            assert answer(each)[0] == 200
            each.close()
        wait_until(lambda: waiting(server) == 0)
        assert server.metric("vitx_images_total") - ran <= 16  # a batch may stand by when they go
        server.stop()
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_a_model_that_is_not_served_any_more_is_no_label(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Of a head that was known while it was served."""
    token = tmp_path / "token"
    token.write_text("management-token")
    management = {"Authorization": "Bearer management-token"}
    with (
        running_server(tiny_bundle.path, "--management", "--management-token-file", token) as server,
        connection_to(server, known=True) as connection,
    ):
        assert server.request("POST", "/v2/repository/models/tiny/unload", b"", management)[0] == 200
        connection.sendall(raw(INFER_BODY))
        assert answer(connection)[0] == 404
        assert server.metric('vitx_requests_total{status="404",model=""}') == 1
        assert server.metric('vitx_requests_total{status="404",model="tiny"}') == 0
