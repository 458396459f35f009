"""`vitx serve --workers N`: a parent that only starts, watches and replaces server processes.

The parent holds the listening socket, which all workers inherit and accept from, so a connection that a dead worker had
not accepted goes to another one. A socket pair links the parent to each worker. The worker writes to it when it is
warm, and every second from then on: one that hangs falls silent, and is killed. End of file tells the parent that the
worker died, and tells the worker to drain; the parent's death does so too.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitx.core.console import log
from vitx.core.errors import InputError

ENVIRONMENT = "VITX_WORKER"
READY, ALIVE = b"R", b"A"
BEAT_SECONDS = 1.0  # between two signs of life of a worker
_HANG_SECONDS = 10.0  # without one: it hangs
_LEAVE_SECONDS = 60.0  # the same for a worker that drains and ends
_LONGEST_PAUSE = 30.0  # seconds between starts of a worker that dies before it is ready
_EXIT_SECONDS = 10.0  # for a process to exit after its link was closed


@dataclass(frozen=True)
class WorkerLink:
    """What a worker gets from its parent. folder: for the sockets of all workers. grpc_port: 0 for no gRPC."""

    index: int
    listener: socket.socket
    parent: socket.socket
    grpc_port: int
    folder: Path

    def announce_ready(self) -> None:
        self.parent.send(READY)

    def announce_alive(self) -> None:
        with suppress(OSError):  # a parent that is stopped reads nothing, one that has died is noticed elsewhere
            self.parent.send(ALIVE, socket.MSG_DONTWAIT)


def worker_link() -> WorkerLink | None:
    """Return what the parent passed to this process; None if it is not a worker."""
    given = os.environ.pop(ENVIRONMENT, None)
    if given is None:
        return None
    index, listener, parent, grpc_port, folder = given.split(" ", 4)
    listening = socket.socket(fileno=int(listener))
    listening.setblocking(False)
    return WorkerLink(int(index), listening, socket.socket(fileno=int(parent)), int(grpc_port), Path(folder))


@dataclass(eq=False)
class _Worker:
    index: int
    process: "subprocess.Popen[bytes]"
    link: socket.socket
    replaces: "_Worker | None" = None
    ready: bool = False
    stopping: bool = False
    heard: float = 0.0  # its last sign of life, time.monotonic()

    def drain(self) -> None:
        self.stopping = True
        self.link.shutdown(socket.SHUT_WR)


def supervise(listener: socket.socket, workers: int, serving: str, grpc_port: int = 0) -> int:
    """Keep `workers` processes with this process's own command line serving on `listener`; return the exit code.

    serving: printed when all are warm. grpc_port: a port that they share and the caller holds, or 0. SIGTERM and SIGINT
    drain the workers, a second one kills them. SIGHUP replaces them one after another, without a gap; with gRPC it is
    passed on, as SIGUSR1 is.
    """
    if sys.platform == "win32":
        raise InputError("--workers needs a POSIX system: use --instances")
    with tempfile.TemporaryDirectory(prefix="vitx-") as folder:
        return _Supervisor(listener, workers, serving, grpc_port, Path(folder)).run()


class _Supervisor:
    def __init__(self, listener: socket.socket, workers: int, serving: str, grpc_port: int, folder: Path) -> None:
        self._listener = listener
        self._grpc_port = grpc_port
        self._count = workers
        self._serving = serving
        self._folder = folder
        self._workers: list[_Worker] = []
        self._to_replace: list[_Worker] = []
        self._restarts: dict[int, float] = {}  # worker index → when to start it again, time.monotonic()
        self._pauses: dict[int, float] = {}  # worker index → seconds before the last restart
        self._announced = False
        self._stopping = False
        self._exit_code = 0
        self._looked = time.monotonic()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        signals, wakeup = socket.socketpair()
        for end in (signals, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)  # its number arrives on `signals`
        self._selector.register(signals, selectors.EVENT_READ)
        self._start(0)  # first alone, so that an error is printed once
        while self._workers or self._restarts:
            for key, _ in self._selector.select(self._until_restart()):
                if key.data is not None:
                    self._on_link(key.data)
                    continue
                for received in signals.recv(64):
                    self._on_signal(received)
            self._restart_due()
            self._kill_hung()
        signal.set_wakeup_fd(-1)
        return self._exit_code

    def _start(self, index: int, replaces: _Worker | None = None) -> None:
        ours, theirs = socket.socketpair()
        given = f"{index} {self._listener.fileno()} {theirs.fileno()} {self._grpc_port} {self._folder}"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env={**os.environ, ENVIRONMENT: given},
                pass_fds=(self._listener.fileno(), theirs.fileno()),
                stdin=subprocess.DEVNULL,
            )
        worker = _Worker(index, process, ours, replaces)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _on_link(self, worker: _Worker) -> None:
        try:
            said = worker.link.recv(16)
        except ConnectionError:
            said = b""
        worker.heard = time.monotonic()
        if READY in said:
            self._on_ready(worker)
        elif not said:
            self._on_death(worker)

    def _on_ready(self, worker: _Worker) -> None:
        worker.ready = True
        self._pauses.pop(worker.index, None)
        if self._stopping:
            return
        if worker.replaces is not None:
            if worker.replaces in self._workers:
                worker.replaces.drain()
            self._replace_next()
        if not self._announced and len(self._workers) < self._count:
            for index in range(1, self._count):
                self._start(index)
        elif not self._announced and all(each.ready for each in self._workers):
            self._announced = True
            print(self._serving, flush=True)

    def _on_death(self, worker: _Worker) -> None:
        self._selector.unregister(worker.link)
        worker.link.close()
        self._workers.remove(worker)
        code = _exit_code(worker.process)
        if worker.stopping:
            self._exit_code = self._exit_code or max(0, code)
        elif not self._announced:
            self._exit_code = code if code > 0 else 1
            self._drain()
        elif worker.replaces is not None and not worker.ready:
            log(f"vitx: the replacement of worker {worker.index} {_ended(code)}: the workers that run stay")
            self._to_replace.clear()
        else:
            self._plan_restart(worker, code)

    def _plan_restart(self, worker: _Worker, code: int) -> None:
        pause = 0.0 if worker.ready else min(_LONGEST_PAUSE, 2 * self._pauses.get(worker.index, 0.5))
        self._pauses[worker.index] = pause
        self._restarts[worker.index] = time.monotonic() + pause
        log(f"vitx: worker {worker.index} (process {worker.process.pid}) {_ended(code)}: another one is started")

    def _kill_hung(self) -> None:
        """Kill the workers that were warm and have given no sign of life; as any that died they are replaced."""
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        for worker in self._workers:
            if now - before > _HANG_SECONDS / 2:  # this process was stopped, perhaps with its workers
                worker.heard = now
            elif worker.ready and now - worker.heard > (_LEAVE_SECONDS if worker.stopping else _HANG_SECONDS):
                log(f"vitx: worker {worker.index} (process {worker.process.pid}) hangs: it is killed")
                worker.process.kill()
                worker.heard = now  # said once

    def _until_restart(self) -> float:
        """Seconds until a worker is to be started, or the workers are to be looked at."""
        due = min(self._restarts.values(), default=math.inf) - time.monotonic()
        return min(max(0.0, due), BEAT_SECONDS)

    def _restart_due(self) -> None:
        for index, when in list(self._restarts.items()):
            if when <= time.monotonic():
                del self._restarts[index]
                self._start(index)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._pass_on(number)
        elif number == signal.SIGHUP and self._grpc_port:
            # grpcio drops calls on connections that it closes, so these workers stay and load their bundles again.
            self._pass_on(number)
        elif number == signal.SIGHUP:
            if self._announced and not self._stopping and not self._to_replace:
                log("vitx: every worker is replaced, one after another")
                self._to_replace = list(self._workers)
                self._replace_next()
        elif self._stopping:
            log("vitx: stopped by a second signal")
            for worker in self._workers:
                worker.process.kill()
            os._exit(128 + number)
        else:
            log("vitx: draining; a second signal stops at once")
            self._drain()

    def _pass_on(self, number: int) -> None:
        for worker in self._workers:
            if worker.ready:
                worker.process.send_signal(number)

    def _replace_next(self) -> None:
        while self._to_replace:
            worker = self._to_replace.pop(0)
            if worker in self._workers and not worker.stopping:  # otherwise it has died and was replaced
                self._start(worker.index, replaces=worker)
                return

    def _drain(self) -> None:
        self._stopping = True
        self._listener.close()  # once the workers close theirs too, new clients are refused instead of waiting
        self._restarts.clear()
        for worker in self._workers:
            if not worker.stopping:
                worker.drain()


def _exit_code(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
