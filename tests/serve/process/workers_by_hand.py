"""Workers that are no processes, and their parent in virtual time."""

import asyncio
import errno
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from virtual_time import PollingLoop
from vitx.serve.process.supervisor import ENVIRONMENT, _Supervisor


class Worker:
    """In the place of a worker's process: the worker's side of the link, and what the parent did to it."""

    def __init__(self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, int], stdin: int) -> None:
        self.command, self.given, self.passed = command, env[ENVIRONMENT].split(" "), pass_fds
        self.started = asyncio.get_running_loop().time()
        self.index, self.pid = int(self.given[0]), 4000 + int(self.given[0])
        self.readable = not stat.S_ISSOCK(os.fstat(stdin).st_mode)
        self.link = socket.socket(fileno=os.dup(pass_fds[1]))
        self.link.setblocking(False)
        self.code, self.exits = -int(signal.SIGKILL), True
        self.signals: list[int] = []
        self.killed: list[float] = []
        self.waited: list[float | None] = []

    def say(self) -> None:
        self.link.send(b".")

    def die(self, code: int = -signal.SIGKILL) -> None:
        self.code = code
        self.link.close()

    @property
    def told_to_drain(self) -> bool:
        try:
            return self.link.recv(1) == b""
        except BlockingIOError:
            return False

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.killed.append(asyncio.get_running_loop().time())

    def wait(self, timeout: float | None = None) -> int:
        self.waited.append(timeout)
        if timeout is not None and not self.exits:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.code


class Service:
    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self.folder, self.listener = folder, listener
        self.made: list[Worker] = []
        self.said: list[str] = []
        self.refused = False  # whether the system has no process to give
        self.tried: list[float] = []  # when it had none
        self.parent: Any = None

    def start(self, *arguments: Any, **options: Any) -> Worker:
        if self.refused:
            self.tried.append(asyncio.get_running_loop().time())
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.made.append(Worker(*arguments, **options))
        return self.made[-1]

    def run(self, test: Callable[[], Awaitable[None]], workers: int = 2, grpc_port: int = 0) -> int:
        """The exit code of a parent that is told to end after `test`, where that did not make it end."""

        async def serve() -> int:
            say = self.said.append
            self.parent = _Supervisor(
                self.listener, workers, "serving", lambda: say("next"), grpc_port, self.folder, started=2.5
            )
            running = asyncio.create_task(self.parent.run())
            await asyncio.sleep(0)
            try:
                if not running.done():
                    await test()
                    if not self.parent.stopping:
                        signal.raise_signal(signal.SIGTERM)
                        await settle()
                    for worker in self.made:
                        if worker.link.fileno() != -1:
                            worker.die(0)
                return int(await running)
            finally:
                for held in (*self.made, *self.parent.workers):
                    held.link.close()

        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            clock = SimpleNamespace(monotonic=runner.get_loop().time)
            with patch("vitx.serve.process.supervisor.time", clock):
                return runner.run(serve())

    async def warm(self, workers: int = 2) -> list[Worker]:
        """Every worker, all of them warm."""
        for number in range(workers):
            self.made[number].say()
            await settle()
        assert self.parent.announced
        return self.made[:workers]


async def settle() -> None:
    """Let all that can happen at this moment happen."""
    await asyncio.sleep(1e-6)
    await asyncio.sleep(1e-6)


async def kept_alive(seconds: float, *workers: Worker) -> None:
    """Pass the time, in which these say every second that they live."""
    for _ in range(round(seconds)):
        await asyncio.sleep(1)
        for worker in workers:
            worker.say()
    await settle()
