"""The workers of one parent among themselves: each answers the others on a Unix socket in the parent's folder."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

_SUFFIX = ".worker"
_LOCK = "management.lock"
_UNLOADED = "unloaded.json"

Answer = Callable[[str], Awaitable[bytes]]


class Siblings:
    """This worker's answers to the others' questions, and its own questions to them.

    A question is a name and a text, such as "load" and the model; `answers` has what to call with the text.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self.folder = folder
        # The process is part of it: while a worker is replaced there are two of its index.
        self._path = folder / f"{index}-{os.getpid()}{_SUFFIX}"
        self._answers: Mapping[str, Answer] = {}
        self._server: asyncio.Server | None = None
        self._turn = asyncio.Lock()

    async def start(self, answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._server = await asyncio.start_unix_server(self._on_question, self._path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def ask(self, name: str, text: str = "", *, seconds: float) -> dict[str, bytes]:
        """Every worker's answer by its index, this one's too; without those that are gone or need longer."""
        paths = sorted(self.folder.glob(f"*{_SUFFIX}"))
        answers = await asyncio.gather(*(_ask(path, name, text, seconds) for path in paths))
        return {path.stem.partition("-")[0]: data for path, data in zip(paths, answers, strict=True) if data}

    async def ask_others(self, name: str, text: str, *, seconds: float) -> dict[str, bytes]:
        """As `ask`, one worker after another, and without this one."""
        paths = [path for path in sorted(self.folder.glob(f"*{_SUFFIX}")) if path != self._path]
        answers = {path.stem.partition("-")[0]: await _ask(path, name, text, seconds) for path in paths}
        return {index: data for index, data in answers.items() if data}

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """No other worker starts, or manages models, meanwhile."""
        async with self._turn:  # one thread waits at most: loading a model needs threads too
            lock = await asyncio.to_thread(_locked, self.folder, alone=True)
            try:
                yield
            finally:
                lock.close()

    async def _on_question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):  # who asked is gone, or is no worker
            name, _, text = (await reader.readline()).decode().rstrip("\n").partition(" ")
            if name in self._answers:
                writer.write(await self._answers[name](text))
            writer.close()
            await writer.wait_closed()


async def _ask(path: Path, name: str, text: str, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(f"{name} {text}\n".encode())
                return await reader.read()
            finally:
                writer.close()
    except OSError:  # a timeout too
        return b""


def starting(folder: Path) -> IO[str]:
    """What a worker holds while it loads its models, until it closes it: nobody manages them meanwhile."""
    return _locked(folder, alone=False)


def _locked(folder: Path, *, alone: bool) -> IO[str]:
    import fcntl  # of POSIX, as workers are

    lock = (folder / _LOCK).open("a")
    fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)  # the kernel ends it with the process
    return lock


def unloaded(folder: Path) -> set[str]:
    """The models that clients had unloaded: a worker that starts leaves them out."""
    try:
        return set(json.loads((folder / _UNLOADED).read_text()))
    except FileNotFoundError:
        return set()


def note_unloaded(folder: Path, name: str, *, is_unloaded: bool) -> None:
    names = unloaded(folder) | {name} if is_unloaded else unloaded(folder) - {name}
    fresh = folder / f"{_UNLOADED}.{os.getpid()}"
    fresh.write_text(json.dumps(sorted(names)))
    fresh.replace(folder / _UNLOADED)
