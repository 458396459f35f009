"""Locations: how names are joined, what is an image, and how often a remote object is tried."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import stores
from vitx.predict.inputs.stores import check_size, expand, is_image_name, join, read_bytes, walk_images


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ("/in", "a.png", "/in/a.png"),
        ("/in/", "a/b.png", "/in/a/b.png"),
        ("", "a.png", "a.png"),
        ("/", "a.png", "/a.png"),
        ("/in", "/other/a.png", "/other/a.png"),
        ("/in", "s3://bucket/a.png", "s3://bucket/a.png"),
        ("s3://bucket", "a.png", "s3://bucket/a.png"),
    ],
)
def test_names_are_below_their_base_unless_absolute(base: str, name: str, expected: str) -> None:
    assert join(base, name) == expected


@pytest.mark.parametrize(
    ("name", "image"),
    [("a.png", True), ("b/A.JPG", True), ("a.webp", True), ("a.png.txt", False), ("png", False), ("a.tar", False)],
)
def test_images_are_known_by_their_last_suffix(name: str, image: bool) -> None:
    assert is_image_name(name) is image


def test_the_largest_file_that_is_read() -> None:
    check_size(400_000_000)
    with pytest.raises(ImageError, match=r"^400000001 bytes or more: more than the 400,000,000 that an image may"):
        check_size(400_000_001)


def test_a_pattern_gives_files_and_no_folders(tmp_path: Path) -> None:
    for name in ("a.png", "sub.png/b.png", "sub.png/deep/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(expand(f"{tmp_path}/*.png")) == [f"{tmp_path}/a.png"]
    assert sorted(expand(f"{tmp_path}/**/*.png")) == [
        f"{tmp_path}/{name}" for name in ("a.png", "sub.png/b.png", "sub.png/deep/c.png")
    ]


def test_hidden_names_are_left_out_at_every_depth(tmp_path: Path) -> None:
    for name in ("a.png", ".b.png", ".c/d.png", "e/.f.png", "e/.g/h.png", "e/i.png", "e/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(walk_images(str(tmp_path))) == ["a.png", "e/i.png"]


def test_a_folder_linked_twice_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert sorted(walk_images(str(tmp_path))) == ["a/1.png", "a/up/", "b/1.png", "b/up/"]


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
        monkeypatch.setattr(stores, "remote_filesystem", lambda location: (store, location.partition("://")[2]))
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
    monkeypatch.setattr(stores, "MAX_IMAGE_BYTES", len("bucket/a.png"))
    assert read(Store([])) == b"bucket/a.png"
    monkeypatch.setattr(stores, "MAX_IMAGE_BYTES", len("bucket/a.png") - 1)
    with pytest.raises(ImageError, match=r"^12 bytes or more: more than the 11 that an image may have$"):
        read(Store([]))
    assert waits == []


def test_an_empty_object_has_no_range(read: Read, waits: list[float]) -> None:
    """As S3 answers: with an error."""
    assert read(Store([OSError("InvalidRange")], size=0)) == b""
    assert waits == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_what_is_no_file_is_not_opened_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"^not a regular file$"):
        read_bytes(str(tmp_path / "pipe.png"))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ImageError, match=r"^cannot open the image: Is a directory$"):
        read_bytes(str(tmp_path / "folder.png"))


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
        Thread(target=server.serve_forever, daemon=True).start()
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
    monkeypatch.setattr(stores, "MAX_IMAGE_BYTES", 100_000)
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
    monkeypatch.setattr(stores, "READ_SECONDS", 0.01)
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


def test_a_url_that_nothing_opens_is_one_unreadable_image() -> None:
    with pytest.raises(ImageError, match=r"cannot open 'foo://x/a.png': .*foo"):
        read_bytes("foo://x/a.png")


class Tree:
    """A store with folders of which some cannot be listed; it has been listed before."""

    stale = True

    def invalidate_cache(self) -> None:
        self.stale = False

    def __init__(self, listings: dict[str, list[str] | Exception]) -> None:
        self.listings = listings

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:
        assert detail
        assert not self.stale
        found = self.listings[path]
        if isinstance(found, Exception):
            raise found
        return [
            {"name": name.rstrip("/"), "type": "directory" if name.endswith("/") else "file"} for name in (path, *found)
        ]

    def find(self, path: str) -> list[str]:
        raise AssertionError(f"of a store with folders, below {path}")


def test_a_remote_folder_that_cannot_be_listed_is_a_row(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    tree = Tree(
        {
            "b/in": ["b/in/1.png", "b/in/.x.png", "b/in/.y/", "b/in/sub/", "b/in/gone/", "b/in/a.txt"],
            "b/in/sub": ["b/in/sub/2.jpg", "b/in/sub/shut/"],
            "b/in/sub/shut": PermissionError("Access Denied"),
            "b/in/gone": RuntimeError("reset by peer"),
        }
    )
    monkeypatch.setattr(stores, "remote_filesystem", lambda location: (tree, location.partition("://")[2].rstrip("/")))
    assert sorted(walk_images("s3://b/in")) == ["1.png", "gone/", "sub/2.jpg", "sub/shut/"]
    assert waits == [0.2, 1.0]
    with pytest.raises(ImageError, match=r"^cannot list the folder: Access Denied$"):
        read_bytes("s3://b/in/sub/shut/")
    with pytest.raises(ImageError, match=r"^cannot list the folder: RuntimeError: reset by peer$"):
        read_bytes("s3://b/in/gone/")
    tree.listings["b/in"] = PermissionError("Access Denied")
    with pytest.raises(InputError, match=r"^cannot list the folder 's3://b/in': Access Denied$"):
        list(walk_images("s3://b/in"))


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """Keys without folders, listed as s3fs lists a bucket: what lies below an empty name is in no folder."""

    protocol = "bucket"
    cachable = False
    keys: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = path.strip("/") + "/"
        below = {key[len(folder) :].partition("/") for key in self.keys if key.startswith(folder)}
        entries = [(folder + name, "directory" if slash else "file") for name, slash, _ in below if name]
        return [{"name": name, "type": kind, "size": 1} for name, kind in sorted(set(entries))]

    def find(self, path: str, prefix: str = "", **_: Any) -> list[str]:
        if path.endswith("/shut"):
            raise PermissionError("Access Denied")
        return [key for key in self.keys if key.startswith(f"{path.rstrip('/')}/{prefix}")]

    def cat_file(self, path: str, **_: Any) -> bytes:
        return path.encode() if path in self.keys else b""


def test_keys_below_an_empty_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As listed by s3fs from an S3 server: `ls` has no folder for them."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    keys = ["b/in/a.jpg", "b/in//x.jpg", "b/in/s//c.jpg", "b/in/s/b.jpg", "b/in//.hidden/x.jpg", "b/in//n.txt"]
    monkeypatch.setattr(Bucket, "keys", [*keys, "b/in/shut/a.jpg", "b/in2//z.jpg", "b/in//deep//y.png", "b/in//.h.png"])
    for root in ("bucket://b/in", "bucket://b/in/"):
        found = sorted(walk_images(root))
        odd = ["bucket://b/in//deep//y.png", "bucket://b/in//x.jpg", "bucket://b/in/s//c.jpg"]
        assert found == ["a.jpg", *odd, "s/b.jpg", "shut/"]
    assert [read_bytes(join("bucket://b/in", name)) for name in odd] == [
        name.partition("//")[2].encode() for name in odd
    ]
