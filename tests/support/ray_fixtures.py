"""One Ray cluster for all tests of a process, the processes of its actors, and a host that decides when they read."""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.process_tree import family

# By default Ray starts its workers with niceness 15: beside other tests on two cores one takes a minute to import Ray.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # it is written so

# Of a node: little memory, and none of the processes that show a dashboard, scale the cluster or forward logs.
NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 100 << 20,
    "include_dashboard": False,
    "dashboard_agent_listen_port": None,  # any free one, not the one of another cluster on this machine
    "include_log_monitor": False,
    "no_monitor": True,
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with a CPU each, whose processes descend from this one."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # after 5 s Ray ends a proxy that is slow to start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        two = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            two.add_node(**NODE)
            yield two.address
        finally:
            two.shutdown()  # type: ignore[no-untyped-call]  # Ray annotates it so


def processes(title: bytes, root: int | None = None) -> list[int]:
    """Ids of the processes with `title` in their command line among the descendants of `root`, by default this one."""
    return [pid for pid in family(root or os.getpid()) if title in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Gate(ThreadingHTTPServer):
    """Serves a folder: each file waits for one of the `leaves` that a test releases."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Gated, directory=os.fspath(folder)))
        self.leaves = threading.Semaphore(0)

    def is_asked_by(self, pid: int) -> bool:
        """Whether a connection of the process is open."""
        with suppress(psutil.Error):
            asked = (one.raddr for one in psutil.Process(pid).net_connections("tcp") if one.status == "ESTABLISHED")
            return any(place and place.port == self.server_port for place in asked)
        return False


class _Gated(SimpleHTTPRequestHandler):
    server: Gate

    def do_GET(self) -> None:
        self.server.leaves.acquire()
        with suppress(ConnectionError):  # of who was killed meanwhile
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def gate_of(folder: Path) -> Iterator[Gate]:
    with Gate(folder) as gate:
        thread = threading.Thread(target=gate.serve_forever)
        thread.start()
        try:
            yield gate
        finally:
            gate.leaves.release(10_000)
            gate.shutdown()
            thread.join()
