"""Stores and servers by URL: fsspec, which is imported when it is needed, and the standard library's HTTP."""

import importlib.util
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vitx.core.errors import EnvironmentMissing, InputError, missing_package

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

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
