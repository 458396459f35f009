"""Addresses of Ray clusters, for the verbs that run on one; without importing Ray."""

import socket

from vitx.core.errors import EnvironmentMissing

LOCAL = "local"  # Ray's word for a cluster that is started here
_CONNECT_SECONDS = 5.0


def require_answer(address: str) -> None:
    """Raise EnvironmentMissing when nothing listens at HOST:PORT or ray://HOST:PORT: Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise EnvironmentMissing(f"no Ray cluster at '{address}': {error}") from None
