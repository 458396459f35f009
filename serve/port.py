"""The listening socket, claimed before anything is loaded."""

import errno
import socket
import sys

from vitx.core.errors import EnvironmentMissing, InputError


def claim_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise EnvironmentMissing when the address is taken or not allowed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InputError(f"host '{host}' is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise EnvironmentMissing(
                f"port {port} on {host} is in use: stop what listens there, or choose another with --port (0: any)"
            ) from None
        raise EnvironmentMissing(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
