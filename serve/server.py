"""One server process: claim the port, load and warm the models, serve, drain on the first signal, stop on the second."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from vitx.core.bundle import Bundle, Certificate
from vitx.core.console import log
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.serve.app import App
from vitx.serve.decode import Decoder
from vitx.serve.limits import Batching, Limits
from vitx.serve.metrics import Metrics
from vitx.serve.runtimes import Device
from vitx.serve.served_model import ModelSet, ServedModel, load_warm

_KEEP_ALIVE_SECONDS = 75  # longer than the clients' pools keep a connection, so that they close it, not we


@dataclass(frozen=True)
class ServerOptions:
    """What `vitx serve` was asked for. Port 0 means any free port."""

    bundles: Sequence[Path]
    host: str = "127.0.0.1"
    port: int = 8000
    device: Device = "auto"
    threads: int | None = None
    allow_uncertified: bool = False
    batching: Batching = field(default_factory=Batching)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Offer:
    """A verified bundle that may be served; without a certificate only because the user allowed it."""

    bundle: Bundle
    certificate: Certificate | None


def serve(options: ServerOptions) -> None:
    """Serve until a signal comes.

    Raises EnvironmentMissing when the port cannot be had, InputError for a bundle that is broken or named like
    another one, CheckFailed for one whose certificate does not allow it; all before a model is loaded.
    """
    with claim_port(options.host, options.port) as listener:
        offers = open_offers(options.bundles, allow_uncertified=options.allow_uncertified)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(Server(options, offers, listener).run())


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


def open_offers(paths: Sequence[Path], *, allow_uncertified: bool) -> list[Offer]:
    """Open and verify bundles and their certificates; raise InputError or CheckFailed."""
    if not paths:
        raise InputError("no bundle to serve")
    offers: dict[str, Offer] = {}
    for path in paths:
        bundle = Bundle.open(path)
        name = bundle.manifest.name
        if name in offers:
            raise InputError(f"two bundles are named '{name}': {offers[name].bundle.path} and {path}")
        offers[name] = Offer(bundle, None if allow_uncertified else bundle.require_certificate())
    return [Offer(offer.bundle, offer.certificate or _valid_certificate(offer.bundle)) for offer in offers.values()]
