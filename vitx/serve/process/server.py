"""One server process: claims the port, loads and warms up the models, serves, and drains on a signal."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from vitx.core.console import counted, log
from vitx.core.errors import InputError, naming_extra
from vitx.serve.callbacks import start_kept
from vitx.serve.http.app import App
from vitx.serve.http.head_cache import HeadCacheProtocol
from vitx.serve.models.loading import Offer
from vitx.serve.models.repository import Repository
from vitx.serve.observe.access_log import AccessLog
from vitx.serve.observe.metrics import merged
from vitx.serve.observe.request_record import RequestObserver
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import claim_port, log_next_call, url_of
from vitx.serve.process.process_settings import configure_process
from vitx.serve.process.shared_repository import SharedRepository
from vitx.serve.process.supervisor import WorkerLink, worker_link
from vitx.serve.security import read_pem
from vitx.serve.server_core import ServerCore, verified

if TYPE_CHECKING:
    from vitx.serve.grpc.server import GrpcServer

_NEVER = 1e6  # seconds for a client to close its side of TLS: the connection limits them itself
_LINGER_SECONDS = 2.0  # that a worker that leaves waits for a request on each open connection, to answer it and close
_EXIT_SECONDS = 10.0  # for what a server does once it has drained
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *(() if sys.platform == "win32" else (signal.SIGHUP, signal.SIGUSR1)))
_WATCH_SECONDS = 1.0  # between two checks of the bundles on disk
_METRICS_SECONDS = 1.0  # for each worker's metrics; one that hangs or is gone is left out


def serve(options: ServeOptions) -> None:
    """Serve until a signal comes; a worker serves on its parent's socket. What cannot end in time ends the process.

    Raises EnvironmentMissing if the port is taken, InputError for a bundle that is broken or has the name of another,
    CheckFailed for one without a passing certificate; all before a model is loaded.
    """
    configure_process()
    link = worker_link()
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if sys.platform != "win32":
        from uvloop import new_event_loop as new_loop
    with ExitStack() as ending:
        listener = ending.enter_context(claim_port(options.host, options.port) if link is None else link.listener)
        for number in _SIGNALS:  # at the end a program that ran a server has its own handlers again
            ending.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        for number in _SIGNALS[2:]:  # of reloads and log rotation: they would end a server that is still starting
            signal.signal(number, signal.SIG_IGN)
        offers = verified(options)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(Server(options, offers, listener, link).run())


class Server:
    """Runs one application on one listening socket until a signal comes."""

    def __init__(
        self, options: ServeOptions, offers: Sequence[Offer], listener: socket.socket, link: WorkerLink | None = None
    ) -> None:
        """A worker has a `link` to its parent."""
        self._options, self._listener, self._link = options, listener, link
        first = [it for it in offers if link is None or not link.siblings.is_unloaded(*it.key)]
        self._pem = read_pem(options)
        observers: list[RequestObserver] = []
        if options.access_log is not None:
            observers.append(AccessLog(options.access_log))
        if options.otlp_endpoint is not None:
            with naming_extra("otel"):
                from vitx.serve.observe.opentelemetry import Tracing
            observers.append(Tracing(options.otlp_endpoint))
        self._core = core = ServerCore(options, first, observers)
        kind = Repository if link is None else partial(SharedRepository, link.siblings)
        self._repository = kind(core.models, core.loader, core.metrics, offers)
        core.repository = self._repository if options.management else None
        self._grpc: GrpcServer | None = None
        self._draining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing = asyncio.Lock()

    async def run(self) -> None:
        """Serve until drained. A single process answers health probes while it loads; a worker loads first."""
        core, link = self._core, self._link
        self._uvicorn = uvicorn.Server(_uvicorn_config(App(core, self._listener.getsockname()[0])))
        # It would raise the signals that it got again, and a drained server would not exit with 0.
        self._uvicorn.capture_signals = nullcontext  # type: ignore[assignment]
        self._uvicorn.startup = self._listen  # type: ignore[assignment,method-assign]
        self._uvicorn.config.load()
        if link is None:
            await self._start_grpc()
        loop, actions = asyncio.get_running_loop(), (*[self._on_signal] * 2, self._on_hangup, self._on_log_rotation)
        for number, act in zip(_SIGNALS, actions, strict=False):
            signal.signal(number, lambda *received, act=act: loop.call_soon_threadsafe(act, *received))
        if link is not None:
            await self._join_workers(link)
            await core.load()
            link.siblings.start_lock.close()
            await self._start_grpc()  # only now: a gRPC server accepts calls from its start
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            if link is None:
                async with self._repository.busy:  # a client's load or unload comes after it
                    await core.load()
            self._announce()
        except BaseException:
            self._uvicorn.should_exit = True
            raise
        finally:
            await serving
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._grpc is not None:
                await self._grpc.stop()
            if link is not None:
                link.siblings.close()
            core.decoder.close()
            for observer in core.observers:
                await asyncio.to_thread(observer.close)
        if any(model.stats()["running"] for model in core.models):
            os._exit(0)  # past the drain's limit: a runtime that computes while the interpreter ends would abort

    async def _listen(self, sockets: object) -> None:
        """uvicorn's startup, with `header_seconds` for a TLS handshake: only after it has a connection other limits."""
        core, server, tls = self._core, self._uvicorn, self._pem and self._pem.context
        ours = partial(HeadCacheProtocol, {}, core.limits, core.budget, core.metrics.reject)
        connect = partial(ours, server.config, server.server_state, {})
        listen = partial(asyncio.get_running_loop().create_server, connect, ssl=tls, backlog=server.config.backlog)
        seconds, end = (core.limits.header_seconds, _NEVER) if tls else (None, None)
        server.servers = [await listen(sock=self._listener, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=end)]
        server.started = True

    async def _renew_tls(self) -> None:
        """Read the certificate again, beside the event loop: a pipe or a disk may give nothing; and listen with it.

        Under the old context its sessions would resume, of clients that may be allowed no more.
        """
        async with self._renewing:  # what waits takes one thread, however many signals come
            try:
                self._pem = await asyncio.to_thread(read_pem, self._options)
            except InputError as error:
                log(f"vitx: the TLS certificate stays: {error}")
                return
            if self._pem is not None and self._uvicorn.started and self._draining is None:
                old, self._listener = self._uvicorn.servers[0], self._listener.dup()
                await self._listen(())
                old.close()

    async def _start_grpc(self) -> None:
        link = self._link  # of a worker: its file of options may have another port now, or one for the first time
        if (port := link.grpc_port or None if link else self._options.grpc_port) is not None:
            with naming_extra("grpc"):
                from vitx.serve.grpc.server import GrpcServer
            host = self._listener.getsockname()[0]  # of a name with several addresses gRPC takes those that are free
            self._grpc = GrpcServer(self._core, host, port, shared=link is not None, pem=lambda: self._pem)
            await self._grpc.start()

    async def _join_workers(self, link: WorkerLink) -> None:
        assert isinstance(self._repository, SharedRepository)

        async def exposition(text: str) -> bytes:
            return self._core.metrics.exposition()

        async def gather() -> bytes:
            return merged(await link.siblings.ask("metrics", seconds=_METRICS_SECONDS), "worker")

        asyncio.get_running_loop().add_reader(link.parent, self._on_parent, link)
        await link.siblings.start({"metrics": exposition, **self._repository.handlers()})
        self._core.metrics.gather, self._core.metrics.started = gather, link.started

    def _announce(self) -> None:
        """Start the background tasks, and announce that the models are warm."""
        if self._draining is not None:
            return
        start_kept(self._core.replay_canaries(), self._tasks)
        if self._options.watch:
            start_kept(self._repository.watch(_WATCH_SECONDS), self._tasks)
        if self._link is not None:
            start_kept(self._link.beat(), self._tasks)
            return
        url, names = url_of(self._listener, tls=self._pem is not None), self._core.models.names
        print(f"vitx: serving {', '.join(names)} on {url}", flush=True)
        if self._grpc is not None:
            print(f"vitx: gRPC on {self._grpc.address}", flush=True)
        log_next_call(url, self._options, names[0] if len(names) > 1 else None)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._draining is not None and self._link is None:  # a parent kills its workers itself
            log("vitx: stopped by a second signal")
            os._exit(128 + number)  # at once: threads that run a model cannot be interrupted
        self._draining = self._draining or asyncio.create_task(self._drain())
        if self._link is None:
            log("vitx: draining; a second signal stops at once")

    def _on_parent(self, link: WorkerLink) -> None:
        """Drain: the parent never writes, so its socket is readable when it closed its side or died."""
        asyncio.get_running_loop().remove_reader(link.parent)
        self._draining = self._draining or asyncio.create_task(self._drain())

    def _on_hangup(self, number: int, frame: object) -> None:
        """SIGHUP: load the TLS certificate and the bundles again."""
        if self._draining is None:
            start_kept(self._renew_tls(), self._tasks)
            start_kept(self._repository.load_all(), self._tasks)

    def _on_log_rotation(self, number: int, frame: object) -> None:
        for observer in self._core.observers:
            if isinstance(observer, AccessLog):
                observer.reopen()

    def _unread(self) -> int:
        """How many clients have not taken all of their replies."""
        connections: set[Any] = self._uvicorn.server_state.connections
        return sum(each.transport.get_write_buffer_size() > 0 for each in connections)

    async def _drain(self) -> None:
        """Let the requests in flight finish, then stop the HTTP server."""
        models, seconds = self._core.models, self._core.limits.drain_seconds
        models.leaving = True
        if self._link is not None:  # leave new connections to the other workers, answer and close the open ones
            for server in getattr(self._uvicorn, "servers", ()):
                server.close()
            end = time.monotonic() + _LINGER_SECONDS
            while self._uvicorn.server_state.connections and time.monotonic() < end:
                await asyncio.sleep(0.02)
        models.draining = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await models.idle()
                if self._grpc is not None:
                    await self._grpc.idle()
                while self._unread():  # clients that still take their reply
                    await asyncio.sleep(0.02)
                await models.close()
        except TimeoutError:
            log(f"vitx: {counted(models.active or self._unread(), 'request')} did not finish within {seconds:g} s")
        self._uvicorn.should_exit = True
        asyncio.get_running_loop().call_later(_EXIT_SECONDS, os._exit, 0)  # a load or a canary cannot be interrupted


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    own: dict[str, Any] = {"ws": "none", "lifespan": "off", "proxy_headers": False, "server_header": False}
    own |= {"log_config": None, "log_level": "error", "access_log": False}  # clients could fill the log with warnings
    own |= {"http": "httptools", "timeout_graceful_shutdown": 2}  # `_listen` makes the connections
    return uvicorn.Config(app, **own)  # accepted requests are done by then
