"""What is asked of a store: how often, for how long, and how much of the answer is read."""

import errno
import io
import re
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import inventory, remote
from vitx.predict.inputs.inventory import Shard, read_shard, take_inventory
from vitx.predict.inputs.remote import check_size
from vitx.predict.inputs.stores import exists, open_stream, read_bytes, version_of, walk_images


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


Read = Callable[[Store], bytes]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


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
    store = Store([RuntimeError("reset")] * 2 + [ValueError("broken")])
    with pytest.raises(ImageError, match=r"^cannot read the object: ValueError: broken$"):
        read(store)
    assert store.calls == 3
    assert waits == [0.2, 1.0] * 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "cannot open the image: No such file or dir"),
        (PermissionError("Forbidden"), "cannot open the image: Forbidden"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "cannot open the image: Is a directory"),
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
        assert ended.wait(20)
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


TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w") as archive:
    for number in range(40):
        member = tarfile.TarInfo(f"{number:02d}.png")
        member.size = 1000
        archive.addfile(member, io.BytesIO(bytes([number]) * 1000))
NAMES = [f"a.tar/{number:02d}.png" for number in range(40)]
TABLE = io.BytesIO()
pq.write_table(pa.table({"image": [bytes([number]) * 1000 for number in range(40)]}), TABLE, use_dictionary=False)
FILES = {
    "a.tar": TAR.getvalue(),
    "a.parquet": TABLE.getvalue(),
    "list.txt": b"".join(b"%d.png\n" % n for n in range(9)),
}


class Host(BaseHTTPRequestHandler):
    """FILES, with ranges. faults: what becomes of the next requests of the method. release: ends all that stall."""

    protocol_version = "HTTP/1.1"
    faults: dict[str, list[str]]
    ranges: bool
    requests: list[str]
    release: Event
    served: Event

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        self.close_connection = True
        data = FILES.get(self.path.strip("/"))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        self.requests.append(f"{method} {self.headers.get('Range', '')}".strip())
        fault = self.faults[method].pop(0) if self.faults.get(method) else ""
        if data is None or fault.isdigit():
            self.send_error(int(fault or 404))
            return
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        with suppress(ConnectionError):
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Type", "application/octet-stream")
            self.end_headers()
            if method == "GET":
                self._send(part, fault)

    def _send(self, data: bytes, fault: str) -> None:
        if fault in ("stalls", "drips"):
            self.served.set()
        if fault == "drips":
            while not self.release.wait(0.001):
                self.wfile.write(data[:1])
            return
        self.wfile.write(data[: {"closes": len(data) // 2, "stalls": 0}.get(fault)])
        self.wfile.flush()
        if fault == "stalls":
            self.release.wait(30)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Hosts:
    """Servers of one test, and what they were asked for."""

    def __init__(self) -> None:
        self.servers: list[ThreadingHTTPServer] = []
        self.release, self.served = Event(), Event()

    def __call__(self, *, ranges: bool = True, **faults: list[str]) -> tuple[str, list[str]]:
        requests: list[str] = []
        found = {"faults": faults, "ranges": ranges, "requests": requests}
        events = {"release": self.release, "served": self.served}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Host", (Host,), found | events))
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", requests


@pytest.fixture
def host() -> Iterator[Hosts]:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    hosts = Hosts()
    yield hosts
    hosts.release.set()
    for server in hosts.servers:
        server.shutdown()
        server.server_close()


def tar_items(url: str) -> list[tuple[str, str]]:
    """Keys, with the reason of those that have no content."""
    items = read_shard(Shard("tar", "a.tar"), url, Path("list"))
    return [(item.key, str(item.source) if isinstance(item.source, ImageError) else "") for item in items]


def test_a_stream_is_one_request(host: Hosts) -> None:
    url, requests = host()
    assert tar_items(url) == [(name, "") for name in NAMES]
    assert requests == ["HEAD", "GET"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 14)


@pytest.mark.parametrize("fault", ["500", "429", "closes", "stalls", "drips"])
def test_a_stream_goes_on_where_a_server_failed(
    host: Hosts, waits: list[float], small_blocks: None, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    url, _ = host(GET=[fault])
    if fault in ("stalls", "drips"):
        monkeypatch.setattr(remote, "READ_SECONDS", 0.2)

        def wait(seconds: float) -> None:
            waits.append(seconds)
            assert host.served.wait(20)  # before that, a busy machine was too slow
            monkeypatch.setattr(remote, "READ_SECONDS", 60.0)

        monkeypatch.setattr(time, "sleep", wait)
    assert tar_items(url) == [(name, "") for name in NAMES]
    assert waits == [0.2]


@pytest.mark.parametrize("fault", ["500", "stalls", "drips"])
def test_a_stream_is_given_up(host: Hosts, waits: list[float], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(remote, "READ_SECONDS", 0.05 if fault != "500" else 30)
    url, _ = host(GET=[fault] * 9, HEAD=["500"] * 9)
    monkeypatch.setattr(Host, "_send", lambda self, data, fault: self.release.wait(30))
    reason = "ClientResponseError: 500" if fault == "500" else "TimeoutError: not read within 0.05 s"
    ((name, error),) = tar_items(url)
    assert name == "a.tar"
    assert error.startswith("cannot read the tar file to its end, what follows was not predicted: the store does not ")
    assert reason in error
    assert waits == [0.2, 1.0]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_file_that_a_server_does_not_give_is_asked_for_once(host: Hosts, waits: list[float], status: int) -> None:
    url, _ = host(GET=[str(status)] * 9, HEAD=[str(status)] * 9)
    with pytest.raises(FileNotFoundError if status == 404 else PermissionError):
        open_stream(f"{url}/a.tar").read(1)
    assert waits == []


def test_a_server_that_gives_no_parts_of_files(host: Hosts, waits: list[float], small_blocks: None) -> None:
    """As that of Python's http.server: a stream is read from its beginning to its end, and no further."""
    url, requests = host(ranges=False)
    assert tar_items(url) == [(name, "") for name in NAMES]
    assert requests == ["HEAD", "GET"]
    url, _ = host(ranges=False, GET=["closes"] * 9)
    *items, (name, error) = tar_items(url)
    assert items == [(name, "") for name in NAMES[: len(items)]]
    assert name == "a.tar"
    # A connection that was closed may take with it what was not read yet.
    assert re.search("the (server gives no part of a file, and byte 16,384|store does not give it: Content)", error)
    (row,) = read_shard(Shard("parquet", "a.parquet"), host(ranges=False)[0], Path("list"))
    assert re.search("beyond row 0: the server gives no part of a file, and byte .* copy it to this ", str(row.source))


def test_a_table_is_read_by_parts(host: Hosts, waits: list[float], small_blocks: None) -> None:
    url, requests = host(GET=["closes", "500"])
    rows = list(read_shard(Shard("parquet", "a.parquet"), url, Path("list")))
    assert [row.source for row in rows] == [bytes([number]) * 1000 for number in range(40)]
    assert all(one == "HEAD" or one.startswith("GET bytes=") for one in requests)
    assert waits == [0.2, 1.0]


class Breaking:
    """A store whose file breaks off behind its first block, and is opened again then; tags: what it is each time."""

    def __init__(self, *tags: str) -> None:
        self.tags, self.places = list(tags), list[int]()

    def open(self, *_: Any, **__: Any) -> Any:
        tag, places, last = self.tags.pop(0), self.places, not self.tags

        class File(io.BytesIO):
            details: ClassVar = {"ETag": tag}

            def read(self, size: int | None = -1) -> bytes:
                places.append(self.tell())
                if self.tell() and not last:
                    raise OSError("reset")
                return super().read(size)

        return File(FILES["a.tar"])


def test_a_broken_file_is_read_on_if_it_is_still_the_same(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], small_blocks: None
) -> None:
    same, replaced = Breaking("first", "first"), Breaking("first", "second")
    monkeypatch.setattr(remote, "remote_filesystem", lambda url: (same if "same" in url else replaced, "a.tar"))
    assert tar_items("s3://same") == [(name, "") for name in NAMES]
    assert same.places[:3] == [0, 1 << 14, 1 << 14]
    *_, (name, error) = tar_items("s3://replaced")
    assert name == "a.tar"
    assert error.endswith("it was replaced while it was read")
    assert waits == [0.2] * 2


def lines(url: str, folder: Path) -> list[str]:
    found = take_inventory(f"{url}/list.txt", folder / "list", 100)
    return [item.key for shard in found.shards for item in read_shard(shard, found.base, folder / "list")]


def test_a_list_of_a_server(host: Hosts, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [f"{number}.png" for number in range(9)]
    url, _ = host(HEAD=["500"], GET=["500", "closes"])
    assert lines(url, tmp_path) == whole
    monkeypatch.setattr(remote, "BLOCK_BYTES", 16)
    url, _ = host(ranges=False, GET=["closes"] * 9)
    with pytest.raises(EnvironmentMissing, match=r"^cannot read the list '.*/list.txt' beyond line [02]: the s"):
        lines(url, tmp_path)
    for name, limit, place in (("MAX_LINE", 4, 1), ("MAX_LIST", 17, 3)):
        with monkeypatch.context() as small:
            small.setattr(inventory, name, limit)
            with pytest.raises(InputError, match=rf"^line {place} of '.*list.txt' ends behind .*has to be cut$"):
                lines(host()[0], tmp_path)


def test_a_server_in_trouble_has_not_nothing(host: Hosts, waits: list[float], tmp_path: Path) -> None:
    """fsspec says that there is no such file."""
    url, _ = host(HEAD=["503"] * 9, GET=["503"] * 9)
    with pytest.raises(EnvironmentMissing, match=r"^cannot look for '.*/list.txt': it gives no answer: .*503"):
        take_inventory(f"{url}/list.txt", tmp_path / "list", 100)
    assert waits == [0.2, 1.0]
    assert exists(f"{host()[0]}/absent.txt") is False


def test_a_file_of_a_server_is_not_searched_for_links(host: Hosts, tmp_path: Path) -> None:
    url, requests = host()
    take_inventory(f"{url}/a.tar", tmp_path / "list", 100)
    assert set(requests) == {"HEAD"}


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
