"""Object stores through fsspec: every request has a time limit, is made again where that may help, and can be stopped.

A thread that waits for a store is a daemon, and nobody waits for it: a stop never depends on a server.
stopped: when it is set, what waits raises CancelledError.
"""

import asyncio
import io
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from vitx.core.errors import MORE_FILES, TOO_MANY_FILES, EnvironmentMissing
from vitx.core.preprocess import MAX_PIXELS, ImageError
from vitx.core.urls import is_http, open_store, without_password

T = TypeVar("T")

# The size of an uncompressed image of MAX_PIXELS with four bytes a pixel. Nothing larger is read into memory at once.
MAX_IMAGE_BYTES = 4 * MAX_PIXELS
# What is asked for at once of a larger file.
BLOCK_BYTES = 4 << 20
# Characters of a store's error that go into a row.
MAX_REASON = 300
# What asking again does not change.
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)
# Seconds to wait before the second and the third attempt.
REMOTE_WAITS = (0.2, 1.0)
# Seconds for an image, a block or a question; for the listing of a folder, each page of which fsspec's packages limit;
# after which nothing is asked for again; and between two looks whether to go on.
READ_SECONDS, LIST_SECONDS, PATIENCE_SECONDS, LOOK_SECONDS = 120.0, 3600.0, 360.0, 0.2


class NotRead(ImageError):
    """It could not be opened or read now: nothing is known of its content, and it may be read another time."""


def check_size(size: int) -> None:
    """Raise ImageError for more bytes than MAX_IMAGE_BYTES; of a store no more are read to count them."""
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size} bytes or more: more than the {MAX_IMAGE_BYTES:,} that an image may have")


def remote_filesystem(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it."""
    return open_store(location, **({"get_client": _http_client} if is_http(location) else {}))


async def _http_client(**options: Any) -> Any:
    """A session for fsspec: aiohttp gives a file five minutes in all, and reads any number of bytes at once."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                self.raise_for_status()
                content = bytearray()
                async for block in self.content.iter_any():
                    content += block
                    check_size(len(content))
                self._body = bytes(content)
            return await super().read()

        def raise_for_status(self) -> None:
            final = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}
            if self.status in final:
                raise final[self.status](f"HTTP status {self.status}")
            if self.status >= 400:
                self.close()
            super().raise_for_status()

    late = READ_SECONDS + 10  # who waits has given up before, and says so
    limits = aiohttp.ClientTimeout(total=None, sock_connect=late, sock_read=late)
    # As it is: images gain nothing, and of what is compressed on the way no part, size or ETag is that of the file.
    headers = {"Accept-Encoding": "identity", **options.pop("headers", {})}
    ours: dict[str, Any] = {"timeout": limits, "response_class": Answer, "headers": headers}
    return aiohttp.ClientSession(**(ours | options))


def ask(
    system: Any, question: str, path: str, *, stopped: threading.Event | None = None, seconds: float = 0, **options: Any
) -> Any:
    """What a file system's `question` says of `path`. Raises TimeoutError after `seconds` (0: READ_SECONDS)."""
    if getattr(system, "async_impl", False):  # can be cancelled, which closes the connection
        future = asyncio.run_coroutine_threadsafe(getattr(system, f"_{question}")(path, **options), system.loop)
    else:
        future = _in_thread(lambda: getattr(system, question)(path, **options))
    return _awaited(future, seconds or READ_SECONDS, stopped)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Not of a pool, whose threads the interpreter waits for at its end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised to who waits
            future.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return future


def _awaited(future: Future[T], seconds: float, stopped: threading.Event | None) -> T:
    end = time.monotonic() + seconds
    try:
        while not future.done():
            if stopped is not None and stopped.is_set():
                raise CancelledError
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"not read within {seconds:g} s")
            futures.wait([future], min(left, LOOK_SECONDS))
        return future.result()
    finally:
        future.cancel()


def attempts(function: Callable[[], T], problem: str, stopped: threading.Event | None = None) -> T:
    """The value of `function`, which is called again unless its error will not change; at last raise NotRead.

    Not after PATIENCE_SECONDS, in which the store's own package has tried it again. Raises EnvironmentMissing if too
    many files are open.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    for wait in (*REMOTE_WAITS, None):
        if stopped is not None and stopped.is_set():
            raise CancelledError
        try:
            return function()
        except (ImageError, CancelledError):
            raise
        # Each store raises its own library's errors. Whatever it is, it becomes the text of a row.
        except Exception as error:  # noqa: BLE001
            cause = error.__cause__
            if isinstance(error, FINAL) and not _is_http_error(cause):
                raise _without_password(cause if isinstance(cause, PermissionError) else error) from None
            # Hugging Face's and Azure's packages have errors of their own for what is not there or may not be read.
            final = getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404, 410)
            if wait is None or final or time.monotonic() > end:
                shown = cause if _is_http_error(cause) else error
                # A library may quote kilobytes of an answer, or the signed URL that a server has led it to.
                text = without_password(" ".join(str(shown).split()))[:MAX_REASON]
                if _lacks_files(error):  # no fault of the store: it must not become a row
                    raise EnvironmentMissing(f"{problem}: {text}: {MORE_FILES}") from None
                raise NotRead(f"{problem}: {type(shown).__name__}: {text}") from None
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _without_password(error: OSError) -> OSError:
    """The error, or one of its kind without the password in the URL that it quotes, as fsspec's of a lost file does."""
    text = without_password(str(error))
    return error if text == str(error) else next(kind for kind in FINAL if isinstance(error, kind))(text)


def _lacks_files(error: BaseException | None) -> bool:
    """Whether it is about too many open files, or followed from that."""
    while error is not None and getattr(error, "errno", None) not in TOO_MANY_FILES:
        error = error.__cause__ or error.__context__
    return error is not None


def _is_http_error(error: BaseException | None) -> bool:
    """Whether fsspec calls it a file that is not there, whatever the server said, or did not say."""
    return type(error).__module__.startswith("aiohttp") or isinstance(error, TimeoutError)


def read_object(location: str, stopped: threading.Event | None) -> bytes:
    """The content of an image, by one request, which asks for one byte more than an image may have."""
    system, path = remote_filesystem(location)
    # Of HTTP servers, some answer a range otherwise; what they send is counted.
    limits = {} if is_http(location) else {"start": 0, "end": MAX_IMAGE_BYTES + 1}

    def read() -> bytes:
        try:
            return bytes(ask(system, "cat_file", path, stopped=stopped, **limits))
        except (CancelledError, TimeoutError, FileNotFoundError, PermissionError, ImageError):
            raise
        except Exception:
            with suppress(Exception):
                # S3 refuses any range of an empty object.
                if limits and ask(system, "info", path, stopped=stopped)["size"] == 0:
                    return b""
            raise

    content = attempts(read, "cannot read the object", stopped)
    check_size(len(content))
    return content


class NotGiven(OSError):
    """A store gives no file, or no part of one, that it may give later: nothing is known of its content."""


class RemoteFile(io.RawIOBase):
    """A tar, Parquet or list file of a store, opened when it is first read.

    Each block has READ_SECONDS, and is asked for again where that may help; then raises OSError. Over HTTP a file that
    is read from its beginning is one request; after a broken connection, or a seek, the server must give parts of it.
    """

    def __init__(self, location: str, stopped: threading.Event | None = None) -> None:
        self._location, self._stopped = location, stopped
        self._system, self._path = remote_filesystem(location)
        # Of fsspec's file; and what it was a file of.
        self._opening: Future[Any] | None = None
        self._version: Any = None
        self._place = 0
        # Whether nobody has asked for a place in it.
        self._whole = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._whole = self._whole and (offset, whence) == (0, io.SEEK_CUR)  # as `tell` asks
        if whence == io.SEEK_END:
            if (size := self._tried(lambda file: file.size)) is None:
                raise OSError("the server gives no part of a file, or not its length: copy it to this machine")
            offset += int(size)
        self._place = offset + (self._place if whence == io.SEEK_CUR else 0)
        return self._place

    def readinto(self, buffer: Any) -> int:
        content, broken = self._tried(lambda file: self._block(file, min(len(buffer), BLOCK_BYTES)))
        if broken:
            self._leave()
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def close(self) -> None:
        self._leave()
        super().close()

    def _leave(self) -> None:
        """Close fsspec's file, also one that is opened too late: a thread that waits for it ends."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.add_done_callback(lambda opened: opened.exception() or _in_thread(opened.result().close))

    def _tried(self, use: Callable[[Any], T]) -> T:
        def attempt() -> T:
            try:
                self._opening = self._opening or _in_thread(self._opened)
                file = _awaited(self._opening, READ_SECONDS, self._stopped)
                return _awaited(_in_thread(lambda: use(file)), READ_SECONDS, self._stopped)
            except BaseException:
                self._leave()
                raise

        try:
            return attempts(attempt, "the store does not give it", self._stopped)
        except ImageError as error:
            raise NotGiven(str(error)) from None

    def require_unchanged(self) -> None:
        """Raise OSError if an HTTP server has another version by now than what was read before.

        Where parts are asked for, each is of the file as it is then; stores refuse another version themselves.
        """
        if is_http(self._location):
            self._tried(lambda file: self._compare(self._system.info(self._path)))

    def _opened(self) -> Any:
        streamed = self._whole and self._place == 0 and is_http(self._location)
        options = {"block_size": 0} if streamed else {"block_size": BLOCK_BYTES, "cache_type": "none"}
        file = self._system.open(self._path, "rb", **options)
        details = getattr(file, "details", {})
        if is_http(self._location):  # of which fsspec keeps nothing with the file
            details = file.r.headers if streamed else self._system.info(self._path)
        self._compare(details)
        return file

    def _compare(self, details: Any) -> None:
        version = next((details[name] for name in ("ETag", "etag", "Last-Modified") if details.get(name)), None)
        if None not in (self._version, version) and self._version != version:
            raise ImageError("it was replaced while it was read")
        self._version = version or self._version

    def _block(self, file: Any, size: int) -> tuple[bytes, bool]:
        """Bytes from here on, and whether the connection broke behind them; else fewer than `size` at the end only."""
        content = bytearray()
        try:
            if file.tell() != self._place:
                file.seek(self._place)
            while len(content) < size and (more := file.read(size - len(content))):
                content += more
        except Exception as error:  # each store raises its own library's errors
            if content:
                return bytes(content), True
            if not isinstance(error, ValueError):  # of fsspec's HTTP
                raise
            raise ImageError(
                f"the server gives no part of a file, and byte {self._place:,} has to be asked for: the file is "
                "Parquet, or the connection broke there; copy it to this machine or to a store"
            ) from None
        return bytes(content), False


class BlockReader(io.BufferedReader):
    """Asks for whole blocks, also for `read1`, which would ask for as little as its caller wants: tarfile 10 KiB."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(file, BLOCK_BYTES)
        self.require_unchanged = file.require_unchanged

    def read1(self, size: int = -1, /) -> bytes:
        block = bytearray(BLOCK_BYTES if size < 0 else size)
        return bytes(memoryview(block)[: self.readinto1(block)])
