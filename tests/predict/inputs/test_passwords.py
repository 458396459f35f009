"""Name and password in the URL of an input are used, and are written nowhere."""

import base64
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, png, tar_of
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS, PredictOptions, predict
from vitx.predict.inputs import remote
from vitx.predict.inputs.stores import join, without_user

USERS = ("bob:s3cr3t", "bob:other")
FILES = {f"{index}.png": png(colour_image(index, np.random.default_rng(index))) for index in range(4)}
FILES |= {"a.tar": tar_of(FILES), "notes.txt": b"", "list.txt": b"0.png\n1.png\n"}
# Of files that are not there, of no image, and a list that is none.
PAGES = {
    "lost": b'<a href="/lost/x.tar">x</a><a href="/lost/x.parquet">x</a>',
    "empty": b'<a href="/empty/x.dat">x</a>',
    "zero.txt": b"a\0b",
}


class Guarded(BaseHTTPRequestHandler):
    """FILES and a page of links to them for USERS alone, but for one image."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.strip("/")
        page = b"".join(b'<a href="/%s">x</a>' % one.encode() for one in FILES)
        data = (FILES | PAGES | {"": page}).get(name)
        known = [f"Basic {base64.b64encode(user.encode()).decode()}" for user in USERS]
        allowed = self.headers.get("Authorization") in known
        status = 404 if data is None else 500 if name == "3.png" else 200 if allowed else 401
        data = data if data and status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if name in ("", "lost", "empty") else "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "images"), [("", 3), ("*.png", 3), ("**", 7), ("list.txt", 2), ("a.tar", 4), ("0.png", 1)]
)
@pytest.mark.parametrize("options", [(), ("--shard", "1/1"), ("--incremental",)], ids=str)
def test_no_password_is_written_and_another_goes_on(
    vitx: Vitx, certified_original: Bundle, tmp_path: Path, host: str, name: str, images: int, options: tuple[str, ...]
) -> None:
    for user in USERS:
        given = (certified_original.path, f"http://{user}@{host}/{name}", "--out", tmp_path, "--max-error-rate", "1")
        code, said, error = vitx("predict", *given, *options)
        assert code == 0, error
        assert user[4:] not in said + error
    rows = pq.read_table(tmp_path / PREDICTIONS).to_pylist()
    assert sum(row["error"] is None for row in rows) == images
    assert not any("bob" in f"{row['path']} {row['error']}" for row in rows)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or not any(user[4:].encode() in path.read_bytes() for user in USERS), path


def test_no_reason_of_a_row_has_the_password(tiny_bundle: Bundle, tmp_path: Path, host: str) -> None:
    """fsspec's error about a file that is not there is its URL."""
    options = PredictOptions(max_error_rate=1)
    predict(tiny_bundle, NumpySession(), f"http://{USERS[0]}@{host}/lost/", tmp_path / "out", options, quiet=True)
    rows = pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()
    assert [row["path"] for row in rows] == ["x.parquet", "x.tar"]
    assert all(row["error"].endswith(f": http://{host}/lost/{row['path']}") for row in rows), rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty/", "empty/' holds no image"),
        ("zero.txt", "line 1 of '.*zero.txt' has a zero byte"),
        ("*.foo", "foo' names no image"),
        ("nothing/*.png", "cannot list the folder '.*nothing': "),
    ],
)
def test_no_error_in_python_has_the_password(
    tiny_bundle: Bundle, tmp_path: Path, host: str, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as raised:
        predict(tiny_bundle, NumpySession(), f"http://{USERS[0]}@{host}/{name}", tmp_path / "out", quiet=True)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://h/a@b:c", "http://h/a@b:c"),
        ("https://token@h:1/a", "https://h:1/a"),
        ("https://a:b@c@h/a", "https://h/a"),
        ("ftp://a:b@h/a", "ftp://a@h/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("zip://a.png::http://a:b@h/a.zip", "zip://a.png::http://h/a.zip"),
        ("/a:b@c/x", "/a:b@c/x"),
    ],
)
def test_what_is_written_of_a_url(url: str, told: str) -> None:
    """Of a container of Azure, which is no user, all."""
    assert without_user(url) == told


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("http://h:1/a.png", "http://a:b@h:1/a.png"),
        ("http://h:1", "http://a:b@h:1"),
        ("http://h:12/a.png", "http://h:12/a.png"),
        ("https://h:1/a.png", "https://h:1/a.png"),
        ("http://c:d@h:1/a.png", "http://c:d@h:1/a.png"),
        ("b.png", "http://a:b@h:1/x/b.png"),
    ],
)
def test_only_the_same_host_is_told_who_asks(name: str, location: str) -> None:
    assert join("http://a:b@h:1/x", name) == location
