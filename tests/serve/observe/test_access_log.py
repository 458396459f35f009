"""The access log: its lines, request ids, rotation, and a disk that hangs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import colour_image, png, write_bundle
from server_process import HANG, INFER_BODY, INFER_PATH, grpc_address, run_serve, running_server, wait_until
from vitx.serve.observe import access_log
from vitx.serve.observe.access_log import AccessLog, request_id
from vitx.serve.observe.request_record import RequestRecord


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_request_is_a_line_with_its_times(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    path = tmp_path / "access.log"
    picture = png(colour_image(0, np.random.default_rng(0)))
    with running_server(bundle.path, "--allow-uncertified", "--access-log", path, "--grpc-port", "0") as server:
        path.rename(tmp_path / "probes.log")  # the lines of the start-up probes
        server.process.send_signal(signal.SIGUSR1)
        wait_until(path.exists)
        headers = server.request("POST", "/v1/classify", picture, {"X-Request-Id": "abc-1"})[2]
        assert headers["x-request-id"] == "abc-1"
        headers = server.request("POST", INFER_PATH, INFER_BODY)[2]
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        assert server.request("POST", "/v1/classify", b"no image", {"X-Request-Id": "with space"})[0] == 400
        server.request("GET", '/a"b\\' + "x" * 300)
        triton = pytest.importorskip("tritonclient.grpc")
        with triton.InferenceServerClient(grpc_address(server)) as client:
            client.is_server_ready(headers={"x-request-id": "rpc-1"})
        wait_until(lambda: len(lines_of(path)) == 5)
        classified, inferred, bad, unknown, rpc = lines_of(path)
        assert server.stop() == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", classified.pop("time"))
    times = {name: classified.pop(name) for name in ("total_ms", "decode_ms", "queue_ms", "compute_ms")}
    assert min(times.values()) >= 0
    assert sum(times.values()) <= 2 * times["total_ms"]
    assert classified.pop("bytes") > 20
    assert classified == {
        "client": "127.0.0.1",
        "id": "abc-1",
        "method": "POST",
        "path": "/v1/classify",
        "status": 200,
        "model": "tiny",
        "images": 1,
    }
    assert (inferred["id"], inferred["images"], "decode_ms" in inferred) == (headers["x-request-id"], 1, False)
    assert (bad["status"], bad["images"], bad["id"] != "with space") == (400, 0, True)
    assert (unknown["status"], unknown["path"][:5], len(unknown["path"])) == (404, '/a"b\\', 200)
    assert rpc["client"].startswith("ipv4:127.0.0.1:")
    assert rpc["bytes"] > 0
    assert (rpc["id"], rpc["method"], rpc["path"], rpc["status"]) == ("rpc-1", "gRPC", "grpc.ServerReady", 200)


def test_requests_whose_head_is_known_are_lines_like_any_other(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    path = tmp_path / "access.log"
    picture = png(colour_image(0, np.random.default_rng(0)))
    large = INFER_BODY.replace(b"[1, 16", b"[16, 16").replace(b'"data": [7', b'"data": [' + b"7, " * (15 * 768) + b"7")
    with running_server(bundle.path, "--allow-uncertified", "--access-log", path) as server:
        ids = []
        for target, body in (("/v1/classify", picture), (INFER_PATH, INFER_BODY)):
            for given in ({}, {}, {"X-Request-Id": "mine"}, {"X-Request-Id": "mine"}):
                ids.append(server.request("POST", target, body, given)[2]["x-request-id"])
        ids.append(server.request("POST", INFER_PATH, large)[2]["x-request-id"])
        ids.append(server.request("POST", INFER_PATH, b"{}")[2]["x-request-id"])
        wait_until(lambda: len(found := lines_of(path)) >= 10 and found[-1]["status"] == 400)
        lines = lines_of(path)[-10:]
    assert [line["id"] for line in lines] == ids
    assert len(set(ids)) == 7
    for first, later in ((0, 1), (2, 3), (4, 5), (6, 7)):
        assert lines[first].keys() == lines[later].keys()
        same = ("path", "status", "client", "bytes", "model", "images")
        assert [lines[first][name] for name in same] == [lines[later][name] for name in same]
        assert lines[later]["total_ms"] >= lines[later]["compute_ms"] > 0
    assert lines[3]["decode_ms"] > 0
    assert (lines[8]["images"], lines[9]["status"]) == (16, 400)


def test_ids_that_could_break_a_log_are_replaced() -> None:
    assert request_id("a" * 128) == "a" * 128
    for given in (None, "", "a" * 129, "two words", "line\n", "\xe9"):
        assert re.fullmatch("[0-9a-f]{32}", request_id(given))


def test_lines_are_dropped_when_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_WAITING", 0)
    log = AccessLog(str(tmp_path / "log"))
    for _ in range(3):
        log.write(RequestRecord("a"), "GET", "/", 200, 0.001)
    monkeypatch.setattr(access_log, "_WAITING", 10)
    log.write(RequestRecord("b"), "GET", "/", 200, 0.001)
    log.close()
    (line,) = lines_of(tmp_path / "log")
    assert (line["id"], line["lines_dropped"], line["total_ms"]) == ("b", 3, 1.0)


def test_a_full_disk_is_reported_once_and_what_was_lost_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It wrote 15,876 equal lines in 75 s."""
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = AccessLog(str(path))
    for lost in range(1, 51):
        log.write(RequestRecord("a"), "GET", "/", 200, 0.001)
        wait_until(lambda lost=lost: log._failed == lost)
    path.unlink()
    log.reopen()
    log.write(RequestRecord("b"), "GET", "/", 200, 0.001)
    log.close()
    assert capsys.readouterr().err.count("cannot write the access log") == 1
    (line,) = lines_of(path)
    assert (line["id"], line["lines_dropped"]) == ("b", 50)


# The disk has room for two of the first four lines and `cut` bytes; later it has room again.
NEARLY_FULL = """
import os, resource, sys
from server_process import wait_until
from vitx.serve.observe.access_log import AccessLog
from vitx.serve.observe.request_record import RequestRecord

def write(*ids):
    for each in ids:
        log.write(RequestRecord(each), "GET", "/", 200, 0.001)

target, path, cut, *moved = sys.argv[1:]
log = AccessLog(target)
write("1")
wait_until(lambda: os.path.getsize(path))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * os.path.getsize(path) + int(cut), resource.RLIM_INFINITY))
write("2", "3", "4")
wait_until(lambda: log._failed)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for new in moved:
    os.rename(path, new)
    log.reopen()
write("5")
log.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE")
@pytest.mark.parametrize(
    ("to", "cut"),
    [("file", -1), ("file", 0), ("file", 9), ("stdout", 9), ("moved", 9)],  # without its newline a line is whole
)
def test_a_disk_that_takes_a_part_of_the_lines_breaks_one_at_most(tmp_path: Path, to: str, cut: int) -> None:
    path, moved = tmp_path / "log", [tmp_path / "old"] if to == "moved" else []
    target = "-" if to == "stdout" else path
    command = [sys.executable, "-c", NEARLY_FULL, target, path, str(cut), *moved]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    with path.open("wb") as file:
        ran = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, env=environment, timeout=HANG)
    assert ran.stderr == f"vitx: cannot write the access log '{target}': File too large; 2 lines lost\n"
    lines = [line for each in [*moved, path] for line in each.read_bytes().splitlines()]
    ids = [json.loads(line)["id"] if line.endswith(b"}") else "broken" for line in lines]
    assert ids == ["1", "2", *["broken"] * (cut > 0), "5"]
    assert json.loads(lines[-1])["lines_dropped"] == 2
    assert path.read_bytes().startswith(b"{")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    refused = run_serve(bundle.path, "--allow-uncertified", "--access-log", tmp_path / "no" / "log", "--port", "0")
    assert refused.returncode == 2
    assert f"cannot write the access log '{tmp_path}/no/log': No such file or directory" in refused.stderr
