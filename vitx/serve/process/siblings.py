"""Messages between the workers of one parent: each listens on a Unix socket in the parent's temporary folder."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

_SUFFIX = ".worker"
LONGEST_SOCKET = len(f"/vitx-xxxxxxxx/9999-{time.time_ns()}{_SUFFIX}")  # in the temporary folder

Handler = Callable[[str], Awaitable[bytes]]


class Siblings:
    """Asks the other workers of the same parent, and answers their questions.

    A question is a name and a text, such as "load" and the model's name.
    """

    def __init__(self, folder: Path, index: int) -> None:
        """`start_lock` blocks `exclusive`: close it when this worker has loaded its models."""
        self.start_lock = _locked(folder, exclusive=False)
        self._folder = folder
        # With the time: while a worker is replaced two have its index, and what the newer one answers counts.
        self._path = folder / f"{index}-{time.time_ns()}{_SUFFIX}"
        self._exclusive = asyncio.Lock()

    async def start(self, handlers: Mapping[str, Handler]) -> None:
        """Listen; `handlers`: name of a question → function that answers its text."""
        self._handlers = handlers
        self._server = await asyncio.start_unix_server(self._on_question, self._path)

    def close(self) -> None:
        """Call after `start`."""
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def ask(self, name: str, text: str = "", *, seconds: float) -> dict[str, bytes]:
        """Ask all workers at once, this one too; return answers by worker index, without those that time out."""
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        answers = await asyncio.gather(*(_ask(path, name, text, seconds) for path in paths))
        return {path.stem.partition("-")[0]: data for path, data in zip(paths, answers, strict=True) if data}

    async def ask_others(self, name: str, text: str, *, seconds: float) -> dict[str, bytes]:
        """As `ask`, but one worker after another, and not this one."""
        paths = [path for path in sorted(self._folder.glob(f"*{_SUFFIX}")) if path != self._path]
        return {path.stem.partition("-")[0]: data for path in paths if (data := await _ask(path, name, text, seconds))}

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """While in this context no other worker starts or manages models."""
        async with self._exclusive:  # so that at most one thread blocks on the file lock
            with await asyncio.to_thread(_locked, self._folder, exclusive=True):
                yield

    def is_unloaded(self, name: str, version: str) -> bool:
        """Whether a client has unloaded the model, and none has loaded this version since: who starts skips it."""
        return (loaded := self._loaded_since(name)).exists() and not (loaded / version).exists()

    def note_unloaded(self, name: str, *, is_unloaded: bool) -> None:
        shutil.rmtree(self._loaded_since(name), ignore_errors=True)
        if is_unloaded:
            self._loaded_since(name).mkdir()

    def note_loaded(self, name: str, version: str) -> None:
        with suppress(FileNotFoundError):  # no client has unloaded the model
            (self._loaded_since(name) / version).touch()

    def _loaded_since(self, name: str) -> Path:
        """A folder for each model, as one worker may load one by `--watch` while another unloads another."""
        return self._folder / f"{sha256(name.encode()).hexdigest()}.unloaded"

    async def _on_question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError), closing(writer):  # the other side is gone, or is not a worker
            name, _, text = (await reader.readline()).decode().rstrip("\n").partition(" ")
            if name in self._handlers:
                writer.write(await self._handlers[name](text))


async def _ask(path: Path, name: str, text: str, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(path)
            with closing(writer):
                writer.write(f"{name} {text}\n".encode())
                return await reader.read()
    except OSError:  # includes TimeoutError
        return b""


def _locked(folder: Path, *, exclusive: bool) -> IO[str]:
    import fcntl  # POSIX only, as workers are

    lock = (folder / "management.lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)  # released by the kernel when the process ends
    return lock
