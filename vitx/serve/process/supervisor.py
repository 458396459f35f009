"""`vitx serve --workers N`: a parent that only starts, watches and replaces server processes.

The parent holds the listening socket, which all workers inherit and accept from, so a connection that a dead worker had
not accepted goes to another one. A socket pair links the parent to each worker. The worker writes to it when it is
warm, and every second from then on: one that hangs falls silent, and is killed. End of file tells the parent that the
worker died, and tells the worker to drain; the parent's death does so too.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.machine import require_socket_folder
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import address_of, claim_port, hold_shared_port, log_next_call, url_of
from vitx.serve.process.siblings import LONGEST_SOCKET, Siblings

ENVIRONMENT = "VITX_WORKER"
_BEAT_SECONDS = 1.0  # between two signs of life of a worker
_HANG_SECONDS = 10.0  # without one: it hangs
_LEAVE_SECONDS = 20.0  # the same for a worker that drains and ends, also for one that is not warm yet
_LONGEST_PAUSE = 30.0  # seconds between starts of a worker that dies before it is ready
_EXIT_SECONDS = 10.0  # for a process to exit after its link was closed


@dataclass(frozen=True)
class WorkerLink:
    """What a worker gets from its parent, which `started` at a time.monotonic(). grpc_port: 0 for no gRPC."""

    listener: socket.socket
    parent: socket.socket
    grpc_port: int
    started: float
    siblings: Siblings

    async def beat(self) -> None:
        """Tell the parent now that this worker is warm, and every second that it lives, until cancelled."""
        while True:
            with suppress(OSError):  # a parent that is stopped reads nothing, one that has died is noticed elsewhere
                self.parent.send(b".", socket.MSG_DONTWAIT)
            await asyncio.sleep(_BEAT_SECONDS)


def worker_link() -> WorkerLink | None:
    """Return what the parent passed to this process; None if it is not a worker."""
    if (given := os.environ.pop(ENVIRONMENT, None)) is None:
        return None
    index, listener, parent, grpc_port, started, folder = given.split(" ", 5)
    listening, link = (socket.socket(fileno=int(number)) for number in (listener, parent))
    return WorkerLink(listening, link, int(grpc_port), float(started), Siblings(Path(folder), int(index)))


@dataclass(eq=False)
class _Worker:
    index: int
    process: "subprocess.Popen[bytes]"
    link: socket.socket
    replaces: "_Worker | None" = None
    pause: float = 0.0  # seconds that were waited before its start
    ready: bool = False
    stopping: bool = False
    heard: float = 0.0  # its last sign of life, time.monotonic()
    missed: set[int] = field(default_factory=set)  # signals that are for it, but came before it was ready

    def drain(self) -> None:
        self.stopping, self.heard = True, time.monotonic()
        self.link.shutdown(socket.SHUT_WR)


def supervise(options: ServeOptions) -> int:
    """Serve with processes of this one's command line; return the exit code. Raises what `claim_port` raises."""
    if sys.platform == "win32":
        raise InputError("--workers needs a POSIX system: use --instances")
    require_socket_folder(LONGEST_SOCKET)
    with ExitStack() as held:
        listener, grpc_port = held.enter_context(claim_port(options.host, options.port)), 0
        url = url_of(listener, tls=options.tls_cert is not None)
        serving = f"vitx: serving with {options.workers} workers on {url}"
        if options.grpc_port is not None:
            holder = held.enter_context(hold_shared_port(options.host, options.grpc_port))
            serving += f"\nvitx: gRPC on {address_of(holder)}"
            grpc_port = holder.getsockname()[1]
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="vitx-"))
        several = options.repository is not None or len(options.bundles) > 1
        say_next = partial(log_next_call, url, options, "NAME" if several else None)
        return asyncio.run(_Supervisor(listener, options.workers, serving, say_next, grpc_port, Path(folder)).run())


@dataclass
class _Supervisor:
    listener: socket.socket
    count: int
    serving: str  # printed when all are warm
    say_next: Callable[[], None]  # called then
    grpc_port: int  # that the workers share, 0 for none
    folder: Path
    workers: list[_Worker] = field(default_factory=list)
    to_replace: list[_Worker] = field(default_factory=list)
    hung_up: bool = False  # a SIGHUP came, after which none was replaced yet
    announced: bool = False
    stopping: bool = False
    exit_code: int = 0
    started: float = field(default_factory=time.monotonic)

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.loop.set_exception_handler(lambda loop, context: self.ended.set_exception(context["exception"]))
        # grpcio drops calls on connections that it closes, so with gRPC the workers stay and load their bundles again.
        on_hangup = self._pass_on if self.grpc_port else self._replace_all
        actions = {signal.SIGTERM: self._on_end, signal.SIGINT: self._on_end, signal.SIGUSR1: self._pass_on}
        for number, act in {**actions, signal.SIGHUP: on_hangup}.items():
            self.loop.add_signal_handler(number, act, number)
        self._start(0)  # first alone, so that an error is printed once
        self._kill_hung(time.monotonic())
        await self.ended
        return self.exit_code

    def _start(self, index: int, replaces: _Worker | None = None, pause: float = 0.0) -> None:
        if self.stopping:
            return
        ours, theirs = socket.socketpair()
        given = f"{index} {self.listener.fileno()} {theirs.fileno()} {self.grpc_port} {self.started} {self.folder}"
        try:
            with theirs, socket.socket() as unread:  # an option that names /dev/stdin: refused, not found empty
                process = subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env={**os.environ, ENVIRONMENT: given},
                    pass_fds=(self.listener.fileno(), theirs.fileno()),
                    stdin=unread.fileno(),
                )
        except OSError as error:  # no memory for a process now, or too many of them
            ours.close()
            if not self.announced:
                raise
            log(f"vitx: worker {index} cannot be started now: {error.strerror}")
            self.to_replace.clear()
            if replaces is None:
                self.loop.call_later(again := min(_LONGEST_PAUSE, 2 * pause or 1.0), self._start, index, None, again)
            return
        worker = _Worker(index, process, ours, replaces, pause)
        self.workers.append(worker)
        self.loop.add_reader(ours, self._on_link, worker)

    def _on_link(self, worker: _Worker) -> None:
        said = b""
        with suppress(ConnectionError):
            said = worker.link.recv(16)
        worker.heard = time.monotonic()
        if not said:
            self._on_death(worker)
        elif not worker.ready:
            self._on_ready(worker)

    def _on_ready(self, worker: _Worker) -> None:
        worker.ready = True
        if self.stopping:
            return
        for number in worker.missed:
            worker.process.send_signal(number)
        if worker.replaces in self.workers:
            worker.replaces.drain()
        worker.replaces = None
        if not self.announced and len(self.workers) < self.count:
            for index in range(1, self.count):
                self._start(index)
        elif not self.announced and all(each.ready for each in self.workers):
            self.announced = True
            print(self.serving, flush=True)
            self.say_next()
        self._replace_next()

    def _on_death(self, worker: _Worker) -> None:
        self.loop.remove_reader(worker.link)
        worker.link.close()
        self.workers.remove(worker)
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(_EXIT_SECONDS)
        worker.process.kill()  # unless it has ended
        code = worker.process.wait()
        if worker.stopping:
            self.exit_code = self.exit_code or max(0, code) * worker.ready  # else a signal may have ended its start
            self._end_if_last()
        elif not self.announced:
            if code not in (1, 2, 3):  # with these it has said why
                log(f"vitx: worker {worker.index} {_ended(code)} before every worker was warm")
            self.exit_code = code if code > 0 else 1
            self._drain()
        elif worker.replaces in self.workers:
            log(f"vitx: the replacement of worker {worker.index} {_ended(code)}: the workers that run stay")
            self.to_replace.clear()
            self._replace_next()
        elif not any(each.replaces is worker for each in self.workers):
            pause = 0.0 if worker.ready else min(_LONGEST_PAUSE, 2 * worker.pause or 1.0)
            self.loop.call_later(pause, self._start, worker.index, None, pause)
            log(f"vitx: worker {worker.index} (process {worker.process.pid}) {_ended(code)}: another one is started")

    def _kill_hung(self, looked: float) -> None:
        """Every second kill the workers that give no sign of life, but for those that load; others replace them."""
        now = time.monotonic()
        for worker in self.workers:
            if now - looked > _HANG_SECONDS / 2:  # this process was stopped, perhaps with its workers
                worker.heard = now
            elif now - worker.heard > (_LEAVE_SECONDS if worker.stopping else _HANG_SECONDS if worker.ready else inf):
                log(f"vitx: worker {worker.index} (process {worker.process.pid}) hangs: it is killed")
                worker.process.kill()
                worker.heard = now  # said once
        self.loop.call_later(_BEAT_SECONDS, self._kill_hung, now)

    def _on_end(self, number: int) -> None:
        if self.stopping:
            log("vitx: stopped by a second signal")
            for worker in self.workers:
                worker.process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(128 + number)
        log("vitx: draining; a second signal stops at once")
        self._drain()

    def _pass_on(self, number: int) -> None:
        for worker in self.workers:
            if worker.ready:
                worker.process.send_signal(number)
            else:
                worker.missed.add(number)

    def _replace_all(self, number: int) -> None:
        self.hung_up = True
        self._replace_next()

    def _replace_next(self) -> None:
        if not self.announced or self.stopping or any(worker.replaces for worker in self.workers):
            return
        if self.hung_up:
            self.hung_up = False
            log("vitx: every worker is replaced, one after another")
            self.to_replace = list(self.workers)
        while self.to_replace:
            worker = self.to_replace.pop(0)
            if worker in self.workers and not worker.stopping:  # otherwise it has died and was replaced
                self._start(worker.index, replaces=worker)
                return

    def _drain(self) -> None:
        self.stopping = True
        self.listener.close()  # once the workers close theirs too, new clients are refused instead of waiting
        for worker in self.workers:
            if not worker.stopping:
                worker.drain()
        self._end_if_last()

    def _end_if_last(self) -> None:
        if self.stopping and not self.workers and not self.ended.done():
            self.ended.set_result(None)


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
