"""One server process: claim the port, load and warm the models, serve, drain on a signal, stop on a second one."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn

from vitx.core.bundle import Bundle, Certificate
from vitx.core.console import log
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
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
        offers[name] = Offer(bundle, _certificate(bundle, allow_uncertified=allow_uncertified))
    return list(offers.values())


def _certificate(bundle: Bundle, *, allow_uncertified: bool) -> Certificate | None:
    try:
        return bundle.require_certificate()
    except CheckFailed as refusal:
        if not allow_uncertified:
            raise
        log(f"warning: {refusal}; served nevertheless: --allow-uncertified was given")
        return None


class Server:
    """Runs one application on one listening socket until a signal comes."""

    def __init__(self, options: ServerOptions, offers: Sequence[Offer], listener: socket.socket) -> None:
        self._options = options
        self._offers = offers
        self._listener = listener
        self._metrics = Metrics()
        self._models = ModelSet(tuple(offer.bundle.manifest.name for offer in offers))
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer probes at once, load the models, serve, and return when drained."""
        limits, queue = self._options.limits, self._options.batching.queue
        limits = replace(limits, images=min(limits.images, queue))  # more could never be queued
        decoder = Decoder(max_pixels=limits.pixels, capacity=queue, on_decode=self._metrics.decode_seconds.observe)
        self._app = App(self._models, decoder, limits, self._metrics)
        self._uvicorn = _Uvicorn(_uvicorn_config(self._app))
        self._take_signals()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            await self._load()
        except BaseException:
            self._uvicorn.should_exit = True
            await serving
            raise
        await serving
        decoder.close()

    async def _load(self) -> None:
        options = self._options
        for offer in self._offers:
            session = await asyncio.to_thread(
                load_warm, offer.bundle, options.batching, device=options.device, threads=options.threads
            )
            self._models.add(ServedModel(offer.bundle, offer.certificate, session, options.batching, self._metrics))
        if self._models.ready:
            print(f"vitx: serving {', '.join(self._models.expected)} on {_url(self._listener)}", flush=True)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(self._on_signal, number))

    def _on_signal(self, number: int) -> None:
        if self._draining is not None:
            log("vitx: stopped by a second signal")
            os._exit(128 + number)  # at once: threads that compute cannot be asked
        log("vitx: draining; a second signal stops at once")
        self._models.draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Let the requests in flight finish, then let the HTTP server end."""
        try:
            async with asyncio.timeout(self._options.limits.drain_seconds):
                await self._app.idle()
                await self._models.close()
        except TimeoutError:
            log(f"vitx: {self._app.active} requests did not finish within {self._options.limits.drain_seconds:g} s")
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone: uvicorn would end with the signal's status, where a drained server ends with 0."""
        yield


def _uvicorn_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings let a client fill the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,  # what was accepted is done by then
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
