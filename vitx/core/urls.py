"""Stores and servers by URL: fsspec, which is imported when it is needed, and the standard library's HTTP."""

import hashlib
import importlib.util
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, missing_package

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

_BLOCK = 2**20
_SMALL_BYTES = 64 * _BLOCK  # of a bundle's manifest, certificate or signature at most
_SILENT_SECONDS = 30.0  # that an HTTP server may send nothing
_TOKEN, _TOKEN_BYTES = re.compile(rb"[!-~]{16,}"), 2**15  # as many as headers have by default


def open_store(url: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it; fsspec keeps the file system of each store.

    options: of the file system. Raises InputError for a URL that nothing opens, EnvironmentMissing where the store's
    package is not installed, or the server of an archive does not answer.
    """
    if importlib.util.find_spec("fsspec") is None:
        raise missing_package("fsspec", "serve")
    if re.match(r"(s3a?|gs|gcs)://[^/]*@", url):  # no bucket's name has an @, and stores would show it
        raise InputError(f"'{without_password(url)}': credentials of a store come from its own settings, not the URL")
    from fsspec import get_filesystem_class
    from fsspec.archive import AbstractArchiveFileSystem
    from fsspec.core import url_to_fs

    try:
        if re.search("::[a-z0-9_]+://", url):  # fsspec's chains, such as zip://a.jpg::s3://bucket/b.zip
            system, path = url_to_fs(url, **options)
        else:  # which would take any other two colons for one: of an IPv6 address, or of a key
            kind = get_filesystem_class(url.partition("://")[0])
            if issubclass(kind, AbstractArchiveFileSystem):  # which would open the working folder
                raise ValueError("behind :: the archive is named by a URL of its own, such as ::file:///FOLDER/a.zip")
            system, path = kind(**kind._get_kwargs_from_urls(url), **options), kind._strip_protocol(url)
    except ImportError as error:  # fsspec's own, which names the package
        raise EnvironmentMissing(without_password(f"cannot open '{url}': {error}; pip installs it")) from None
    except Exception as error:  # noqa: BLE001  # an unknown protocol, or whatever the store's package trips over
        if _is_no_answer(error.__cause__):  # fsspec says of the archive's server that the file is not there
            raise EnvironmentMissing(without_password(f"cannot read '{url}': {error.__cause__}")) from None
        raise InputError(without_password(f"cannot open '{url}': {error}")) from None
    return system, str(path)


def _is_no_answer(cause: BaseException | None) -> bool:
    """Whether a server was not reached, broke off or failed, and did not refuse what it was asked for."""
    if isinstance(cause, FileNotFoundError | PermissionError | ValueError) or 400 <= getattr(cause, "status", 0) < 500:
        return False
    return isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")


def without_password(text: str) -> str:
    """A URL, or a text with some, without the names and passwords in them, and queries, which may be tokens."""
    # Both may hold an apostrophe. What follows a quoted URL stays: the quote, and punctuation up to a space or the end.
    # Nothing is tried twice: a server may choose the text.
    return re.sub(r"\?[\w-]+=(?:[':;,.)]*+[^':;,.)\s])*+", "?…", re.sub(r"//[^/\s]*@", "//", text))


def is_http(url: str) -> bool:
    """Whether this is an HTTP URL of a host, and of a port that can be one if it names any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket without its other
        return False


def http_opener(cafile: str | None = None) -> "OpenerDirector":
    """urllib's, without redirects: a token is for the server that was named. `cafile`: trusted certificates, in PEM.

    The timeout that `open` is given is that of the whole reply: a socket's own is of each read, of a byte too.
    """
    import ssl
    from http.client import HTTPResponse
    from urllib import request

    def received_in_time(connection: Any, **asked: Any) -> HTTPResponse:
        reply, end = HTTPResponse(connection, **asked), time.monotonic() + connection.gettimeout()
        received: Any = reply.fp.raw
        read = received.readinto

        def readinto(buffer: Any) -> Any:
            connection.settimeout(max(0.001, end - time.monotonic()))
            return read(buffer)

        received.readinto = readinto
        return reply

    class InTime(request.HTTPSHandler, request.HTTPHandler):
        def do_open(self, http_class: Any, req: Any, **given: Any) -> HTTPResponse:
            timed: Any = type("Timed", (http_class,), {"response_class": staticmethod(received_in_time)})
            return super().do_open(timed, req, **given)

    opener = request.OpenerDirector()
    opener.add_handler(InTime(context=ssl.create_default_context(cafile=cafile)))
    for kind in (request.ProxyHandler, request.HTTPDefaultErrorHandler, request.HTTPErrorProcessor):
        opener.add_handler(kind())
    return opener


def whole_body(reply: Any, most: int) -> bytes:
    """The body of an HTTP reply, of which no more than `most` + 1 bytes are read.

    Raises IncompleteRead for fewer bytes than its head announces: `read` with a limit does not say so itself.
    """
    from http.client import IncompleteRead

    body = bytes(reply.read(most + 1))
    if reply.length and len(body) <= most:
        raise IncompleteRead(body, reply.length)
    return body


def read_token(path: Path | None) -> bytes | None:
    """The token in a file; raise InputError for one that is missing, or whose token is short."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:  # Notepad begins a file with a mark
            token = file.read(_TOKEN_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
    except OSError as error:
        raise InputError(f"cannot read the token file '{path}': {error}") from None
    if not _TOKEN.fullmatch(token):
        text = f"the token in '{path}' is not 16 or more visible ASCII characters: write one, such as 32 hex digits"
        raise InputError(text)
    return token


class Store:
    """The folder at a URL; `url` is without the password that it may have."""

    def __init__(self, url: str) -> None:
        self.url = without_password(url)
        self._in_one_piece: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if url.startswith(("http://", "https://")) and importlib.util.find_spec("aiohttp") is not None:
            from aiohttp import ClientTimeout

            # By default fsspec's client gives a file five minutes, however fast it comes; asks for ranges, which some
            # servers do not have; and takes any error for a file that is not there when it asks for a size.
            seconds = {"sock_connect": _SILENT_SECONDS, "sock_read": _SILENT_SECONDS}
            options = {"client_kwargs": {"timeout": ClientTimeout(total=None, **seconds)}}
            self._in_one_piece = {"block_size": 0, "size": -1}
        self._system, self._path = open_store(url, **options)
        self._system.invalidate_cache()  # of listings, with the sizes of files that may be others now

    def small(self, name: str) -> bytes | None:
        """A file that may be missing; stores that do not let folders be listed refuse it then."""
        with suppress(FileNotFoundError, PermissionError):
            content = b"".join(self._blocks(name, _SMALL_BYTES))
            if len(content) > _SMALL_BYTES:
                raise InputError(f"'{self.url}/{name}' has more than {_SMALL_BYTES} bytes: it is no file of a bundle")
            return content
        return None

    def copy(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Write a file of the manifest to `path`; raise InputError where it cannot be read, CheckFailed for another."""
        digest, written, blocks = hashlib.sha256(), 0, self._blocks(name, size)
        try:
            first = next(blocks, b"")
        except (FileNotFoundError, PermissionError):
            raise InputError(f"'{self.url}/{name}' is listed in the manifest and cannot be read") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as copy:
            for block in chain([first], blocks):
                written += len(block)
                digest.update(block)
                copy.write(block)
        if (written, digest.hexdigest()) != (size, sha256):
            raise CheckFailed(
                f"'{self.url}/{name}' is not the file that its manifest lists: if the bundle is being replaced, "
                "try again; else export it again"
            )

    def _blocks(self, name: str, most: int) -> Iterator[bytes]:
        """The content in blocks, and no more than a byte beyond `most`.

        Raises FileNotFoundError or PermissionError before the first one; for all else EnvironmentMissing.
        """
        left = most + 1
        try:
            with self._system.open(f"{self._path}/{name}", "rb", **self._in_one_piece) as file:
                while left and (block := bytes(file.read(min(left, _BLOCK)))):
                    left -= len(block)
                    yield block
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # noqa: BLE001 - each store's client raises its own
            if getattr(error, "status", None) == HTTPStatus.FORBIDDEN:
                raise PermissionError from None
            # The hub's has several lines, and quotes the signed URL of a file. fsspec's of a timeout has no text.
            silent = "the server has sent nothing for too long" if isinstance(error, TimeoutError) else ""
            reason = without_password(" ".join(str(error).split())) or silent or type(error).__name__
            raise EnvironmentMissing(f"cannot read '{self.url}/{name}': {reason}") from None
