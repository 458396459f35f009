"""`vitx top` against a real server: one snapshot, JSON, the live view on a terminal, and what it refuses."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from cli_fixture import Vitx
from server_process import HANG, INFER_BODY, INFER_PATH, ServerProcess, load_on, running_server
from vitx.core.bundle import Bundle
from vitx.serve.observe.top import Reading, ServerClient, quantile, snapshot

TOKEN = "0123456789abcdef"
TOP = (sys.executable, "-c", "from vitx.cli import main; main()", "top")


@pytest.fixture(scope="module")
def server(certified_original: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves tiny, certified, and other, which is not."""
    other = write_bundle(tmp_path_factory.mktemp("top") / "other.vitx", name="other")
    with running_server(certified_original.path, other.path, "--allow-uncertified") as started:
        yield started


def test_the_figures_are_what_happened_between_two_readings(server: ServerProcess) -> None:
    top = ServerClient(server.url)
    before = top.read()
    for _ in range(5):
        assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
    assert server.request("POST", "/v2/models/none/infer", INFER_BODY)[0] == 404
    found = snapshot(top.read(), before)
    tiny, other = found["models"]
    assert tiny["images_per_second"] == pytest.approx(5 / found["interval_seconds"], rel=0.1)
    assert found["requests_per_second"] == pytest.approx(6 / found["interval_seconds"], rel=0.1)
    assert tiny["mean_batch"] == 1
    assert 0 < tiny["compute_ms"]["p50"] <= tiny["compute_ms"]["p99"] < 1000
    assert (tiny["certificate"], other["certificate"]) == ("pass", "uncertified")
    assert tiny["provider"] == "CPUExecutionProvider"
    assert (other["images_per_second"], other["mean_batch"], other["compute_ms"]["p99"]) == (0, None, None)
    assert found["rejections"]["unknown_model"] == 1
    assert found["rss_mib"] > 10


def test_since_the_start_after_a_restart(server: ServerProcess) -> None:
    now = ServerClient(server.url).read()
    more = {"vitx_requests_total": {frozenset[tuple[str, str]](): 1e9}}
    before = replace(now, samples=more, moment=now.moment - 1)
    assert snapshot(now, before)["interval_seconds"] == pytest.approx(now.stats["uptime_seconds"], abs=0.001)
    younger = replace(now, stats={**now.stats, "uptime_seconds": 0.5})  # of another worker
    assert snapshot(younger, replace(now, moment=now.moment - 1))["interval_seconds"] == pytest.approx(1, abs=0.001)


def test_since_the_start_where_ray_has_asked_another_replica(server: ServerProcess) -> None:
    """What one replica ever answered is not what another answered since the reading before."""
    now = ServerClient(server.url).read()
    first, second = (
        replace(now, samples={"vitx_requests_total": {frozenset([("replica", name)]): count}}, moment=now.moment + at)
        for name, count, at in (("a", 1e6, 0.0), ("b", 2e6, 1.0))
    )
    assert snapshot(second, first)["interval_seconds"] == now.stats["uptime_seconds"]
    assert snapshot(replace(first, moment=now.moment + 2), first)["interval_seconds"] == 2


def test_one_snapshot_as_text_and_as_json(server: ServerProcess, vitx: Vitx) -> None:
    with load_on(server, 2):
        code, out, err = vitx("top", server.url, "--json", "--interval", "0.3")
        assert (code, err) == (0, "")
        assert json.loads(out)["models"][0]["images_per_second"] > 1
        code, out, err = vitx("top", f"http://{server.url}/", "--once", "--interval", "0.2")
    assert (code, err) == (0, "")
    assert re.search(r"│ tiny +│ +1 │ +[\d,]+\.\d │", out)
    assert "│ pass " in out
    assert "│ uncertified " in out
    assert "refused since the start: " in out


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({1.0: 0, 2.0: 10, float("inf"): 10}, 0.5, 1.5),
        ({1.0: 5, 2.0: 5, float("inf"): 10}, 0.25, 0.5),
        ({1.0: 5, 2.0: 5, float("inf"): 10}, 0.99, 2.0),  # somewhere beyond the largest bound
        ({1.0: 0, float("inf"): 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles_of_a_histogram(buckets: dict[float, float], share: float, expected: float | None) -> None:
    assert quantile(buckets, share) == expected


def test_nothing_answers(vitx: Vitx) -> None:
    code, out, err = vitx("top", "127.0.0.1:1", "--once")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert err.startswith("error: nothing answers at http://127.0.0.1:1 (")
    assert err.endswith("): start `vitx serve BUNDLE`, or give the address it printed\n")


def test_a_bad_address_is_refused(vitx: Vitx) -> None:
    for url in ("ftp://127.0.0.1", "http://", "http://127.0.0.1:80a", "127.0.0.1:99999", "http://[::1"):
        code, _, err = vitx("top", url, "--once")
        assert (code, "is not the address of a server" in err) == (2, True)


def test_a_server_that_is_not_vitx(tmp_path: Path, vitx: Vitx) -> None:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split("(")[1].split(")")[0]
        code, _, err = vitx("top", url, "--once")
        process.terminate()
    assert code == 3
    assert "is not `vitx serve`: it answered 404 to /v1/stats" in err


@pytest.mark.parametrize("sent", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"])
def test_what_answers_is_no_http_or_breaks_off(sent: bytes, vitx: Vitx) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        code, _, err = vitx("top", f"127.0.0.1:{listener.getsockname()[1]}", "--once")
        answered.result()
    assert (code, err.count("\n")) == (3, 1)
    assert "is not `vitx serve`: what it sent is no HTTP or, as with --tls-client-ca, ends (" in err


NO_MODELS = b'{"uptime_seconds": 5, "ready": true, "latency_ms": {}, "models": []}'


@pytest.mark.parametrize(
    ("stats", "metrics"),
    [
        (b"{}", b""),
        (b"[" * 100_000, b""),
        (NO_MODELS.replace(b"[]", b"5"), b""),
        (NO_MODELS.replace(b"[]", b"[{}]"), b""),
        (NO_MODELS.replace(b"5", b"null"), b""),
        (NO_MODELS, b"process_open_fds Inf\n"),
        (NO_MODELS.replace(b"5", b"NaN"), b""),
        (NO_MODELS.replace(b"{}", b"5"), b""),
        (NO_MODELS.replace(b"{}", b'{"p50": "x"}'), b""),
        (NO_MODELS.replace(b"[]", b'[{"name": "\\u001b[31m", "version": "1"}]'), b""),
    ],
)
def test_statistics_of_something_else(stats: bytes, metrics: bytes, vitx: Vitx) -> None:
    with answering({"/v1/stats": stats, "/metrics": metrics}) as (url, _):
        code, _, err = vitx("top", url, "--once")
    assert (code, err.count("\n")) == (3, 1)
    assert "is not `vitx serve`: its answer cannot be read (" in err


def test_the_token_does_not_go_where_a_server_points(tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with answering({"/v1/stats": NO_MODELS}) as (other, heads), answering({}, f"{other}/v1/stats") as (url, asked):
        code, _, err = vitx("top", url, "--once", "--token-file", tmp_path / "token")
    assert (code, "it answered 302 to /v1/stats" in err) == (3, True)
    assert (len(heads), [head["Authorization"] for head in asked]) == (0, [f"Bearer {TOKEN}"])


@pytest.mark.parametrize("option", ["--token-file", "--metrics-token-file"])
def test_what_is_no_token_is_said_and_not_printed(option: str, tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n{TOKEN}")
    code, _, err = vitx("top", "127.0.0.1:1", "--once", option, tmp_path / "token")
    assert (code, TOKEN in err) == (2, False)
    assert err.startswith(f"error: the token in '{tmp_path / 'token'}' is not 16 or more visible ASCII characters")


def test_an_answer_that_does_not_end(vitx: Vitx) -> None:
    with answering({"/v1/stats": b" " * (65 * 2**20)}) as (url, _):
        code, _, err = vitx("top", url, "--once")
    assert (code, "its answer to /v1/stats does not end" in err) == (3, True)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_drips_has_an_end(begin: bytes, monkeypatch: pytest.MonkeyPatch, vitx: Vitx) -> None:
    """In the status line, in a header, and in the body: each byte comes well within the time of one read."""
    monkeypatch.setattr("vitx.serve.observe.top._TIMEOUT_SECONDS", 0.5)

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(begin)
            for _ in range(400):
                connection.sendall(b" ")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip)
        code, _, err = vitx("top", f"127.0.0.1:{listener.getsockname()[1]}", "--once")
        dripping.result()
    assert (code, "nothing answers" in err, "(timed out)" in err) == (3, True, True)


@contextmanager
def answering(bodies: dict[str, bytes], location: str = "") -> Iterator[tuple[str, list[Message]]]:
    """(URL of a server with these answers by path, the heads it got); with `location` it points there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heads.append(self.headers)
            self.send_response(302 if location else 200)
            self.send_header("Location", location)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(bodies.get(self.path, b""))

        def log_message(self, *args: object) -> None:
            pass

    heads: list[Message] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", heads
        server.shutdown()


def test_a_token(certified_original: Bundle, tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    with running_server(certified_original.path, "--token-file", tmp_path / "token") as server:
        code, _, err = vitx("top", server.url, "--once")
        assert (code, err) == (2, f"error: http://{server.url}/v1/stats asks for a token: give it with --token-file\n")
        arguments = ("--json", "--interval", "0.1", "--token-file", tmp_path / "token")
        assert vitx("top", server.url, *arguments)[0] == 0


def test_metrics_with_a_token_of_their_own(certified_original: Bundle, tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "metrics").write_text(TOKEN[::-1])
    files = ("--token-file", tmp_path / "token", "--metrics-token-file", tmp_path / "metrics")
    with running_server(certified_original.path, *files) as server:
        code, _, err = vitx("top", server.url, "--once", *files[:2])
        what = "takes another token: give it with --metrics-token-file, or --token-file"
        asks = f"error: http://{server.url}/metrics {what}\n"
        assert (code, err) == (2, asks)
        code, out, err = vitx("top", server.url, "--json", "--interval", "0.1", *files)
        assert (code, err, json.loads(out)["models"][0]["name"]) == (0, "", "tiny")
        # The metrics' token opens nothing else.
        assert vitx("top", server.url, "--once", "--token-file", tmp_path / "metrics")[0] == 2


def test_metrics_that_are_off(certified_original: Bundle, vitx: Vitx) -> None:
    with running_server(certified_original.path, "--metrics", "off") as server:
        code, _, err = vitx("top", server.url, "--once")
    assert (code, err) == (3, f"error: the metrics of http://{server.url} are off: serve with --metrics token\n")


def test_samples_of_several_workers_and_models_are_added() -> None:
    """/metrics of several workers has each sample once for each; refusals are counted by model too."""
    samples = {frozenset({("reason", "memory"), ("worker", worker)}): 3.0 for worker in ("0", "1")}
    samples[frozenset({("reason", "host"), ("worker", "1")})] = 1.0
    reading = Reading("url", {}, {"vitx_rejections_total": samples})
    assert reading.by_label("vitx_rejections_total", "reason") == {"memory": 6.0, "host": 1.0}
    assert reading.by_label("vitx_rejections_total", "reason", worker="0") == {"memory": 3.0}


def counted(moment: float, **requests: float) -> Reading:
    """A reading of workers that have answered so many requests, the first of them an hour old."""
    name = "vitx_request_seconds_count"
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {name: {}, "vitx_requests_total": {}}
    for worker, count in requests.items():
        for series in samples.values():
            series[frozenset({("worker", worker), ("route", "infer")})] = count
    return Reading("url", {"uptime_seconds": 3600, "ready": True, "latency_ms": {}, "models": []}, samples, moment)


@pytest.mark.parametrize(
    ("before", "now", "a_second"),
    [
        ({"a": 100, "b": 200}, {"a": 101, "b": 202}, 3),
        ({"a": 100, "b": 200}, {"b": 202}, 2),  # a did not answer in time
        ({"b": 202}, {"a": 105, "b": 202}, 0),  # and does again: it did not gain 105 now
        ({"a": 100, "b": 200}, {"a": 7, "b": 201}, 8),  # a was replaced
        ({}, {"a": 100, "b": 200}, 0),
    ],
)
def test_a_worker_that_is_missing_or_replaced(before: dict[str, float], now: dict[str, float], a_second: float) -> None:
    assert snapshot(counted(2, **now), counted(1, **before))["requests_per_second"] == a_second


def test_without_a_reading_before_nothing_is_known_of_workers() -> None:
    """One may have been replaced, and counts for less time than the uptime says."""
    assert snapshot(counted(2, a=100, b=200), None)["requests_per_second"] == 0


def test_the_live_view_redraws_in_place_and_ends_with_an_interrupt(server: ServerProcess) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "30"}
    command = [*TOP, server.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    seen = b""
    try:
        deadline = time.monotonic() + HANG
        while seen.count(b"tiny") < 4 and time.monotonic() < deadline:
            seen += os.read(ours, 2**16)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                data = os.read(ours, 2**16)
            except OSError:  # on Linux: the other end of the terminal was closed
                break
            if not data:
                break
            seen += data
        _, said = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert seen.count(b"tiny") >= 4
    assert b"\x1b[?1049h" in seen  # a screen of its own, and back from it
    assert seen.endswith(b"\x1b[?25h\x1b[?1049l")  # the cursor is shown again
    assert b"\x1b[2J" not in seen.split(b"\x1b[?1049h", 1)[1].split(b"tiny", 2)[1]  # never cleared between two frames
    assert process.returncode == 130
    assert b"Traceback" not in said


def test_certificates_that_are_none_are_one_error(tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    code, _, err = vitx("top", "https://127.0.0.1:1", "--once", "--ca-file", tmp_path / "ca.pem")
    assert code == 2
    assert re.match(r"error: --ca-file '.*ca\.pem' cannot be read: .*; expected certificates in PEM\n", err)
