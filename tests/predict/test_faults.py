"""Damage of every kind to tar files, lists, Parquet files and what HTTP gives: nothing is lost without a word.

Each input has eight images, and the damage stands at a place that its seed chooses. What counts as a word: an error of
the command, or a row with a reason, by which the command ends with exit code 1.
"""

import bz2
import gzip
import io
import os
import re
import shutil
import signal
import socket
import sqlite3
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, NumpySession, colour_image, png, tar_of
from server_process import HANG
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, VitxError
from vitx.predict import PREDICTIONS, predict
from vitx.predict.inputs import remote
from vitx.predict.options import PredictOptions

COUNT = 8
PIXELS = [colour_image(index % 4, np.random.default_rng(index)) for index in range(COUNT)]
IMAGES = [png(pixels) for pixels in PIXELS]
CLASSES = {f"{i}.png": LABELS[c] for i, c in enumerate(NumpySession().infer(np.stack(PIXELS)).argmax(axis=1))}
# Makes the damaged input in a folder; returns what the command is given.
Fault = Callable[[Path, Random], str]


def tar() -> tuple[bytes, list[int]]:
    """A whole tar file, and where the headers of its members begin."""
    whole = tar_of(dict(zip(CLASSES, IMAGES, strict=True)))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        return whole, [member.offset for member in archive]


TAR, HEADERS = tar()
END = HEADERS[-1] + 512 + -(-len(IMAGES[-1]) // 512) * 512


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


def in_header(place: int) -> Callable[[Random], bytes]:
    return lambda chance: flipped(TAR, chance.choice(HEADERS) + place)


def zeroed_header(chance: Random) -> bytes:
    start = chance.choice(HEADERS)
    return TAR[:start] + bytes(512) + TAR[start + 512 :]


def with_member(kind: bytes, data: bytes) -> bytes:
    """One more member with an image's name."""
    info = tarfile.TarInfo("8.png")
    info.type, info.size, info.linkname = kind, len(data), "0.png"
    return TAR[:END] + info.tobuf() + data.ljust(512 * bool(data), b"\0") + bytes(1024)


TARS: dict[str, Callable[[Random], bytes]] = {
    "name flipped": in_header(0),
    "size flipped": in_header(130),
    "checksum flipped": in_header(150),
    "magic flipped": in_header(258),
    "header of zeros": zeroed_header,
    "cut between members": lambda chance: TAR[: chance.choice(HEADERS[1:])],
    "cut in a header": lambda chance: TAR[: chance.choice(HEADERS) + chance.randrange(1, 512)],
    "cut in an image": lambda chance: TAR[: chance.choice(HEADERS) + 512 + chance.randrange(1, 99)],
    "no end": lambda chance: TAR[:END],
    "bytes after the end": lambda chance: TAR + bytes(chance.randrange(2000)) + b"x",
    "two archives in one": lambda chance: TAR + TAR,
    "no tar": lambda chance: chance.randbytes(5000),
    "empty": lambda chance: b"",
    "link": lambda chance: with_member(tarfile.SYMTYPE, b""),
    "half an image": lambda chance: with_member(tarfile.REGTYPE, IMAGES[0][: chance.randrange(1, 60)]),
    "gzip with a wrong checksum": lambda chance: flipped(gzip.compress(TAR), -chance.randrange(5, 9)),
    "gzip that is cut": lambda chance: gzip.compress(TAR)[: -chance.randrange(1, 200)],
    "bzip2 that is cut": lambda chance: bz2.compress(TAR)[: -chance.randrange(1, 200)],
}


def lines(*more: bytes, encoding: str = "utf-8") -> bytes:
    return "".join(f"{name}\n" for name in CLASSES).encode(encoding) + b"".join(line + b"\n" for line in more)


LISTS: dict[str, bytes] = {
    "zero byte": lines(b"a\0b.png"),
    "UTF-16": lines(encoding="utf-16"),
    "absent": lines(b"absent.png"),
    "spaces at the end": lines(b"0.png  "),
    "folder": lines(b"."),
    "unknown protocol": lines(b"foo://0.png"),
    "name that is not UTF-8": lines(b"caf\xe9.png"),
    "empty": b"",
    "blank": b"\n\n\r\n",
}


def table(data: list[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": data}), file, use_dictionary=False, row_group_size=4, **options)
    return file.getvalue()


def page(chance: Random) -> int:
    """Where the image data of a row group begin."""
    group = pq.ParquetFile(io.BytesIO(table(IMAGES))).metadata.row_group(chance.randrange(2))
    return int(group.column(0).data_page_offset)


def garbage_page(chance: Random) -> bytes:
    whole, start = table(IMAGES), page(chance)
    return whole[:start] + b"\xff" * 40 + whole[start + 40 :]


def wrong_checksum(chance: Random) -> bytes:
    """Of an uncompressed page, in its own last bytes: those of an image that need not make it unreadable."""
    whole = table(IMAGES, compression="none", write_page_checksum=True, write_statistics=False)
    return flipped(whole, whole.index(IMAGES[chance.randrange(COUNT)]) + len(IMAGES[0]) - chance.randrange(1, 5))


TABLES: dict[str, Callable[[Random], bytes]] = {
    "cut": lambda chance: table(IMAGES)[: -chance.randrange(1, 300)],
    "no magic": lambda chance: table(IMAGES)[:-4] + bytes(4),
    "footer flipped": lambda chance: flipped(table(IMAGES), -9),
    "page of garbage": garbage_page,
    "checksum of a page": wrong_checksum,
    "null": lambda chance: table([*IMAGES, None]),
    "no image": lambda chance: table([*IMAGES, b"text"]),
    "no column of images": lambda chance: table([1, 2, 3]),
    "no Parquet file": lambda chance: chance.randbytes(999),
    "empty": lambda chance: b"",
}

HTTP = (401, 403, 404, 410, 429, 500, 503, "closed", "short", "page", "nothing", "loop")


# Until it is set, a request for /stall/NAME gets no answer; the first for a name in INTERRUPTS interrupts this process.
RELEASE, INTERRUPTS = threading.Event(), set[str]()


class Handler(BaseHTTPRequestHandler):
    """/OK/NAME is the image, /FAULT/NAME is not."""

    def do_HEAD(self) -> None:
        if not self.path.endswith(".tar"):
            self.send_error(405)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(TAR)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        _, fault, name = self.path.split("/")
        if fault == "stall":
            if name in INTERRUPTS:
                INTERRUPTS.remove(name)
                os.kill(os.getpid(), signal.SIGINT)
            if not RELEASE.wait(30):
                RELEASE.set()
            return
        data = TAR if name.endswith(".tar") else IMAGES[int(name[0])]
        if fault == "closed":
            self.connection.close()
            return
        if fault == "page":
            data = b"<html>please log in</html>"
        self.send_response({"loop": 302}.get(fault, int(fault) if fault.isdigit() else 200))
        if fault == "loop":
            self.send_header("Location", self.path)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: {"short": 20, "nothing": 0}.get(fault)])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))


def outcome(bundle: Bundle, source: Path | str, out: Path) -> str:
    """What the command says of it, "" if nothing; every row that has a class has the right one."""
    try:
        options = PredictOptions(shard_size=3, decode_threads=1, read_threads=1, batch_size=4)
        summary = predict(bundle, NumpySession(), str(source), out, options, quiet=True)
    except VitxError as error:
        return str(error)
    rows = pq.read_table(out / PREDICTIONS).to_pylist()
    names = [f"{row['path'].rpartition('/')[2].removeprefix('000000').removesuffix('.png')}.png" for row in rows]
    for name, row in zip(names, rows, strict=True):
        assert row["error"] or row["class"] == CLASSES[name]
    missing = CLASSES.keys() - {name for name, row in zip(names, rows, strict=True) if row["class"]}
    try:
        summary.check_errors(PredictOptions().max_error_rate)
    except CheckFailed as error:
        return str(error)
    assert not missing, "lost without a word"
    return ""


def say(bundle: Bundle, tmp_path: Path, name: str, data: bytes) -> str:
    folder = tmp_path / "in"
    folder.mkdir(exist_ok=True)
    for image, content in zip(CLASSES, IMAGES, strict=True):
        (folder / image).write_bytes(content)
    (folder / name).write_bytes(data)
    return outcome(bundle, folder / name, tmp_path / "out")


@pytest.mark.parametrize("fault", TARS)
def test_a_damaged_tar_is_noticed(certified_original: Bundle, tmp_path: Path, fault: str) -> None:
    assert say(certified_original, tmp_path, "a.tar", TARS[fault](Random(fault)))


@pytest.mark.parametrize("fault", LISTS)
def test_a_damaged_list_is_noticed(certified_original: Bundle, tmp_path: Path, fault: str) -> None:
    assert say(certified_original, tmp_path, "list.txt", LISTS[fault])


@pytest.mark.parametrize("fault", TABLES)
def test_a_damaged_table_is_noticed(certified_original: Bundle, tmp_path: Path, fault: str) -> None:
    assert say(certified_original, tmp_path, "a.parquet", TABLES[fault](Random(fault)))


@pytest.mark.parametrize("fault", HTTP)
def test_an_image_that_http_does_not_give_is_noticed(
    certified_original: Bundle, tmp_path: Path, server: str, fault: int | str
) -> None:
    urls = [f"{server}/200/{name}" for name in CLASSES]
    urls[Random(0).randrange(COUNT)] = f"{server}/{fault}/3.png"
    assert say(certified_original, tmp_path, "list.txt", "\n".join(urls).encode())


@pytest.mark.parametrize("name", ["0.png", "a.tar", "list.txt", ""])
def test_an_interrupt_waits_for_no_server(certified_original: Bundle, tmp_path: Path, server: str, name: str) -> None:
    # A server that ran in this process leaves its own behind.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    RELEASE.clear()
    INTERRUPTS.add(name)
    source = f"{server}/stall/{name}"
    if name == "0.png":
        source = str(tmp_path / "list.txt")
        Path(source).write_text(f"{server}/200/1.png\n{server}/stall/{name}\n")
    try:
        with pytest.raises(KeyboardInterrupt):
            predict(certified_original, NumpySession(), source, tmp_path / "out", quiet=True)
        assert not RELEASE.is_set()
        if not name.endswith((".png", ".tar")):  # nothing was begun
            assert not (tmp_path / "out").exists()
            return
        assert not any((tmp_path / "out" / PREDICTIONS).iterdir())
    finally:
        RELEASE.set()
        signal.signal(signal.SIGINT, before)


def test_a_server_that_is_not_there_is_noticed(certified_original: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert say(certified_original, tmp_path, "list.txt", lines(f"http://127.0.0.1:{port}/0.png".encode()))
    said = outcome(certified_original, f"http://127.0.0.1:{port}/a.tar", tmp_path / "tar")
    assert said.startswith(f"cannot look for 'http://127.0.0.1:{port}/a.tar': it gives no answer: ClientConnectorError")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tar", TAR),
        ("a.tar.gz", gzip.compress(TAR)),
        ("list.txt", lines()),
        ("list.txt", b"\xef\xbb\xbf" + lines().replace(b"\n", b"\r\n").rstrip()),
        ("a.parquet", table(IMAGES)),
    ],
)
def test_what_is_whole_gives_every_image(certified_original: Bundle, tmp_path: Path, name: str, data: bytes) -> None:
    assert say(certified_original, tmp_path, name, data) == ""


def stopped_half_way(bundle: Bundle, source: Path, out: Path) -> None:
    """A run with one part of three done, all of it in the ledger's main file."""

    ran = count(1)

    class Stopped(NumpySession):
        def _infer(self, images: Any) -> Any:
            if next(ran) > 3:  # of the second part: once the first is there
                end = time.monotonic() + HANG
                while not (out / PREDICTIONS / "part-00000001.parquet").exists() and time.monotonic() < end:
                    time.sleep(0.001)
                raise KeyboardInterrupt
            return super()._infer(images[:3])

    with pytest.raises(KeyboardInterrupt):
        predict(bundle, Stopped(), source, out, PredictOptions(shard_size=3, batch_size=1), quiet=True)
    with closing(sqlite3.connect(out / ".vitx" / "ledger.sqlite")) as ledger:
        ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize("finished", [False, True], ids=["stopped", "finished"])
def test_no_bit_of_the_ledger_or_the_summary_loses_an_image(
    certified_original: Bundle, tmp_path: Path, finished: bool
) -> None:
    """Each is refused, mended, or does not matter: it does not end in a traceback, or search without an end."""
    source, whole, out = (tmp_path / name for name in ("in", "whole", "out"))
    source.mkdir()
    for name, content in zip(CLASSES, IMAGES, strict=True):
        (source / name).write_bytes(content)
    if finished:
        assert outcome(certified_original, source, whole) == ""
    else:
        stopped_half_way(certified_original, source, whole)
    random, refused = Random(0), 0
    for name in (".vitx/ledger.sqlite",) * 100 + ("summary.json",) * 20 * finished:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        data = bytearray((out / name).read_bytes())
        data[random.choice([place for place, byte in enumerate(data) if byte])] ^= 1 << random.randrange(8)
        (out / name).write_bytes(data)
        said = outcome(certified_original, source, out)
        assert said == "" or re.search("ledger.sqlite (is damaged|was written by another)", said), said
        refused += bool(said)
        if not said:
            parts = pq.read_table(out / PREDICTIONS, columns=["path"])["path"].to_pylist()
            assert sorted(parts) == sorted(CLASSES)
    assert refused > 40


def test_there_are_thirty_kinds() -> None:
    assert len(TARS) + len(LISTS) + len(TABLES) + len(HTTP) >= 30
