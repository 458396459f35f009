"""Tar and Parquet files and lists of servers that fail, stall, drip, break off or give no parts of files."""

import gzip
import io
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import listed, tar_of
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import inventory, remote
from vitx.predict.inputs.inventory import read_shard
from vitx.predict.inputs.stores import exists, open_stream
from vitx.predict.inputs.tars import tar_images
from vitx.predict.ledger import Shard

TAR = tar_of({f"{number:02d}.png": bytes([number]) * 1000 for number in range(40)})
NAMES = [f"a.tar/{number:02d}.png" for number in range(40)]
TABLE = io.BytesIO()
pq.write_table(pa.table({"image": [bytes([number]) * 1000 for number in range(40)]}), TABLE, use_dictionary=False)
FILES = {
    "a.tar": TAR,
    "a.parquet": TABLE.getvalue(),
    "list.txt": b"".join(b"%d.png\n" % n for n in range(9)),
}


class Host(BaseHTTPRequestHandler):
    """FILES, with ranges. faults: what becomes of the next requests of the method, and the tags of the next answers.

    release: ends all that stall.
    """

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
            if tags := self.faults.get("tags"):
                self.send_header("ETag", tags.pop(0))
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
            if host.served.wait(2):  # before that, a busy machine was too slow
                waits.append(seconds)
                monkeypatch.setattr(remote, "READ_SECONDS", 60.0)

        monkeypatch.setattr(time, "sleep", wait)
    assert tar_items(url) == [(name, "") for name in NAMES]
    assert waits == [0.2] or (fault == "closes" and waits == [])  # what came before it closed may have been read


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
    assert re.search("the (server gives no part of a file, and byte [0-9,]+ |store does not give it: Content)", error)
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

    def __init__(self, *tags: str, content: bytes = TAR) -> None:
        self.tags, self.places, self.content = list(tags), list[int](), content

    def open(self, *_: Any, **__: Any) -> Any:
        tag, places, last = self.tags.pop(0), self.places, not self.tags

        class File(io.BytesIO):
            details: ClassVar = {"ETag": tag}

            def read(self, size: int | None = -1) -> bytes:
                places.append(self.tell())
                if self.tell() and not last:
                    raise OSError("reset")
                return super().read(size)

        return File(self.content)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "list.txt"])
def test_a_store_is_asked_for_whole_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However little its reader asks for at once."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", block := 1 << 17)
    content = random.Random(0).randbytes(400_000)
    if name != "list.txt":
        tar = tar_of({f"{number}.png": content[number * 4000 :][:4000] for number in range(100)})
        content = gzip.compress(tar) if name.endswith("gz") else tar
    store = Breaking("same", content=content)
    monkeypatch.setattr(remote, "remote_filesystem", lambda url: (store, name))
    with open_stream(f"s3://{name}") as file:
        if name == "list.txt":
            assert "".join(io.TextIOWrapper(file, encoding="latin-1", newline="")) == content.decode("latin-1")
        else:
            assert len(list(tar_images(file))) == 100
    assert sorted(set(store.places)) == [*range(0, len(content), block), len(content)]
    assert [store.places.count(place) for place in range(0, len(content), block)] == [1] * (len(content) // block + 1)


@pytest.mark.parametrize("parts", [True, False])
def test_what_came_before_a_connection_broke_is_read(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], parts: bool
) -> None:
    """All of it is less than a block. parts: whether the server gives parts of files."""

    class File(io.BytesIO):
        left = 2

        def read(self, size: int | None = -1) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise OSError("reset")
            return super().read(10_000)

        def seek(self, *place: int) -> int:
            if not parts:
                raise ValueError("Cannot seek streaming HTTP file")
            return super().seek(*place)

    opened = [File(TAR) for _ in range(9)]
    store = SimpleNamespace(open=lambda *_, **__: opened.pop())
    monkeypatch.setattr(remote, "remote_filesystem", lambda url: (store, "a.tar"))
    items = tar_items("s3://bucket")
    assert waits == []
    if parts:
        assert items == [(name, "") for name in NAMES]
    else:
        assert items[:-1] == [(name, "") for name in NAMES[: 20_000 // 1536]]
        assert "the server gives no part of a file, and byte 20,000 has to be asked for" in items[-1][1]


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


def test_a_broken_stream_is_read_on_if_it_is_still_the_same(
    host: Hosts, waits: list[float], small_blocks: None
) -> None:
    """fsspec tells nothing of a stream's version."""
    url, requests = host(GET=["closes"], tags=["first"] * 9)
    assert tar_items(url) == [(name, "") for name in NAMES]
    assert requests[:3] == ["HEAD", "GET", "HEAD"]
    url, _ = host(GET=["closes"], tags=[*["first"] * 2, *["second"] * 9])
    *found, (name, error) = tar_items(url)
    assert found == [(name, "") for name in NAMES[: len(found)]]
    assert name == "a.tar"
    assert error.endswith("it was replaced while it was read")


def lines(url: str, folder: Path) -> list[str]:
    found = listed(f"{url}/list.txt", folder / "list", 100)
    return [item.key for shard in found.shards for item in read_shard(shard, found.base, folder / "list")]


def test_a_list_of_a_server(host: Hosts, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [f"{number}.png" for number in range(9)]
    url, _ = host(HEAD=["500"], GET=["500", "closes"])
    assert lines(url, tmp_path) == whole
    monkeypatch.setattr(remote, "BLOCK_BYTES", 16)
    url, _ = host(ranges=False, GET=["closes"] * 9)
    # Of the four lines and a half that came, aiohttp gives what it had when it noticed the break.
    with pytest.raises(EnvironmentMissing, match=r"^cannot read the list '.*/list.txt' beyond line [024]: the s"):
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
        listed(f"{url}/list.txt", tmp_path / "list", 100)
    assert waits == [0.2, 1.0]
    assert exists(f"{host()[0]}/absent.txt") is False


def test_a_file_of_a_server_is_not_searched_for_links(host: Hosts, tmp_path: Path) -> None:
    url, requests = host()
    listed(f"{url}/a.tar", tmp_path / "list", 100)
    assert set(requests) == {"HEAD"}
