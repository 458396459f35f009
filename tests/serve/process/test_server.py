"""The life of a server process: what it refuses to start with, its ready line, overload, signals, memory."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, Float32Array, NumpySession, colour_image, png, write_bundle
from server_process import (
    COMMAND,
    SLOW_MODEL,
    end_under_load,
    held_model,
    http_client,
    run_serve,
    running_server,
    wait_until,
    waiting,
)
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.serve.models.loading import Loader, load_warm
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import claim_port

NO_TORCH = """
import signal, sys
sys.modules["torch"] = None  # importing it now raises
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
before = [signal.getsignal(number) for number in numbers]
from vitx.cli import main
try:
    main()
finally:  # a program that runs a server has its handlers again
    assert [signal.getsignal(number) for number in numbers] == before
"""

PATH = "/v2/models/tiny/infer"


def body(number: int) -> bytes:
    """An infer request of one image whose pixels are all `number`."""
    size = IMAGE_SIZE * IMAGE_SIZE * 3
    tensor = {
        "name": "images",
        "datatype": "UINT8",
        "shape": [1, IMAGE_SIZE, IMAGE_SIZE, 3],
        "data": [number] * size,
    }
    return json.dumps({"inputs": [tensor]}).encode()


def expected_logits(number: int) -> list[float]:
    images = np.full((1, IMAGE_SIZE, IMAGE_SIZE, 3), number, dtype=np.uint8)
    return [float(value) for value in NumpySession().infer(images)[0]]


def resident_mib(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_a_certified_bundle_is_served_and_its_url_printed(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--instances", "2") as server:
        assert re.fullmatch(r"vitx: serving tiny on http://127\.0\.0\.1:\d+", server.line)
        about = server.json("/v2/models/tiny")
        assert about["certified"] is True
        assert about["vitx"]["runtime"]["side_by_side"]["batches"] == 2
        assert about["vitx"]["certificate"]["flip_rate_bound"] == pytest.approx(0.008287, rel=1e-3)
        assert 'certificate="pass"' in server.request("GET", "/metrics")[1].decode()
        assert server.stop() == 0


def test_an_uncertified_bundle_is_refused_or_shown(uncertified_bundle: Bundle) -> None:
    refused = run_serve(uncertified_bundle.path, "--port", "0")
    assert (refused.returncode, refused.stdout) == (1, "")
    remedy = "run `vitx parity RUN BUNDLE`, or give --allow-uncertified"
    assert refused.stderr == f"error: bundle '{uncertified_bundle.path}' has no certificate: {remedy}\n"
    with running_server(uncertified_bundle.path, "--allow-uncertified") as server:
        assert server.json("/v2/models/tiny")["certified"] is False


def test_a_tampered_bundle_is_refused(tiny_bundle: Bundle) -> None:
    with tiny_bundle.model_path.open("ab") as file:
        file.write(b"\0")
    refused = run_serve(tiny_bundle.path, "--port", "0", "--allow-uncertified")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {tiny_bundle.model_path} is corrupt: sha256 ")


def test_a_certificate_of_other_files_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other.vitx", name="other")
    (other.path / CERTIFICATE).write_bytes((tiny_bundle.path / CERTIFICATE).read_bytes())
    refused = run_serve(other.path, "--port", "0")
    assert refused.returncode == 1
    assert "is of other files (manifest.json differ)" in refused.stderr


def test_two_bundles_of_one_name_are_refused(tiny_bundle: Bundle) -> None:
    refused = run_serve(tiny_bundle.path, tiny_bundle.path, "--port", "0")
    assert refused.returncode == 2
    assert refused.stderr == f"error: two bundles are named 'tiny': {tiny_bundle.path} and {tiny_bundle.path}\n"


def test_a_port_in_use_is_one_message_before_anything_is_read(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run_serve(tmp_path / "missing.vitx", "--port", str(port))
    assert refused.returncode == 3
    assert refused.stderr == (
        f"error: port {port} on 127.0.0.1 is in use: stop what listens there, or choose another with --port (0: any)\n"
    )


def test_a_missing_bundle_and_a_foreign_host(tmp_path: Path, tiny_bundle: Bundle) -> None:
    refused = run_serve(tmp_path / "missing.vitx", "--port", "0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    refused = run_serve(tiny_bundle.path, "--host", "192.0.2.1", "--port", "0")
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    assert "cannot listen on 192.0.2.1 port 0" in refused.stderr
    with pytest.raises(InputError, match=r"^host 'a\.\.b' is no address of this machine: .*label"):
        claim_port("a..b", 0)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"^no bundle at '.*loop'"):
        Loader(ServeOptions()).verify(tmp_path / "loop")


def test_a_model_that_breaks_its_manifest_is_refused_at_warm_up(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "one.vitx", fault="no_batch")
    refused = run_serve(bundle.path, "--port", "0", "--allow-uncertified")
    assert refused.returncode in (1, 2)
    assert "\nerror: " in refused.stderr  # after the warning
    assert "Traceback" not in refused.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_torch_and_little_memory(tiny_bundle: Bundle) -> None:
    picture = png(colour_image(0, np.random.default_rng(0)))
    with running_server(tiny_bundle.path, program=NO_TORCH) as server:
        for _ in range(20):
            assert server.request("POST", "/v1/classify", picture, {"Content-Type": "image/png"})[0] == 200
            assert server.request("POST", PATH, body(7))[0] == 200
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert resident_mib(server.process.pid) < 300
        assert server.stop() == 0


def test_a_full_queue_is_429_with_retry_after(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    arguments = (tiny_bundle.path, "--queue", "2", "--max-batch", "1")
    with running_server(*arguments, program=held_model(gate)) as server, ThreadPoolExecutor(12) as pool:
        gate.touch()
        calls = pool.map(lambda _: server.request("POST", PATH, body(7)), range(12))
        wait_until(lambda: waiting(server) + server.metric("vitx_rejections_total") == 12)
        gate.unlink()
        answers = list(calls)
        assert {status for status, _, _ in answers} == {200, 429}
        for status, text, headers in answers:
            if status == 429:
                assert int(headers["retry-after"]) >= 1
                assert json.loads(text)["error"].startswith("queue full: 2 of 2 images are waiting; try again in ")
        refused = sum(status == 429 for status, _, _ in answers)
        assert server.metric('vitx_rejections_total{reason="queue_full"}') == refused
        assert server.request("POST", PATH, body(7))[0] == 200


def test_a_failing_batch_is_500_and_the_server_stays(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--max-batch", "1", program=SLOW_MODEL) as server:
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda number: server.request("POST", PATH, body(number)), (7, 13, 9)))
        assert [status for status, _, _ in answers] == [200, 500, 200]
        assert json.loads(answers[1][1]) == {"error": "inference failed: unlucky"}
        for (_, text, _), number in ((answers[0], 7), (answers[2], 9)):
            assert json.loads(text)["outputs"][0]["data"] == pytest.approx(expected_logits(number), rel=1e-4)


def test_a_client_that_hangs_up_frees_its_place(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with running_server(tiny_bundle.path, "--max-batch", "1", program=held_model(gate)) as server:
        gate.touch()
        connections = [server.connect() for _ in range(5)]
        for connection in connections:
            connection.request("POST", PATH, body(7))
        wait_until(lambda: waiting(server) == 5)
        for connection in connections:
            connection.close()
        wait_until(lambda: server.metric('vitx_rejections_total{reason="disconnected"}') == 5)
        assert server.metric("vitx_queue_depth") == 0
        gate.unlink()
        assert server.request("POST", PATH, body(7))[0] == 200
        assert server.metric("vitx_images_total") < 5  # those that waited never ran


def test_a_server_whose_log_nobody_reads_any_more_drains(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path) as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        assert server.request("POST", PATH, body(7))[0] == 200
        assert server.stop() == 0


def test_a_server_starts_also_where_nobody_takes_its_line(tiny_bundle: Bundle) -> None:
    """A pipe whose reader has gone, as a full disk under the file, ended it when all models were warm."""
    reader, output = os.pipe()
    os.close(reader)
    words = [*COMMAND, str(tiny_bundle.path), "--port", "0", "--instances", "1"]
    with subprocess.Popen(words, stdout=output, stderr=subprocess.PIPE, text=True) as process:
        os.close(output)
        assert process.stderr is not None
        assert any(line.startswith("next: curl ") for line in process.stderr)  # comes behind that line
        process.terminate()
        assert process.wait(20) == 0


def test_sigterm_drains_in_flight_work_and_refuses_new(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with running_server(tiny_bundle.path, "--max-batch", "1", program=held_model(gate)) as server:
        gate.touch()
        probe = server.connect()
        probe.request("GET", "/v2/health/ready")
        assert probe.getresponse().read() == b'{"ready":true}'
        accepted = [server.connect() for _ in range(4)]
        for number, connection in enumerate(accepted):
            connection.request("POST", PATH, body(20 + number))
        wait_until(lambda: waiting(server) == 4)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(probe, "GET", "/v2/health/ready") == 503)
        assert status_of(probe, "GET", "/v2/health/live") == 200
        assert status_of(probe, "POST", PATH, body(7)) == 503
        gate.unlink()
        for number, connection in enumerate(accepted):
            reply = connection.getresponse()
            assert reply.status == 200
            logits = json.loads(reply.read())["outputs"][0]["data"]
            assert logits == pytest.approx(expected_logits(20 + number), rel=1e-4)
        assert server.process.wait(20) == 0


def status_of(connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None = None) -> int:
    connection.request(method, path, data)
    reply = connection.getresponse()
    reply.read()
    return reply.status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_accepted_request(tiny_bundle: Bundle, number: signal.Signals) -> None:
    with running_server(tiny_bundle.path) as server:
        end_under_load(server, number, lambda sent: http_client(server, sent))


def test_a_second_signal_stops_at_once(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with running_server(tiny_bundle.path, "--max-batch", "1", program=held_model(gate)) as server:
        gate.touch()  # for good
        connections = [server.connect() for _ in range(40)]
        for connection in connections:
            connection.request("POST", PATH, body(7))
        wait_until(lambda: waiting(server) == 40)
        probe = server.connect()
        assert status_of(probe, "GET", "/v2/health/ready") == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(probe, "GET", "/v2/health/ready") == 503)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(20) == 128 + signal.SIGTERM  # the drain alone would take 30 s


SMALL_BUFFERS = """
import socket
from vitx.serve.process import server
claim = server.claim_port
def claim_small(*given):
    listener = claim(*given)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
server.claim_port = claim_small
from vitx.cli import main
main()
"""


def test_a_drain_waits_for_a_client_that_still_takes_its_reply(tiny_bundle: Bundle) -> None:
    """It got the half of a large reply that the kernel had: the process ended two seconds after the signal."""
    with running_server(tiny_bundle.path, program=SMALL_BUFFERS) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = client.recv(1024)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(5)
        while not reply.endswith(b"</html>\n"):
            piece = client.recv(1024)
            assert piece, f"the reply ends after {len(reply)} bytes"
            reply += piece
        assert server.process.wait(20) == 0


SHORT_DRAIN = """
from vitx.serve import limits
make = limits.Limits.__init__
limits.Limits.__init__ = lambda *given, **named: make(*given, **{"drain_seconds": 0.5, **named})
"""


def test_what_is_not_done_when_the_drain_is_over_is_a_503_in_json(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with running_server(tiny_bundle.path, "--max-batch", "1", program=SHORT_DRAIN + held_model(gate)) as server:
        assert [server.request("POST", PATH, body(7))[0] for _ in range(2)] == [200, 200]  # this head is known now
        gate.touch()
        connections = [server.connect() for _ in range(20)]
        for number, connection in enumerate(connections):
            connection.request("POST", PATH, body(7), {"X-Number": str(number)} if number % 2 else {})
        wait_until(lambda: waiting(server) == 20)
        server.process.send_signal(signal.SIGTERM)
        replies = [connection.getresponse() for connection in connections]
        told = [(reply.status, json.loads(reply.read())) for reply in replies]
        assert told == [(503, {"error": "the server is shutting down"})] * 20
        gate.unlink()
        assert server.process.wait(20) == 0
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_what_has_not_arrived_when_the_drain_is_over_is_a_503_in_json(tmp_path: Path, tiny_bundle: Bundle) -> None:
    (tmp_path / "token").write_text("a-token-of-the-test")
    managed = ("--management", "--management-token-file", tmp_path / "token")
    program = f"{SHORT_DRAIN}from vitx.cli import main; main()"
    with running_server(tiny_bundle.path, *managed, program=program) as server:
        clients = [socket.create_connection((server.host, server.port), 60) for _ in range(4)]
        paths = (PATH, "/v1/classify", "/v2/repository/index", "/v2/repository/models/tiny/load")
        for client, path in zip(clients, paths, strict=True):
            given = "Authorization: Bearer a-token-of-the-test\r\nContent-Length: 9"
            client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{given}\r\n\r\n{{".encode())
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 200)  # they have been read
        server.process.send_signal(signal.SIGTERM)
        replies = [client.makefile("rb").read().partition(b"\r\n\r\n") for client in clients]
        assert [head.split()[1] for head, _, _ in replies] == [b"503"] * 4
        assert [json.loads(text) for _, _, text in replies] == [{"error": "the server is shutting down"}] * 4
        assert server.process.wait(20) == 0
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()
        for client in clients:
            client.close()


def test_a_load_does_not_outlive_the_signal(tiny_bundle: Bundle) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS_LOAD, "serve", str(tiny_bundle.path), "--port", "0"], stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


ENDLESS_LOAD = """
import sys, time
from vitx.serve.models.loading import Loader
from vitx.serve.process import server
server._EXIT_SECONDS -= 9.5  # half a second is left
def warm(self, offer, known=None):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(1000)
Loader.warm = warm
from vitx.cli import main
main()
"""


def test_loading_runs_one_image_and_a_batch(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Recording(NumpySession):
        def _infer(self, images: UInt8Array) -> Float32Array:
            sizes.append(len(images))
            return super()._infer(images)

    monkeypatch.setattr("vitx.serve.models.loading.load_session", lambda *args, **options: Recording())
    with ExitStack() as opened:
        load_warm(tiny_bundle, ServeOptions(max_batch=6).batching, opened, device="cpu", threads=1)
    assert sorted(sizes) == [1, 2]
