"""One server process: claims the port, loads and warms up the models, serves, and drains on a signal."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from vitx.core.console import log
from vitx.core.errors import InputError, missing_package
from vitx.serve.http.connection import HttpProtocol
from vitx.serve.http.head_cache import protocol_class
from vitx.serve.limits import Limits, MemoryBudget
from vitx.serve.models.offer import Offer
from vitx.serve.models.repository import Repository
from vitx.serve.observe.access_log import AccessLog
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import claim_port, url_of
from vitx.serve.process.process_settings import configure_process
from vitx.serve.process.server_core import ServerCore, verified
from vitx.serve.process.shared_repository import SharedRepository
from vitx.serve.process.siblings import Siblings
from vitx.serve.process.supervisor import WorkerLink, worker_link
from vitx.serve.process.worker_metrics import QUESTION, gather
from vitx.serve.security import read_pem

if TYPE_CHECKING:
    from vitx.serve.grpc.server import GrpcServer
    from vitx.serve.observe.opentelemetry import Tracing

_KEEP_ALIVE_SECONDS = 75  # longer than connection pools keep a connection, so that the client closes it first
# How long a worker that leaves waits for the next request on each open connection, to answer it and close.
_LINGER_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *(() if sys.platform == "win32" else (signal.SIGHUP, signal.SIGUSR1)))
_WATCH_SECONDS = 1.0  # between two checks of the bundles on disk


def serve(options: ServeOptions) -> None:
    """Serve until a signal comes; a worker serves on its parent's socket.

    Raises EnvironmentMissing if the port is taken, InputError for a bundle that is broken or has the name of another,
    CheckFailed for one without a passing certificate; all before a model is loaded.
    """
    if options.management and options.management_token_file is None:
        raise InputError("--management lets clients load and unload models: it needs a --management-token-file")
    configure_process()
    link = worker_link()
    with claim_port(options.host, options.port) if link is None else link.listener as listener:
        siblings = None if link is None else Siblings(link.folder, link.index)
        offers = verified(options)
        with _callers_handlers(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(Server(options, offers, listener, link, siblings).run())


@contextmanager
def _callers_handlers() -> Iterator[None]:
    """At the end a program that ran a server has its own signal handlers again."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class Server:
    """Runs one application on one listening socket until a signal comes."""

    def __init__(
        self,
        options: ServeOptions,
        offers: Sequence[Offer],
        listener: socket.socket,
        link: WorkerLink | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """A worker has a `link` to its parent, and `siblings`."""
        self._options = options
        skipped = set() if siblings is None else siblings.unloaded()
        offers = [offer for offer in offers if offer.bundle.manifest.name not in skipped]
        self._siblings = siblings
        self._listener = listener
        self._link = link
        self._budget = MemoryBudget(options.limits.memory_bytes)
        self._pem = read_pem(options)
        self._access_log = None if options.access_log is None else AccessLog(options.access_log)
        tracing = None if options.otlp_endpoint is None else _tracing(options.otlp_endpoint)
        self._observers = [observer for observer in (self._access_log, tracing) if observer is not None]
        self._core = core = ServerCore(options, offers)
        given = {Path(path) for path in options.bundles}
        kind = Repository if siblings is None else partial(SharedRepository, siblings=siblings)
        self._repository = kind(
            *(core.models, core.loader, core.metrics),
            given={offer.key: offer.bundle.path for offer in offers if offer.bundle.path in given},
            folder=options.repository,
            policies=options.versions,
            retire_seconds=options.limits.drain_seconds,
        )
        self._grpc: GrpcServer | None = None
        self._draining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until drained. A single process answers health probes while it loads; a worker loads first."""
        limits, core = self._options.limits, self._core
        offered = self._repository if self._options.management else None
        self._app, routes = core.routes(self._listener.getsockname()[0], offered, self._observers)
        protocol = protocol_class(limits, core.metrics.reject, self._budget)
        self._uvicorn = _Uvicorn(_uvicorn_config(routes, protocol, self._options))
        self._uvicorn.config.load()
        if self._link is None:
            self._grpc = await self._start_grpc(limits, offered)
        self._take_signals()
        if self._link is not None:
            await self._join_workers(self._link)
            await self._load()
            self._grpc = await self._start_grpc(limits, offered)  # only now: a gRPC server accepts calls from its start
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            if self._link is None:
                await self._load()
            self._announce()
        except BaseException:
            self._uvicorn.should_exit = True
            raise
        finally:
            await serving
            await self._end_tasks()
            if self._grpc is not None:
                await self._grpc.stop()
            if self._siblings is not None:
                self._siblings.close()
            core.decoder.close()
            core.memory.close()
            for observer in self._observers:
                await asyncio.to_thread(observer.close)

    async def _start_grpc(self, limits: Limits, offered: Repository | None) -> "GrpcServer | None":
        port = self._options.grpc_port
        if port is None:
            return None
        try:
            from vitx.serve.grpc.server import GrpcServer, server_credentials
        except ModuleNotFoundError as error:
            raise missing_package(str(error.name), "grpc") from None
        server = GrpcServer(
            *(self._core.models, limits, self._core.metrics, self._core.memory),
            host=self._options.host,
            port=port if self._link is None else self._link.grpc_port,
            shared_port=self._link is not None,
            credentials=server_credentials(self._pem),
            repository=offered,
            tokens=self._core.tokens,
            observers=self._observers,
        )
        server.budget = self._budget
        await server.start()
        return server

    async def _join_workers(self, link: WorkerLink) -> None:
        assert isinstance(self._repository, SharedRepository)
        assert self._siblings is not None
        asyncio.get_running_loop().add_reader(link.parent, self._on_parent, link)
        await self._siblings.start({QUESTION: self._exposition, **self._repository.handlers()})
        self._core.metrics.gather = partial(gather, self._siblings)

    async def _exposition(self, text: str) -> bytes:
        return self._core.metrics.exposition()

    async def _load(self) -> None:
        await self._core.load()
        if self._siblings is not None:
            self._siblings.start_lock.close()

    def _announce(self) -> None:
        """Start the background tasks, and announce that the models are warm."""
        if self._draining is not None:
            return
        self._start_task(self._core.replay_canaries())
        if self._options.watch:
            self._start_task(self._repository.watch(_WATCH_SECONDS))
        if self._link is not None:
            self._start_task(self._link.beat())
            return
        url = url_of(self._listener, tls=self._pem is not None)
        print(f"vitx: serving {', '.join(self._core.models.names)} on {url}", flush=True)
        if self._grpc is not None:
            print(f"vitx: gRPC on {self._grpc.address}", flush=True)
        log(f"next: curl --data-binary @IMAGE {url}/v1/classify")

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        actions = (self._on_signal, self._on_signal, self._on_hangup, self._on_log_rotation)
        for number, act in zip(_SIGNALS, actions, strict=False):
            signal.signal(number, lambda *received, act=act: loop.call_soon_threadsafe(act, *received))

    def _on_signal(self, number: int, frame: object) -> None:
        if self._draining is not None:
            log("vitx: stopped by a second signal")
            os._exit(128 + number)  # at once: threads that run a model cannot be interrupted
        if self._link is None:
            log("vitx: draining; a second signal stops at once")
        self._start_drain()

    def _on_parent(self, link: WorkerLink) -> None:
        """Drain: the parent never writes, so its socket is readable when it closed its side or died."""
        asyncio.get_running_loop().remove_reader(link.parent)
        if self._draining is None:
            self._start_drain()

    def _on_hangup(self, number: int, frame: object) -> None:
        """SIGHUP: load the TLS certificate and the bundles again."""
        options = self._options
        if options.tls_cert is not None and self._uvicorn.config.ssl is not None:
            try:
                read_pem(options)
                self._uvicorn.config.ssl.load_cert_chain(options.tls_cert, options.tls_key)
            except InputError as error:
                log(f"vitx: the TLS certificate stays: {error}")
        if self._draining is None:
            self._start_task(self._repository.load_all())

    def _on_log_rotation(self, number: int, frame: object) -> None:
        if self._access_log is not None:
            self._access_log.reopen()

    def _start_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain_worker() if self._link is not None else self._drain())

    async def _drain_worker(self) -> None:
        """Leave new connections to the other workers, answer and close the open ones, then drain."""
        self._core.models.leaving = True
        for server in getattr(self._uvicorn, "servers", ()):
            server.close()
        end = time.monotonic() + _LINGER_SECONDS
        while self._uvicorn.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self._drain()

    async def _drain(self) -> None:
        """Let the requests in flight finish, then stop the HTTP server."""
        self._core.models.draining = True
        try:
            async with asyncio.timeout(self._options.limits.drain_seconds):
                await self._app.idle()
                if self._grpc is not None:
                    await self._grpc.idle()
                await self._core.models.close()
        except TimeoutError:
            log(f"vitx: {self._app.active} requests did not finish within {self._options.limits.drain_seconds:g} s")
        self._uvicorn.should_exit = True


def _tracing(endpoint: str) -> "Tracing":
    try:
        from vitx.serve.observe.opentelemetry import Tracing
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), "otel") from None
    return Tracing(endpoint)


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `Server`: uvicorn would raise them again, and a drained server would not exit with 0."""
        yield


def _uvicorn_config(app: ASGIApp, protocol: type[HttpProtocol], options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # clients could fill the log with warnings
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,  # accepted requests are done by then
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
