"""What is asked of a store: how often, for how long, and how much of the answer is read."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem

from server_process import HANG
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import remote, stores
from vitx.predict.inputs.remote import check_size
from vitx.predict.inputs.stores import is_folder, read_bytes, version_of, walk_images


def test_the_largest_file_that_is_read() -> None:
    check_size(400_000_000)
    with pytest.raises(ImageError, match=r"^400000001 bytes or more: more than the 400,000,000 that an image may"):
        check_size(400_000_001)


class Store:
    """A file system whose calls fail with the given errors, one after the other."""

    def __init__(self, errors: list[Exception], size: int = 5) -> None:
        self.errors, self.size, self.calls, self.questions = errors, size, 0, 0

    def info(self, _: str) -> dict[str, Any]:
        self.questions += 1
        return {"size": self.size}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return path.encode()[start:end]


class HubError(OSError):
    """As those of Hugging Face's package and of Azure's."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.response = SimpleNamespace(status_code=status)


Read = Callable[[Store], bytes]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Read:
    def read(store: Store) -> bytes:
        monkeypatch.setattr(remote, "remote_filesystem", lambda location: (store, location.partition("://")[2]))
        return read_bytes("s3://bucket/a.png")

    return read


def test_an_object_is_tried_three_times(read: Read, waits: list[float]) -> None:
    store = Store([])
    assert read(store) == b"bucket/a.png"
    assert (store.calls, store.questions) == (1, 0)
    assert waits == []
    assert read(Store([RuntimeError("reset"), TimeoutError()])) == b"bucket/a.png"
    assert waits == [0.2, 1.0]
    store = Store([RuntimeError("reset"), HubError(503), ValueError("broken")])
    with pytest.raises(ImageError, match=r"^cannot read the object: ValueError: broken$"):
        read(store)
    assert store.calls == 3
    assert waits == [0.2, 1.0] * 2


def test_too_many_open_files_are_no_fault_of_a_store(read: Read) -> None:
    """They would be rows with an error in an output that is finished."""
    many = OSError(errno.EMFILE, "Too many open files")
    followed = RuntimeError("Could not connect")
    followed.__context__ = many
    assert read(Store([many, followed])) == b"bucket/a.png"
    for error in (many, followed):
        with pytest.raises(EnvironmentMissing, match=r"^cannot read the object: .*: raise the limit of open files \("):
            read(Store([many, many, error]))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "cannot open the image: No such file or dir"),
        (PermissionError("Forbidden"), "cannot open the image: Forbidden"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "cannot open the image: Is a directory"),
        *((HubError(status), f"cannot read the object: HubError: {status}$") for status in (401, 403, 404, 410)),
    ],
)
def test_what_will_not_change_is_tried_once(read: Read, waits: list[float], error: OSError, message: str) -> None:
    store = Store([error])
    with pytest.raises(ImageError, match=rf"^{message}"):
        read(store)
    assert store.calls == 1
    assert waits == []


def test_of_an_object_that_is_too_large_no_more_is_loaded(
    read: Read, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_IMAGE_BYTES", len("bucket/a.png"))
    assert read(Store([])) == b"bucket/a.png"
    monkeypatch.setattr(remote, "MAX_IMAGE_BYTES", len("bucket/a.png") - 1)
    with pytest.raises(ImageError, match=r"^12 bytes or more: more than the 11 that an image may have$"):
        read(Store([]))
    assert waits == []


def test_an_empty_object_has_no_range(read: Read, waits: list[float]) -> None:
    """As S3 answers: with an error."""
    assert read(Store([OSError("InvalidRange")], size=0)) == b""
    assert waits == []


@contextmanager
def http_server(*statuses: int, answer: Callable[[Any], object] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server that answers each GET with the next status, then with 200, and HEAD with 405; its URL, and the requests.

    answer: called with the handler for each GET instead.
    """
    left, gets = list(statuses), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gets.append(self.path)
            if answer is not None:
                answer(self)
                return
            status = left.pop(0) if left else 200
            self.send_response(status)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"image")

        def do_HEAD(self) -> None:
            gets.append("HEAD")
            self.send_error(405)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", gets
        server.shutdown()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_http_server_is_asked_again(waits: list[float], status: int) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    with http_server(status, status) as (url, gets):
        assert read_bytes(f"{url}/a.png") == b"image"
    assert gets == ["/a.png"] * 3
    assert waits == [0.2, 1.0]
    with (
        http_server(*[status] * 20) as (url, _),
        pytest.raises(ImageError, match=rf"^cannot read the object: .*{status}"),
    ):
        read_bytes(f"{url}/a.png")


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_what_an_http_server_does_not_give_is_asked_for_once(waits: list[float], status: int) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    with (
        http_server(*[status] * 9) as (url, gets),
        pytest.raises(ImageError, match=rf"^cannot open the image: HTTP status {status}$"),
    ):
        read_bytes(f"{url}/a.png")
    assert gets == ["/a.png"]


def test_content_is_asked_for_as_it_is() -> None:
    """Else a server may compress a Parquet file on the way, of which then no part can be read."""
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    asked = []

    def answer(handler: Any) -> None:
        asked.append(handler.headers["Accept-Encoding"])
        handler.send_response(200)
        handler.send_header("Content-Length", "5")
        handler.end_headers()
        handler.wfile.write(b"image")

    with http_server(answer=answer) as (url, _):
        assert read_bytes(f"{url}/a.png") == b"image"
    assert asked == ["identity"]


def test_links_are_html() -> None:
    """As Apache lists `a&b.png`; an object of a store may be called `a&amp;b.png`."""
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")

    def answer(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(b'<a href="a&amp;b.png">a&amp;b.png</a>')

    with http_server(answer=answer) as (url, _):
        assert [*walk_images(url, lambda name: None)] == [("a&b.png", None)]


def test_of_an_http_body_without_end_no_more_is_read(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, so that nothing says how long it is."""
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    monkeypatch.setattr(remote, "MAX_IMAGE_BYTES", 100_000)
    ended = Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with suppress(ConnectionError):
            while True:  # until the reader closes the connection
                handler.wfile.write(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        ended.set()
        handler.close_connection = True

    with http_server(answer=answer) as (url, gets):
        with pytest.raises(ImageError, match=r"^[0-9]+ bytes or more: more than the 100,000 that"):
            read_bytes(f"{url}/a.png")
        assert ended.wait(HANG)
    assert gets == ["/a.png"]


def test_a_server_that_stalls_is_given_up(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    monkeypatch.setattr(remote, "READ_SECONDS", 0.01)
    release = Event()
    with http_server(answer=lambda _: release.wait(30)) as (url, _):
        with pytest.raises(ImageError, match=r"^cannot read the object: TimeoutError: not read within 0\.01 s$"):
            read_bytes(f"{url}/a.png")
        release.set()
    assert waits == [0.2, 1.0]


def test_a_read_that_is_stopped_waits_for_no_server() -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    release, stopped = Event(), Event()

    def answer(_: object) -> None:
        stopped.set()
        release.wait(30)

    with http_server(answer=answer) as (url, gets):
        with pytest.raises(CancelledError):
            read_bytes(f"{url}/a.png", stopped)
        release.set()
    assert gets == ["/a.png"]


def test_a_refused_connection_is_tried_again_and_named(waits: list[float]) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ImageError, match=r"^cannot read the object: .*Cannot connect"):
        read_bytes(f"http://127.0.0.1:{port}/a.png")
    assert waits == [0.2, 1.0]


def test_what_took_long_is_not_tried_again(read: Read, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(ImageError, match=r"^cannot read the object: RuntimeError: reset$"):
        read(Store([RuntimeError("reset")]))
    assert waits == []


def test_a_file_of_an_http_server_may_take_hours() -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")

    async def limits() -> Any:
        async with await remote._http_client(loop=None) as session:
            return session.timeout

    found = asyncio.run(limits())
    assert (found.total, found.sock_read) == (None, 130)


def test_a_page_of_links_without_end(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_IMAGE_BYTES", 100_000)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(ConnectionError):
            while True:  # until the reader closes the connection
                handler.wfile.write(b'<a href="1.png">' * 1000)

    with (
        http_server(answer=answer) as (url, _),
        pytest.raises(InputError, match=r"^cannot list the folder 'http.*bytes or more: more than the 100,000"),
    ):
        list(walk_images(url, print))
    assert waits == []


def test_a_listing_that_stalls_is_given_up(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    monkeypatch.setattr(remote, "READ_SECONDS", 0.05)
    release = Event()
    with http_server(answer=lambda _: release.wait(30)) as (url, _):
        with pytest.raises(InputError, match=r"cannot list the folder: TimeoutError: not read within 0\.05 s$"):
            list(walk_images(url, print))
        assert version_of(f"{url}/a.png") is None
        release.set()
    assert waits == [0.2, 1.0] * 2


def test_a_reason_is_one_line_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp quotes what came instead of HTTP."""
    monkeypatch.setattr(remote, "REMOTE_WAITS", ())

    def fails() -> None:
        raise ValueError("400, message:\n  Bad status line:\n" + "\\x00" * 2000)

    with pytest.raises(ImageError) as raised:
        remote.attempts(fails, "cannot read the object")
    start = "cannot read the object: ValueError: 400, message: Bad status line: \\x00"
    assert str(raised.value).startswith(start)
    assert len(str(raised.value)) == len("cannot read the object: ValueError: ") + 300


def test_a_reason_has_no_token_of_the_url_that_a_server_led_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's library names the signed URL of a large file, which anybody may read for an hour."""
    monkeypatch.setattr(remote, "REMOTE_WAITS", ())

    def fails() -> None:
        raise OSError("Server error '500 Oh' for url 'https://cdn/a.png?X-Amz-Signature=5ec7e7&n=1'\nFor more: see")

    told = r"OSError: Server error '500 Oh' for url 'https://cdn/a\.png\?…' For more: see$"
    with pytest.raises(ImageError, match=told):
        remote.attempts(fails, "cannot read the object")


@pytest.mark.parametrize(
    ("entry", "version"),
    [
        ({"size": 5, "ETag": '"abc"'}, "5-abc"),
        ({"size": 5, "ETag": "", "mtime": 3.5, "created": 1.0}, "5-3.5"),
        ({"size": 5, "LastModified": datetime.fromtimestamp(3.5, UTC)}, "5-3.5"),
        ({"size": 5, "type": "file"}, None),
    ],
)
def test_the_version_of_an_object(monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], version: str | None) -> None:
    """A listing and a header give the same one, which some servers write with quotation marks in one of them."""
    store = SimpleNamespace(info=lambda path: entry | {"name": path})
    monkeypatch.setattr(remote, "remote_filesystem", lambda location: (store, location.partition("://")[2]))
    assert version_of("s3://bucket/a.png") == version


def test_a_page_has_seconds_and_a_listing_of_many_pages_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, float]] = []

    def ask(system: Any, question: str, path: str, *, seconds: float, **_: Any) -> None:
        asked.append((question, path, seconds))

    monkeypatch.setattr(remote, "remote_filesystem", lambda location: (None, location.removeprefix("s3://")))
    monkeypatch.setattr(remote, "ask", ask)
    for location in ("s3://bucket/in", "http://h/in"):
        assert not is_folder(location)
    pages = [("isdir", "http://h/in", 0), ("info", "http://h/in", 0)]
    assert asked == [("isdir", "bucket/in", 3600.0), ("info", "bucket/in", 3600.0), *pages]


def test_a_pattern_asks_a_store_of_keys_for_those_below_or_for_the_glob(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keys(AbstractFileSystem):  # type: ignore[misc]
        protocol = "keys"

        def find(self, path: str, prefix: str = "", **_: Any) -> list[str]:
            raise AssertionError("of walks alone")

    fsspec.register_implementation("keys", Keys, clobber=True)
    asked: list[tuple[Any, ...]] = []
    found = {f"b/in{name}": {"type": kind} for name, kind in (("/a.png", "file"), ("2/b.png", "file"))}
    found |= {f"b/in/{name}": {"type": kind} for name, kind in (("c.png", "directory"), (".d.png", "file"))}

    def look(*given: Any, **options: Any) -> dict[str, Any]:
        asked.append((*given, options))
        return found

    monkeypatch.setattr(stores, "_look", look)
    assert list(stores.expand("keys://b/in/**/*.png")) == ["keys://b/in/a.png"]
    assert list(stores.expand("keys://b/in/*.png")) == ["keys://b/in/a.png"]
    assert asked == [("keys://b/in", "find", {"detail": True}), ("keys://b/in/*.png", "glob", {"detail": True})]


def test_a_stream_that_is_stopped_reads_no_more() -> None:
    fsspec.filesystem("memory").pipe("/stopped/a.tar", b"content")
    stopped = Event()
    with stores.open_stream("memory://stopped/a.tar", stopped) as file:
        assert file.read(3) == b"con"
    stopped.set()
    with stores.open_stream("memory://stopped/a.tar", stopped) as file, pytest.raises(CancelledError):
        file.read(3)
