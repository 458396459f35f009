"""A real `vitx serve` in another process: real sockets, real signals; readiness is polled, never guessed by a sleep."""

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HANG = 120.0  # seconds after which a wait has failed: what is slow for want of a core has not
COMMAND = (sys.executable, "-c", "from vitx.cli import main; main()", "serve")

# A request with one grey image for a bundle of bundle_fixture that is named tiny.
INFER_PATH = "/v2/models/tiny/infer"
INFER_BODY = json.dumps(
    {"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [7] * 768}]}
).encode()

# A server whose model, except for the zeros of the warm-up, does what is in the place of "wait", and fails for an image
# whose first value is 13.
_OTHER_MODEL = """
import os, time
from vitx.runtimes import Session
from vitx.serve.models import loading
load = loading.load_session
class Other(Session):
    def __init__(self, session):
        super().__init__()
        self.session = session
    def describe(self):
        return self.session.describe()
    def _infer(self, images):
        if images.any():
            wait
        if (images[:, 0, 0, 0] == 13).any():
            raise RuntimeError("unlucky")
        return self.session.infer(images)
loading.load_session = lambda *args, **options: Other(load(*args, **options))
from vitx.cli import main
main()
"""
SLOW_MODEL = _OTHER_MODEL.replace("wait", "time.sleep(0.2)")


def held_model(gate: Path) -> str:
    """A server whose model waits as long as the file `gate` is there."""
    return _OTHER_MODEL.replace("wait", f"while os.path.exists({str(gate)!r}): time.sleep(0.005)")


_HELD_DECODING = """
import os, threading, time
from vitx.serve.http import decode as pool
decoded = pool.decoded
def held(data, steps, limit):
    image = decoded(data, steps, limit)
    while len(data) > 2**16 and os.path.exists(gate):
        open(f"{gate}.{threading.get_ident()}", "w").close()
        time.sleep(0.005)
    return image
pool.decoded = held
from vitx.cli import main
main()
"""


def held_decoding(gate: Path) -> str:
    """A server that waits with each image of more than 64 KiB, once decoded, as long as the file `gate` is there.

    Each thread that waits has made a file beside it.
    """
    return f"gate = {str(gate)!r}{_HELD_DECODING}"


class ServerProcess:
    """A started server; `url` is host:port."""

    def __init__(self, process: "subprocess.Popen[str]", line: str) -> None:
        self.process = process
        self.line = line
        self.host, _, port = line.rpartition("://")[2].rpartition(":")
        self.port = int(port)
        self.grpc_url = ""
        self._connections: list[http.client.HTTPConnection] = []

    @property
    def url(self) -> str:
        return f"{self.host}:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is closed with the server, if not before."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HANG)
        self._connections.append(connection)
        return connection

    def close_connections(self) -> None:
        for connection in self._connections:
            connection.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Make one request on a new connection; return (status, body, headers in lower case)."""
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers or {}))
            reply = connection.getresponse()
            return reply.status, reply.read(), {name.lower(): value for name, value in reply.getheaders()}
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        return json.loads(self.request("GET", path)[1])

    def metric(self, name: str) -> float:
        """The sum of a metric's samples that have the labels of `name`, in any order: `name_total{label="value"}`."""
        text = self.request("GET", "/metrics")[1].decode()
        start, _, labels = name.partition("{")
        wanted = [label for label in labels.rstrip("}").split(",") if label]
        lines = [line for line in text.splitlines() if line.startswith((start + "{", start + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))

    def stop(self) -> int:
        """End the server with one SIGTERM; return its exit code. A drain is cut off after 30 s, so it gets less."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def grpc_address(server: ServerProcess) -> str:
    """host:port of a server's gRPC, from the second line that it prints, which comes when gRPC is ready."""
    if not server.grpc_url:
        assert server.process.stdout is not None
        server.grpc_url = server.process.stdout.readline().split()[-1]
    return server.grpc_url


@contextmanager
def running_server(
    *arguments: str | Path, program: str | None = None, kind: type[ServerProcess] = ServerProcess
) -> Iterator[ServerProcess]:
    """Start `vitx serve ARGUMENTS` on a free port, wait until it is ready, and stop it at the end.

    program: Python source to run instead of the command, with the same arguments in sys.argv. One batch runs at a time
    where the arguments do not say how many: by default a server loads its models for a batch alone and for several.
    """
    command = COMMAND if program is None else (sys.executable, "-c", program, "serve")
    if not {"--instances", "--threads"} & set(arguments):
        arguments += ("--instances", "1")
    process = subprocess.Popen(
        [*command, *map(str, arguments), "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    server = None
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise AssertionError(f"the server ended with {process.wait(20)}: {process.communicate()[1]}")
        server = kind(process, line)
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 200)
        yield server
    finally:
        if server is not None:
            server.close_connections()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate(timeout=HANG)  # a worker that its parent has left behind may hold the pipes


def wait_until(condition: Any, seconds: float = HANG) -> None:
    """Poll `condition()` until it is true; fail after `seconds`.

    Every 10 ms, or more seldom when looking takes long: those who are waited for need the processor.
    """
    deadline = time.monotonic() + seconds
    while True:
        start = time.monotonic()
        if condition():
            return
        assert start < deadline, "the condition did not become true in time"
        time.sleep(max(0.01, 4 * (time.monotonic() - start)))


def free_port() -> int:
    """Below those that the system gives to outgoing connections: one of these may be taken before it is listened on."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := 10_000 + secrets.randbelow(20_000)))
            return port


def is_running(pid: int) -> bool:
    """Not one that has ended and waits to be asked for its exit code: where process 1 is no init, nobody does."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def open_files(name: str) -> int:
    """How many files whose path contains `name` this process has open: what other tests have left may close."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them, and what was closed in the meantime
            found += name in os.readlink(descriptor)
    return found


def waiting(server: ServerProcess) -> float:
    """How many images wait or run."""
    return server.metric("vitx_queue_depth") + server.metric("vitx_running_images")


def run_serve(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run `vitx serve` to its end, for cases in which it must refuse to start."""
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=HANG, check=False)


@contextmanager
def load_on(server: ServerProcess, clients: int = 8) -> Iterator[Callable[[], int]]:
    """Keep `clients` connections busy. Yields a count of the replies so far; at the end all must have been 200."""
    stop, failures, answered = threading.Event(), list[str](), [0] * clients

    def client(index: int) -> None:
        connection = server.connect()
        while not stop.is_set():
            connection.request("POST", INFER_PATH, INFER_BODY)
            reply = connection.getresponse()
            text = reply.read()
            if reply.status != 200:
                failures.append(f"{reply.status} {text!r}")
            answered[index] += 1

    with ThreadPoolExecutor(clients) as pool:
        jobs = [pool.submit(client, index) for index in range(clients)]
        try:
            yield lambda: sum(answered)
        finally:
            stop.set()
            for job in jobs:
                job.result(HANG)
    assert failures == []


def http_client(server: ServerProcess, sent: Callable[[], None] = lambda: None) -> Callable[[], str]:
    """A client that makes one request per call and returns the status, or "closed" if there was no reply.

    sent: called when a request's bytes have left, or could not.
    """
    connection = server.connect()

    def ask() -> str:
        try:
            try:
                connection.request("POST", INFER_PATH, INFER_BODY)
            finally:
                sent()
            reply = connection.getresponse()
            reply.read()
        except (OSError, http.client.HTTPException):
            connection.close()  # the next call connects again
            return "closed"
        return str(reply.status)

    return ask


def end_under_load(
    server: ServerProcess,
    number: signal.Signals,
    new_client: Callable[[Callable[[], None]], Callable[[], str]],
    *,
    good: str = "200",
    refused: str | None = "503",
    gone: str = "closed",
    clients: int = 16,
    others: Iterable[int] = (),
) -> None:
    """Send a busy server, and `others` of its processes, a signal that ends it.

    It must exit with 0 and answer every request that it had accepted.

    Each client makes requests until a reply is not `good`. That one may be `refused`, or `gone` if the signal came
    before the request was sent; anything else is a lost request. Clients that do not say when they have sent one are
    taken to send at once.
    """
    answered, lost, signalled = [0], list[str](), threading.Event()

    def load(_: int) -> None:
        late = False

        def sent() -> None:
            nonlocal late
            late = signalled.is_set()

        ask = new_client(sent)
        while True:
            sent()
            outcome = ask()
            if outcome == good:
                answered[0] += 1
                continue
            if outcome != refused and not (late and outcome == gone):
                lost.append(outcome)
            return

    with ThreadPoolExecutor(clients) as pool:
        jobs = [pool.submit(load, index) for index in range(clients)]
        wait_until(lambda: answered[0] > 100)
        signalled.set()
        for process in (server.process.pid, *others):
            os.kill(process, number)
        for job in jobs:
            job.result(HANG)
    assert server.process.wait(20) == 0
    assert lost == []
