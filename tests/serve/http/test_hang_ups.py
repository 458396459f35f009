"""A client that is gone before its answer: each request is counted once. An idle connection: closed."""

import socket
from pathlib import Path

import numpy as np

from bundle_fixture import png
from server_process import HANG, running_server, wait_until
from vitx.core.bundle import Bundle

HANG_UPS = 200


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
