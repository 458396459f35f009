"""Joining a Ray cluster and listing its nodes, for the verbs that run on one. Ray is imported when it is needed."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from vitx.core.console import ending_signals
from vitx.core.errors import EnvironmentMissing

LOCAL = "local"  # Ray's word for a cluster that is started here
_CONNECT_SECONDS = 5.0


@contextmanager
def joined(address: str, *, log_to_driver: bool = True, **local_options: Any) -> Iterator[None]:
    """Inside, this process is the driver of the cluster at `address`, or of a local one that ends with the block.

    log_to_driver: whether what other processes print comes here. local_options: of `ray.init`, for a local cluster.
    Raises EnvironmentMissing where there is no such cluster, or a local one does not start. A signal has the handler
    and the exit code that it had before.
    """
    import ray

    _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False, **local_options} if address == LOCAL else {}
    options |= {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    # In the main thread `ray.init` sets a handler of SIGTERM, and loses what one raises. The thread lives as long as
    # the block does: the kernel ends the cluster's processes with the thread that started them.
    with _exits_kept() as set_handlers, ThreadPoolExecutor(1) as starter:
        try:
            try:
                starter.submit(ray.init, address, **options).result()
            except Exception as error:  # noqa: BLE001 - of a node that does not start in time Ray raises no narrower one
                # Ray does not say so. `ray start` asks for one where an earlier cluster of this user has left it.
                may_ask = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
                hint = ". If it asks for Ray's token, set RAY_AUTH_MODE=token" if may_ask else ""
                hint = ". Set RAY_TMPDIR to a folder with a short path" if "AF_UNIX" in str(error) else hint
                raise EnvironmentMissing(f"no Ray cluster at '{address}': {error}{hint}") from None
            set_handlers()
            yield
        finally:
            if starter.submit(ray.is_initialized).result():  # when it has started, also after a signal
                ray.shutdown()


@contextmanager
def _exits_kept() -> Iterator[Callable[[], None]]:
    """An exit that a signal's handler raises leaves the block as it is: a call of Ray's makes exit code 1 of any.

    Yields what sets the handlers again, as Ray's library puts one of its own before that of SIGTERM.
    """
    numbers = ending_signals() if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    exits: list[SystemExit] = []

    def handle(number: int, frame: Any) -> None:
        if sys.platform != "win32":
            signal.alarm(0)  # the handler of Ray's library gives a process 3 s to end
        try:
            before[signal.Signals(number)](number, frame)
        except SystemExit as error:
            exits.append(error)
            raise

    def set_handlers() -> None:
        for number in before:
            signal.signal(number, handle)

    set_handlers()
    try:
        yield set_handlers
    except SystemExit as error:
        raise (exits or [error])[-1] from None
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:  # not one set since, such as to ignore a second SIGHUP
                signal.signal(number, handler)


def cluster_nodes() -> list[dict[str, Any]]:
    """Ray's description of each living node; its `Resources` are numbers by name."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no annotation
    return [node for node in nodes if node["Alive"]]


def _require_answer(address: str) -> None:
    """Raise EnvironmentMissing when nothing listens at HOST:PORT or ray://HOST:PORT: Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:  # the last of a port of twenty digits
        raise EnvironmentMissing(f"no Ray cluster at '{address}': {error}") from None
