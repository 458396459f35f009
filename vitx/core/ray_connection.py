"""Joining a Ray cluster and listing its nodes, for the verbs that run on one. Ray is imported when it is needed."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitx.core.errors import EnvironmentMissing

LOCAL = "local"  # Ray's word for a cluster that is started here
_CONNECT_SECONDS = 5.0


@contextmanager
def joined(address: str, *, log_to_driver: bool = True, **local_options: Any) -> Iterator[None]:
    """Inside, this process is the driver of the cluster at `address`, or of a local one that ends with the block.

    log_to_driver: whether what other processes print comes here. local_options: of `ray.init`, for a local cluster.
    Raises EnvironmentMissing where there is no such cluster, or a local one does not start.
    """
    import ray

    _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False, **local_options} if address == LOCAL else {}
    try:
        ray.init(address, log_to_driver=log_to_driver, logging_level=logging.ERROR, **options)
    except Exception as error:  # noqa: BLE001 - of a node that does not start in time Ray raises no narrower one
        # Ray does not say so. `ray start` asks for one where an earlier cluster of this user has left it.
        may_ask = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
        hint = ". If it asks for Ray's token, set RAY_AUTH_MODE=token" if may_ask else ""
        hint = ". Set RAY_TMPDIR to a folder with a short path" if "AF_UNIX" in str(error) else hint
        raise EnvironmentMissing(f"no Ray cluster at '{address}': {error}{hint}") from None
    try:
        yield
    finally:
        ray.shutdown()


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
