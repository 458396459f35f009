"""A server under ten times its capacity, and with a thousand clients that hang up: answers, memory, open files."""

import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fuzz import held_by
from server_process import HANG, INFER_BODY, INFER_PATH, SLOW_MODEL, ServerProcess, running_server, wait_until
from vitx.core.bundle import Bundle

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

QUEUE = 4  # images; with two that run, in batches of one that take .2 s each
CLIENTS = 60  # ten times of what finds a place
HELD_BACK_MIB = 24  # memory that may stay; each leaked request would hold kilobytes


@pytest.fixture
def slow(tiny_bundle: Bundle) -> Iterator[ServerProcess]:
    """Five images a second."""
    arguments = ("--max-batch", "1", "--queue", str(QUEUE), "--timeout-ms", str(int(1000 * HANG)))
    with running_server(tiny_bundle.path, *arguments, program=SLOW_MODEL) as server:
        yield server


def test_overload_is_refused_at_once_and_accepted_requests_are_in_time(slow: ServerProcess) -> None:
    before = held_by(slow.process.pid)
    end, seen = time.monotonic() + HANG, Counter[int]()

    def client(_: int) -> list[tuple[int, float, bool]]:
        """Status, seconds, and whether a refusal says when to come back."""
        answers, connection = [], slow.connect()
        while time.monotonic() < end and not (seen[200] > 12 and seen[429] > seen[200]):
            started = time.monotonic()
            connection.request("POST", INFER_PATH, INFER_BODY)
            reply = connection.getresponse()
            reply.read()
            answers.append((reply.status, time.monotonic() - started, int(reply.getheader("Retry-After", "0")) >= 1))
            seen[reply.status] += 1
            if reply.status != 200:
                time.sleep(0.05)
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [answer for found in pool.map(client, range(CLIENTS)) for answer in found]
    counts = Counter(status for status, _, _ in answers)
    assert set(counts) == {200, 429}
    assert counts[429] > counts[200]
    assert all(says_when for status, _, says_when in answers if status == 429)
    assert max(seconds for status, seconds, _ in answers if status == 200) < HANG  # the deadline
    # Five a second leave: what was not refused for having no place has been answered.
    assert slow.metric('vitx_rejections_total{reason="queue_full"}') == counts[429]
    assert held_by(slow.process.pid)["rss_mib"] - before["rss_mib"] < HELD_BACK_MIB
    wait_until(lambda: slow.metric("vitx_queue_depth") == slow.metric("vitx_running_images") == 0)
    assert slow.request("POST", INFER_PATH, INFER_BODY)[0] == 200


def hang_up(server: ServerProcess, request: bytes) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(request)


def test_a_thousand_clients_that_hang_up_leak_nothing(tiny_bundle: Bundle) -> None:
    head = f"POST {INFER_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(INFER_BODY)}\r\n\r\n".encode()
    whole = head + INFER_BODY
    requests = [whole, head, whole[: len(whole) // 2], head[:20]]  # mid-request, mid-body, mid-head
    with running_server(tiny_bundle.path) as server, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: hang_up(server, requests[number % 4]), range(100)))  # allocations that happen once
        wait_until(lambda: server.metric("vitx_queue_depth") == server.metric("vitx_running_images") == 0)
        before = held_by(server.process.pid)
        list(pool.map(lambda number: hang_up(server, requests[number % 4]), range(1000)))
        wait_until(lambda: held_by(server.process.pid)["files"] <= before["files"] + 1)  # + 1: the next question's
        wait_until(lambda: server.metric("vitx_queue_depth") == server.metric("vitx_running_images") == 0)
        assert held_by(server.process.pid)["rss_mib"] - before["rss_mib"] < HELD_BACK_MIB
        assert server.metric('vitx_requests_total{route="infer",status="5') == 0
        assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
        assert server.stop() == 0  # a request that had not been let go would hold the drain
