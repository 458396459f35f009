"""Decoding in processes: the pixels and errors of threads, and what becomes of a process that is killed or stopped."""

import asyncio
import errno
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import colour_image, damaged_fax, png, write_bundle
from server_process import ServerProcess, is_running, running_server, wait_until
from vitx.core.machine import usable_cores
from vitx.core.preprocess import ImageError, Preprocessing
from vitx.serve.http import decode_process
from vitx.serve.http.decode import Decoder
from vitx.serve.http.decode_process import DecodeProcess, decoded

STEPS = Preprocessing(image_size=16)

# A process that crashes or stops itself where an image says so.
FAULTY = """
import os, signal, sys
from vitx.serve.http import decode_process
decoded = decode_process.decoded
def faulty(data, *others):
    if data.startswith(b"SIG"):
        os.kill(os.getpid(), getattr(signal, data.decode().split()[0]))
    return decoded(data, *others)
decode_process.decoded = faulty
decode_process.work(int(sys.argv[1]))
"""


def picture(seed: int = 0) -> bytes:
    return png(colour_image(1, np.random.default_rng(seed), size=40))


def jpeg(width: int, height: int, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (9, 120, 33)).save(stream, "JPEG", **options)
    return stream.getvalue()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeProcess]:
    monkeypatch.setattr(decode_process, "_MAIN", FAULTY)
    with closing(DecodeProcess()) as started:
        started.decoded(picture(), STEPS, 10**6)  # it is there
        yield started


def test_processes_give_the_pixels_and_the_errors_of_threads() -> None:
    rotated = jpeg(30, 20, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    images = [picture(), jpeg(64, 48), rotated, b"", b"broken", picture()[:-40], jpeg(1, 60_000), jpeg(3000, 2000)]

    async def answers(*, processes: bool) -> list[Any]:
        decoder = Decoder(max_pixels=5_000_000, capacity=100, threads=1, processes=processes)
        with closing(decoder):
            return await decoder.decode(images, STEPS)

    by_thread, by_process = (asyncio.run(answers(processes=processes)) for processes in (False, True))
    for one, other in zip(by_thread, by_process, strict=True):
        assert type(one) is type(other)
        assert str(one) == str(other) if isinstance(one, Exception) else np.array_equal(one, other)
    assert [isinstance(one, ImageError) for one in by_process] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_is_meant_for_the_server_ends_no_process(process: DecodeProcess, name: str) -> None:
    before = process._process
    with pytest.raises(ImageError, match="not an image in a format"):
        process.decoded(name.encode(), STEPS, 10**6)
    assert process._process is before


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_an_image_that_ends_its_process_is_refused_and_the_next_is_not(process: DecodeProcess, name: str) -> None:
    before = process._process
    with pytest.raises(ImageError, match="cannot decode the image: the process that did ended twice"):
        process.decoded(name.encode(), STEPS, 10**6)
    assert np.array_equal(process.decoded(picture(), STEPS, 10**6), decoded(picture(), STEPS, 10**6))
    assert process._process is not before


def test_a_process_that_was_killed_before_costs_no_image(process: DecodeProcess) -> None:
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.decoded(picture(), STEPS, 10**6).shape == (16, 16, 3)


@pytest.mark.parametrize("padding", [0, 2**22])  # more than a socket takes
def test_a_process_that_hangs_is_replaced(process: DecodeProcess, padding: int) -> None:
    with socket.socket(fileno=os.dup(process._connection.fileno())) as connection:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # less for this process, not for the one after it
            assert connection.getsockopt(socket.SOL_SOCKET, option, 16) == struct.pack("ll", 60, 0)
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 200_000))
    if padding:
        assert process._process is not None
        process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(ImageError, match="cannot decode the image: the process that did took longer than 60 s"):
        process.decoded(b"SIGSTOP" + bytes(padding), STEPS, 10**6)
    assert process.decoded(picture(), STEPS, 10**6).shape == (16, 16, 3)


def test_the_working_folder_is_not_searched_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ctypes", "numpy", "PIL"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with closing(DecodeProcess()) as process:
        assert process.decoded(picture(), STEPS, 10**6).shape == (16, 16, 3)


def test_an_answer_that_was_not_read_is_not_taken_for_that_to_the_next_image(
    process: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:  # not by asking for it: the C library would go on in another arena
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "recv_bytes", refuse)
        with pytest.raises(MemoryError):
            process.decoded(picture(1), STEPS, 10**6)
    assert np.array_equal(process.decoded(picture(2), STEPS, 10**6), decoded(picture(2), STEPS, 10**6))


def test_an_answer_that_is_longer_than_any_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "import os, struct, sys, time; os.write(int(sys.argv[1]), struct.pack('!iQ', -1, 2**40)); time.sleep(60)"
    monkeypatch.setattr(decode_process, "_MAIN", endless)
    with (
        closing(DecodeProcess()) as process,
        pytest.raises(ImageError, match="cannot decode the image: the process that did ended twice"),
    ):
        process.decoded(picture(), STEPS, 10**6)


def test_a_thread_without_room_for_its_process_starts_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        process = DecodeProcess()
        with pytest.raises(BlockingIOError):  # an error of the server, not of the image
            process.decoded(picture(), STEPS, 10**6)
    with closing(process):
        assert process.decoded(picture(), STEPS, 10**6).shape == (16, 16, 3)


def test_closing_a_decoder_ends_its_processes() -> None:
    children_before, threads_before = children(os.getpid()), set(threading.enumerate())
    with closing(Decoder(max_pixels=10**6, capacity=1, threads=2, processes=True)):
        wait_until(lambda: len(children(os.getpid()) - children_before) == 3)
        started = children(os.getpid()) - children_before
    wait_until(lambda: not started & children(os.getpid()))
    others = set(threading.enumerate()) - threads_before
    wait_until(lambda: not any(thread.name.startswith("decode-") and thread.is_alive() for thread in others))


def children(pid: int) -> set[int]:
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended in the meantime
            found.update(map(int, (task / "children").read_text().split()))
    return found


def classify(server: ServerProcess, query: str = "", body: bytes = b"") -> tuple[int, Any]:
    headers = {"Content-Type": "image/png"}
    status, text, _ = server.request("POST", f"/v1/classify?{query}", body or picture(), headers)
    return status, json.loads(text)


def test_a_server_survives_its_decoders(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx").path
    with running_server(bundle, "--allow-uncertified", "--decode", "processes") as server:
        expected = classify(server)
        assert expected[0] == 200
        wait_until(lambda: len(children(server.process.pid)) == min(8, usable_cores()) + 1)
        started = children(server.process.pid)
        for child in started:
            os.kill(child, signal.SIGSTOP)
        status, text = classify(server, "timeout_ms=200")
        assert (status, "deadline" in text["error"]) == (503, True)
        assert server.request("GET", "/v2/health/ready")[0] == 200
        for child in started:
            os.kill(child, signal.SIGKILL)
        for seed in range(2 * len(started)):
            assert classify(server, body=picture(seed))[0] == 200
        assert classify(server) == expected
        assert classify(server, body=b"broken")[0] == 400
        left = children(server.process.pid)
        for child in left:
            os.kill(child, signal.SIGSTOP)
        try:
            assert server.stop() == 0
            wait_until(lambda: not any(map(is_running, left)))
        finally:  # what is left would hold the server's output open
            for child in left:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("apart", ["threads", "processes"])
def test_an_image_says_nothing_on_stderr(tmp_path: Path, apart: str) -> None:
    """libtiff did: 125 MB for a file of 60 kB."""
    bundle = write_bundle(tmp_path / "tiny.vitx").path
    with running_server(bundle, "--allow-uncertified", "--decode", apart) as server:
        for rows in (5000, 20_000):  # decoded with its batch, in the pool
            assert classify(server, body=damaged_fax(rows))[0] == 200
        assert server.stop() == 0
        assert server.process.stderr is not None
        assert "Fax" not in server.process.stderr.read()


def test_decoders_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx").path
    with running_server(bundle, "--allow-uncertified", "--decode", "processes") as server:
        assert classify(server)[0] == 200
        started = children(server.process.pid)
        server.process.kill()
        wait_until(lambda: not any(map(is_running, started)))
