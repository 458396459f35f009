"""Claims the listening socket, before anything is loaded, and says how to reach it."""

import errno
import socket
import sys

from vitx.core.console import log_next
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.serve.options import ServeOptions


def claim_port(host: str, port: int, option: str = "--port", *, shared: bool = False) -> socket.socket:
    """Return a listening socket; raise InputError for an unknown host, EnvironmentMissing if it cannot listen there.

    shared: it does not listen, and lets others of this user do it with SO_REUSEPORT.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # a label of a name is empty, too long or no text
        raise InputError(f"host '{host}' is no address of this machine: {getattr(error, 'strerror', error)}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if not shared:
            listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = f"stop what listens there, or choose another with {option} (0: any)"
            raise EnvironmentMissing(f"port {port} on {host} is in use: {remedy}") from None
        raise EnvironmentMissing(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def hold_shared_port(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port (0: any free one) for processes that each listen on it with SO_REUSEPORT.

    It does not listen, so it gets no connections. While it is open no other user can listen on the port with
    SO_REUSEPORT and take connections. Raises what `claim_port` raises.
    """
    with claim_port(host, port, "--grpc-port") as first:  # fails if the port is in use, with SO_REUSEPORT or without
        port = first.getsockname()[1]
    return claim_port(host, port, "--grpc-port", shared=True)


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    return f"{'https' if tls else 'http'}://{address_of(listener)}"


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def log_next_call(url: str, options: ServeOptions, model: str | None) -> None:
    """Log the command that classifies an image; `model`: one of several."""
    brings: tuple[str, ...] = ("-H", "Authorization: Bearer TOKEN") if options.token_file else ()
    brings += ("--cert", "CERTIFICATE", "--key", "KEY") if options.tls_client_ca else ()
    url = url.replace("//0.0.0.0:", "//localhost:").replace("//[::]:", "//localhost:") + "/v1/classify"
    log_next("curl", *brings, "--data-binary", "@IMAGE", url + (f"?model={model}" if model else ""))
