"""Joining a cluster, with a module that stands for Ray."""

import logging
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.core.ray_connection import cluster_nodes, joined


class Ray:
    """Notes what was asked of it; `fails` is raised by init."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: Exception | None = None

    def init(self, address: str, **options: Any) -> None:
        self.calls.append((address, options, os.environ.get("RAY_USAGE_STATS_ENABLED")))
        if self.fails is not None:
            raise self.fails

    def is_initialized(self) -> bool:
        return bool(self.calls) and self.fails is None

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2}}, {"Alive": False}, {"Alive": True, "Resources": {}}]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    return made


def test_a_local_cluster_ends_with_the_block(ray: Ray) -> None:
    with joined("local", num_cpus=3):
        options = {"log_to_driver": True, "logging_level": logging.ERROR, "include_dashboard": False, "num_cpus": 3}
        assert ray.calls == [("local", options, "0")]
    assert ray.calls[1:] == ["shutdown"]
    with pytest.raises(KeyError), joined("local", log_to_driver=False):
        raise KeyError
    assert ray.calls[2][1]["log_to_driver"] is False
    assert ray.calls[3:] == ["shutdown"]


def test_another_cluster_gets_no_options_of_a_local_one(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    with joined("auto", num_cpus=3):
        assert ray.calls == [("auto", {"log_to_driver": True, "logging_level": logging.ERROR}, "1")]


@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("gone"), ValueError("gone")])
def test_a_cluster_that_cannot_be_joined_is_named(ray: Ray, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray.fails = error
    with pytest.raises(EnvironmentMissing) as caught, joined("auto"):
        pass
    assert str(caught.value) == "no Ray cluster at 'auto': gone"
    assert "shutdown" not in ray.calls


def test_a_cluster_that_may_ask_for_a_token_is_told_how(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray.fails = ConnectionError("gone")
    with pytest.raises(EnvironmentMissing) as caught, joined("auto"):
        pass
    assert str(caught.value) == ("no Ray cluster at 'auto': gone. If it asks for Ray's token, set RAY_AUTH_MODE=token")


def test_a_socket_whose_path_is_too_long_is_told_how_to_shorten_it(ray: Ray) -> None:
    ray.fails = OSError("AF_UNIX path length cannot exceed 107 bytes")
    with pytest.raises(EnvironmentMissing, match="Set RAY_TMPDIR to a folder with a short path"), joined("local"):
        pass


@pytest.mark.parametrize("port", [99999, 10**20])
def test_a_port_that_is_none_is_no_cluster(ray: Ray, port: int) -> None:
    with (
        pytest.raises(EnvironmentMissing, match=f"^no Ray cluster at '127.0.0.1:{port}': "),
        joined(f"127.0.0.1:{port}"),
    ):
        pass
    assert ray.calls == []


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("auto", None),
        ("local", None),
        ("head:6379", ("head", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("[::1]:6379", ("::1", 6379)),
        ("ray://[fe80::1]:10001", ("fe80::1", 10001)),
    ],
)
def test_where_an_answer_is_asked_for(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, address: str, place: tuple[str, int] | None
) -> None:
    asked: list[Any] = []

    def create_connection(where: tuple[str, int], seconds: float) -> SimpleNamespace:
        asked.append((where, seconds))
        return SimpleNamespace(close=lambda: asked.append("closed"))

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with joined(address):
        assert ray.calls[0][0] == address
    assert asked == ([] if place is None else [(place, 5.0), "closed"])


def test_nothing_that_listens_and_no_port_say_so_at_once(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(where: tuple[str, int], seconds: float) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(EnvironmentMissing) as caught, joined("head:6379"):
        pass
    assert str(caught.value) == "no Ray cluster at 'head:6379': [Errno 111] Connection refused"
    with pytest.raises(EnvironmentMissing, match="no Ray cluster at 'head:x': invalid literal"), joined("head:x"):
        pass
    assert ray.calls == []


def test_nodes_that_are_gone_are_not_listed(ray: Ray) -> None:
    assert cluster_nodes() == [{"Alive": True, "Resources": {"CPU": 2}}, {"Alive": True, "Resources": {}}]


# Ray as it was seen: in the main thread it sets a handler and loses what is raised; its library sets one of its own.
DRIVER = """
import ctypes, os, signal, sys, threading
from types import SimpleNamespace

from vitx.cli import terminate
from vitx.core.ray_connection import joined

def init(*given, **options):
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    print("begun", flush=True)
    try:
        sys.stdin.read()
    except BaseException:
        pass
    if sys.argv[1:]:  # else what was sent before it might be dropped
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))

def shutdown():
    print("shut down", flush=True)

sys.modules["ray"] = SimpleNamespace(init=init, is_initialized=lambda: True, shutdown=shutdown)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, terminate)
with joined("local"):
    print("joined", flush=True)
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except SystemExit:
        sys.exit(1)  # as a call of Ray's does
"""
ENDS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)]


@pytest.mark.parametrize(("number", "code"), ENDS)
@pytest.mark.parametrize("while_it_starts", [True, False])
def test_a_signal_ends_the_driver_with_its_own_exit_code(number: int, code: int, while_it_starts: bool) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", DRIVER, *([] if while_it_starts else [str(int(number))])]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "begun\n"
        if while_it_starts:
            driver.send_signal(number)
        said, errors = driver.communicate()
    assert (driver.returncode, said) == (code, "shut down\n" if while_it_starts else "joined\nshut down\n"), errors
