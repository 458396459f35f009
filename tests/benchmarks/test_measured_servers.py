"""Servers that are measured: one that ends before it is stopped, answers nothing, or refuses all is no result."""

import os
import signal
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import server as server_benchmark
import with_wrk

from support.fuzzed_server import FuzzedServer, fuzz_server
from support.http_load import Load
from support.server_peers import _running, free_port
from vitx.core.bundle import Bundle

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def web_server(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]


def kill(process: "subprocess.Popen[str]", client_saw: Exception) -> None:
    process.kill()
    raise client_saw


def test_a_server_that_dies_while_it_is_measured_is_named() -> None:
    port = free_port()
    client_saw = ConnectionRefusedError()
    with (
        pytest.raises(RuntimeError, match="peer ended with -9 while it was measured") as raised,
        _running("peer", web_server(port), port, "/") as process,
    ):
        kill(process, client_saw)
    assert raised.value.__context__ is client_saw


def test_a_server_that_died_unnoticed_is_an_error_too() -> None:
    port = free_port()
    with (
        pytest.raises(RuntimeError, match="peer ended with -9 while it was measured"),
        _running("peer", web_server(port), port, "/") as process,
    ):
        process.kill()


def test_an_error_beside_a_running_server_is_raised_as_it_is_and_the_server_ends() -> None:
    port = free_port()
    with pytest.raises(ZeroDivisionError), _running("peer", web_server(port), port, "/") as process:
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGTERM


def fuzzed(bundle: Path, measure: Callable[[FuzzedServer, Namespace], dict[str, Any]]) -> dict[str, Any]:
    return fuzz_server(Namespace(bundle=bundle, out=None), [], measure)


def test_a_server_to_fuzz_that_does_not_start_ends_the_script_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        fuzzed(tmp_path / "none.vitx", lambda _server, _options: pytest.fail("nothing is measured"))


def test_a_fuzzed_server_is_stopped_and_its_exit_code_is_reported(tiny_bundle: Bundle) -> None:
    report = fuzzed(tiny_bundle.path, lambda server, _options: {"address": server.address, "grpc": server.grpc_address})
    host, port = report["address"]
    assert host == "127.0.0.1"
    assert port > 0
    assert report["grpc"] != f"{host}:{port}"
    assert report["exit_code"] == 0


def test_a_fuzzed_server_that_dies_is_named(tiny_bundle: Bundle) -> None:
    def measure(server: FuzzedServer, _options: Namespace) -> dict[str, Any]:
        os.kill(server.process, signal.SIGKILL)
        raise ValueError("no VmHWM")

    with pytest.raises(RuntimeError, match="the server ended with -9 while it was measured"):
        fuzzed(tiny_bundle.path, measure)


@pytest.mark.parametrize(
    ("answers", "holds"),
    [
        ([(200, 0.4), (429, 0.001)], True),
        ([(200, 0.4), (429, 0.02)], False),
        ([(200, 0.4), (500, 0.001)], False),
        ([(200, 0.4)], False),
        ([(503, 0.001)], False),
    ],
    ids=["some refused at once", "refused late", "an error", "none refused", "all refused"],
)
def test_a_server_under_overload_answers_some_and_refuses_the_rest_at_once(
    answers: list[tuple[int, float]], holds: bool
) -> None:
    row = server_benchmark._overloaded(Load(seconds=1.0, answers=answers), 1.0, 10.0)
    assert row["holds"] is holds


@pytest.fixture
def slow_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(with_wrk, "counts", lambda _server: (0, 0))
    return SimpleNamespace(name="slow", address=("127.0.0.1", 1), cpu_seconds=lambda: 0.0)


@pytest.fixture
def wrk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A wrk that says what it is told to."""
    program = tmp_path / "wrk"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def says(text: str) -> None:
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return says


NO_ANSWER = "99% 0.00us\nRequests/sec:      0.00"


def test_a_warm_up_without_an_answer_is_one(slow_server: Any, wrk: Callable[[str], None]) -> None:
    wrk(NO_ANSWER)
    assert "Requests/sec" in with_wrk.load(slow_server, Path("request.lua"), "/", 1)


def test_a_turn_without_an_answer_asks_for_more_seconds(slow_server: Any, wrk: Callable[[str], None]) -> None:
    wrk(NO_ANSWER)
    with pytest.raises(RuntimeError, match="slow: no answer in 1 s, more --seconds are needed"):
        with_wrk.turn(slow_server, Path("request.lua"), "/", 1)


def test_a_refused_request_ends_the_run_with_wrk(slow_server: Any, wrk: Callable[[str], None]) -> None:
    wrk("99% 1.00ms\nNon-2xx or 3xx responses: 3\nRequests/sec: 10.00")
    with pytest.raises(RuntimeError, match=r"(?s)slow: .*Non-2xx"):
        with_wrk.load(slow_server, Path("request.lua"), "/", 1)
