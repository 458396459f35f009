"""An HTTP/1.1 client that costs little, for Linux: one thread over epoll, prepared requests, connections kept alive."""

import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

Address = tuple[str, int]

_LENGTH = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
_SEND_BUFFER = 2**20  # room for a whole request: `send` must not wait for the server to read
_PATIENCE_SECONDS = 30.0  # for an answer


@dataclass
class Load:
    """What a load saw. `answers` are pairs of a status and the seconds from sending a request to its whole answer.

    seconds: the time that `answers` were collected in. client_share: of one core, used by this process meanwhile.
    late: seconds from the scheduled moment of each request to its sending; of an open loop only.
    unanswered: requests whose connection the server closed.
    """

    seconds: float = 0.0
    client_share: float = 0.0
    answers: list[tuple[int, float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    unanswered: int = 0

    def times(self, *statuses: int) -> list[float]:
        return [seconds for status, seconds in self.answers if status in statuses]

    def rate(self) -> float:
        """Answers with status 200 a second."""
        return len(self.times(200)) / self.seconds

    def require_answers(self, name: str) -> None:
        """Raise RuntimeError unless the server, here called `name`, answered every request with status 200."""
        if self.unanswered or set(self.counts()) != {200}:
            raise RuntimeError(f"{name}: statuses {self.counts()}, {self.unanswered} unanswered")

    def counts(self) -> dict[int, int]:
        """Answers by status."""
        statuses = [status for status, _ in self.answers]
        return {status: statuses.count(status) for status in sorted(set(statuses))}


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """None for an empty sequence."""
    return round(1e3 * float(np.percentile(seconds, percent)), 3) if len(seconds) else None


class Connection:
    """One connection, one request at a time. `sent` is when the last one left, by time.perf_counter()."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(address, timeout=_PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.sent = 0.0
        self.answer = b""
        self._part = b""
        self._length = 0

    def send(self, request: bytes) -> None:
        self.sent = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> int | None:
        """The status, once the answer is whole; it is then `answer`. Raises ConnectionError when the server closed."""
        data = self.socket.recv(2**16)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        data = self._part + data if self._part else data
        if not self._length:
            end = data.find(b"\r\n\r\n")
            found = _LENGTH.search(data, 0, end) if end >= 0 else None
            if end >= 0 and found is None:
                raise ConnectionError(f"an answer without a length: {data[:end]!r}")
            self._length = end + 4 + int(found[1]) if found is not None else 0
        if not self._length or len(data) < self._length:
            self._part = data
            return None
        self.answer, self._part, self._length = data, b"", 0
        return int(data[9:12])

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send one request and wait: the status and the whole answer, head included."""
        self.send(request)
        while (status := self.receive()) is None:
            pass
        return status, self.answer

    def close(self) -> None:
        self.socket.close()


class _Pool:
    """Open connections, and which of them have something to read."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._poll = select.epoll()
        self._by_file: dict[int, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_file)

    def open(self) -> Connection:
        connection = Connection(self._address)
        self._by_file[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, select.EPOLLIN)
        return connection

    def close(self, connection: Connection) -> None:
        self._poll.unregister(connection.socket)
        del self._by_file[connection.socket.fileno()]
        connection.close()

    def ready(self, seconds: float = _PATIENCE_SECONDS) -> list[Connection]:
        """Wait for at most `seconds`; raise TimeoutError when a server has not answered for _PATIENCE_SECONDS."""
        events = self._poll.poll(seconds)
        if not events and seconds >= _PATIENCE_SECONDS:
            raise TimeoutError(f"no answer for {seconds:g} s")
        return [self._by_file[file] for file, _ in events]

    def close_all(self) -> None:
        for connection in list(self._by_file.values()):
            self.close(connection)
        self._poll.close()


def closed_loop(
    address: Address,
    requests: Sequence[bytes],
    *,
    connections: int,
    seconds: float = float("inf"),
    warm_up: float = 0.0,
    count: int = sys.maxsize,
) -> Load:
    """Each connection sends its next request when it has the answer to the last one, the requests in turn.

    Ends after `warm_up` and `seconds`, or `count` requests. Counted are the answers that came in between, whenever they
    were asked for: without those begun in the warm-up a slow server would lose more of its rate than a fast one. A
    connection that the server closes is opened again.
    """
    load, turn, seen = Load(), cycle(requests), []
    started, cpu = time.perf_counter(), time.process_time()
    start = started + warm_up
    end = start + seconds
    pool = _Pool(address)
    for _ in range(min(connections, count)):
        pool.open().send(next(turn))
    left = count - len(pool)
    while pool:
        for connection in pool.ready():
            try:
                status = connection.receive()
            except ConnectionError:
                load.unanswered += 1
                pool.close(connection)
                connection = pool.open()
            else:
                if status is None:
                    continue
                seen.append((connection.sent, status, time.perf_counter() - connection.sent))
            if left and time.perf_counter() < end:
                left -= 1
                connection.send(next(turn))
            else:
                pool.close(connection)
    pool.close_all()
    now = time.perf_counter()
    load.client_share = (time.process_time() - cpu) / (now - started)
    load.seconds = min(now, end) - start
    load.answers = [(status, taken) for sent, status, taken in seen if start <= sent + taken <= end]
    return load


def open_loop(address: Address, requests: Sequence[bytes], *, rate: float, seconds: float, connections: int) -> Load:
    """Requests arrive at `rate` a second by exponential gaps (seed 0), whatever becomes of those before them.

    An arrival takes an idle connection, and opens one when there is none. Raises RuntimeError when `connections` are
    busy: the client could then not keep the rate.
    """
    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    load, turn = Load(seconds=seconds), cycle(requests)
    start, cpu = time.perf_counter(), time.process_time()
    due = deque((start + np.cumsum(gaps)).tolist())
    pool, idle = _Pool(address), list[Connection]()
    while due or len(idle) < len(pool):
        while due and due[0] <= time.perf_counter():
            if not idle and len(pool) >= connections:
                raise RuntimeError(f"{connections} connections are busy at {rate:g} requests a second")
            connection = idle.pop() if idle else pool.open()
            connection.send(next(turn))
            load.late.append(connection.sent - due.popleft())
        for connection in pool.ready(max(0.0, due[0] - time.perf_counter()) if due else _PATIENCE_SECONDS):
            try:
                status = connection.receive()
            except ConnectionError:
                load.unanswered += connection not in idle
                idle = [other for other in idle if other is not connection]
                pool.close(connection)
                continue
            if status is not None:
                load.answers.append((status, time.perf_counter() - connection.sent))
                idle.append(connection)
    pool.close_all()
    load.client_share = (time.process_time() - cpu) / (time.perf_counter() - start)
    return load
