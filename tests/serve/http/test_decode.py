"""The decode pool: what waits for what, deadlines, and eight images of 49 million pixels before a small one."""

import asyncio
import gc
import io
import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import PREPROCESSING, colour_image, png, write_bundle
from server_process import HANG, ServerProcess, held_decoding, running_server, wait_until
from vitx.core.preprocess import ImageError, TooManyPixels
from vitx.serve.errors import DeadlineMissed, QueueFull
from vitx.serve.http.decode import Decoder, _has_more_scans

Test = Callable[[Decoder, "Held"], Awaitable[None]]


class Held:
    """Stands in for the preprocessing: notes the side of each image, and waits until `go` is set."""

    def __init__(self) -> None:
        self.sides: list[int] = []
        self.go = threading.Event()

    def check_size(self, width: int, height: int) -> None:
        if width > 9_000:
            raise ImageError("too thin")

    def apply(self, image: Image.Image) -> Any:
        self.sides.append(image.width)
        assert self.go.wait(HANG)
        return np.zeros((1, 1, 3), np.uint8)

    async def seen(self, count: int) -> None:
        end = time.monotonic() + HANG
        while len(self.sides) < count:
            assert time.monotonic() < end
            await asyncio.sleep(0.005)


def grey(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


@pytest.fixture(scope="module")
def large() -> bytes:
    """7,000 × 7,000 pixels in some 200 KB."""
    return grey(7000)


def run(test: Test, *, threads: int, capacity: int = 100) -> None:
    async def whole() -> None:
        decoder, held = Decoder(max_pixels=50_000_000, capacity=capacity, threads=threads), Held()
        try:
            await test(decoder, held)
        finally:
            held.go.set()
            decoder.close()

    asyncio.run(whole())


def test_clients_take_turns_however_many_images_one_has_sent() -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        def ask(side: int, client: str) -> Awaitable[Any]:
            return asyncio.ensure_future(decoder.decode([grey(side)], held, client=client))

        work = [ask(side, "flood") for side in range(10, 16)]
        await held.seen(1)  # and nothing else, with one thread
        work += [ask(20, "other"), ask(21, "other")]
        await asyncio.sleep(0.05)
        held.go.set()
        await asyncio.gather(*work)
        assert held.sides[1] == 20
        assert held.sides.index(21) <= 4
        assert sorted(held.sides) == [*range(10, 16), 20, 21]

    run(test, threads=1)


def test_a_small_image_waits_for_no_large_one_and_large_ones_leave_no_thread_idle(large: bytes) -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        work = [asyncio.ensure_future(decoder.decode([large], held)) for _ in range(4)]
        await held.seen(2)
        work += [asyncio.ensure_future(decoder.decode([grey(16)], held)) for _ in range(2)]
        await held.seen(3)
        await asyncio.sleep(0.05)
        assert held.sides == [7000, 7000, 16]  # one thread is for small ones alone
        held.go.set()
        await asyncio.gather(*work)
        assert sorted(held.sides) == [16, 16, *[7000] * 4]

    run(test, threads=2)


def test_a_small_image_that_comes_while_no_thread_may_take_it_runs_beside_a_large_one() -> None:
    """The thread that was woken for it had nothing it might take; the one that took the large image woke nobody."""

    async def test(decoder: Decoder, held: Any) -> None:
        small: Any = Held()
        large: Any = Held()
        work = [asyncio.ensure_future(decoder.decode([grey(10)], small, client="a"))]
        await small.seen(1)
        work.append(asyncio.ensure_future(decoder.decode([grey(11) + bytes(5 * 2**20)], large, client="b")))
        last = asyncio.ensure_future(decoder.decode([grey(12)], held, client="b"))
        await asyncio.sleep(0.05)  # the other thread finds that it may take neither
        held.go.set()
        small.go.set()
        await large.seen(1)
        await asyncio.wait_for(last, HANG / 2)  # the large one is held for twice as long
        large.go.set()
        await asyncio.gather(*work)

    run(test, threads=1)


def test_a_large_image_that_waited_gives_no_client_more_than_its_turns() -> None:
    """Virtual time went back to when the large image came: others were served before the client that waited longest."""

    async def test(decoder: Decoder, held: Any) -> None:
        first, second, gate, free = Held(), Held(), Held(), Held()
        free.go.set()

        def push(side: int, client: str, size: int = 10**6, by: Any = held) -> Awaitable[Any]:
            return asyncio.ensure_future(decoder.decode([grey(side) + bytes(size)], by, client=client))

        work = [push(10 + number, "large", 5 * 2**20, by) for number, by in enumerate((first, second))]
        await first.seen(1)
        await asyncio.gather(*(push(12, "old", by=free) for _ in range(12)))  # beside the large one
        first.go.set()
        await second.seen(1)
        work.append(push(13, "gate", by=gate))
        await gate.seen(1)
        work += [push(side, client) for side, client in [(20, "new")] * 6 + [(30, "old")] * 6]
        await asyncio.sleep(0)  # each has its place
        for released in (second, gate, held):
            released.go.set()
        await asyncio.gather(*work)
        assert held.sides[:8].count(30) >= 3

    run(test, threads=1)


def test_what_waits_past_its_deadline_is_refused_then_and_never_decoded() -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        first = asyncio.ensure_future(decoder.decode([grey(10)], held))
        await held.seen(1)
        late, start = [grey(11), grey(12)], time.monotonic()
        with pytest.raises(DeadlineMissed) as missed:
            await decoder.decode(late, held, deadline=start + 0.5)
        assert 0.49 < (waited := time.monotonic() - start) < HANG / 2  # the first is held for twice as long
        said = re.search(r"the deadline passed after (\d+) ms in the queue", str(missed.value))
        assert said is not None
        assert 100 <= int(said[1]) <= 1000 * waited + 1  # 500 ms, less those before the queue
        with pytest.raises(QueueFull):
            await decoder.decode([grey(13)] * 3, held)
        waiting = asyncio.ensure_future(decoder.decode([grey(13)] * 2, held))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await decoder.decode([grey(13)], held)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        held.go.set()
        await first
        assert len(await decoder.decode([grey(14)] * 3, held, deadline=time.monotonic() + 60)) == 3
        assert held.sides == [10, 14, 14, 14]

    run(test, threads=1, capacity=3)


def test_images_count_until_the_last_of_their_request_is_decoded() -> None:
    """Thirty forms of 255 small images and a slow one held 3.4 GiB of pixels at 512 px: only what was left counted."""

    async def test(decoder: Decoder, held: Any) -> None:
        thin = io.BytesIO()
        Image.new("L", (9_001, 1)).save(thin, "PNG")
        first = asyncio.ensure_future(decoder.decode([thin.getvalue(), grey(10)], held))
        await held.seen(1)  # with one thread the other one is done
        with pytest.raises(QueueFull):
            await decoder.decode([grey(11)] * 2, held)
        held.go.set()
        assert isinstance((await first)[0], ImageError)
        assert len(await decoder.decode([grey(12)] * 3, held)) == 3

    run(test, threads=1, capacity=3)


def test_of_many_clients_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand clients sends one image; the one that sent most is remembered longest."""
    monkeypatch.setattr("vitx.serve.http.decode._CLIENTS", 8)

    async def test(decoder: Decoder, held: Any) -> None:
        held.go.set()
        await decoder.decode([grey(50)] * 9, held, client="greedy")
        image, known = grey(10), []
        for number in range(1000):
            await decoder.decode([image], held, client=str(number))
            known.append("greedy" in decoder._served_to)
            assert len(decoder._served_to) <= 9
        assert all(known[:8])
        assert not known[-1]

    run(test, threads=1)


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_by_default_there_is_a_thread_for_each_usable_core_and_one_more(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `taskset`, or in a container with a limit of CPUs, these are not all that the machine has."""
    monkeypatch.setattr("vitx.serve.http.decode.usable_cores", lambda: cores)
    before = set(threading.enumerate())
    decoder = Decoder(max_pixels=1, capacity=1)
    started = [each for each in threading.enumerate() if each not in before and each.name.startswith("decode-")]
    assert len(started) == min(8, cores) + 1
    decoder.close()


def test_a_cancelled_image_is_not_decoded() -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        first = asyncio.ensure_future(decoder.decode([grey(10)], held))
        await held.seen(1)
        second = asyncio.ensure_future(decoder.decode([grey(11)], held))
        await asyncio.sleep(0.01)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        held.go.set()
        await first
        await decoder.decode([grey(13)], held)
        assert held.sides == [10, 13]

    run(test, threads=1)


def test_pixels_for_a_request_that_was_cancelled_in_the_same_moment_are_dropped() -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        jobs: list[Any] = []
        queue = decoder._queue

        def noted(job: Any, cost: float) -> None:
            jobs.append(job)
            queue(job, cost)

        vars(decoder)["_queue"] = noted
        asked = asyncio.ensure_future(decoder.decode([grey(10)], held))
        await held.seen(1)
        asked.cancel()  # its task has not run when the pixels come
        decoder._end(jobs.pop(), np.zeros((1, 1, 3), np.uint8))
        with suppress(asyncio.CancelledError):
            await asked
        held.go.set()
        assert len(await decoder.decode([grey(11)], held)) == 1

    run(test, threads=1)


def test_a_webp_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.serve.http.decode._SMALL_PIXELS", 50)
    monkeypatch.setattr("vitx.serve.http.decode._WEBP_MOST", 100)

    async def test(decoder: Decoder, held: Any) -> None:
        held.go.set()
        images = []
        for side, kind in ((10, "WEBP"), (11, "WEBP"), (11, "PNG")):
            images.append(stream := io.BytesIO())
            Image.new("RGB", (side, side)).save(stream, kind)
        found = await decoder.decode([image.getvalue() for image in images], held)
        assert [isinstance(one, np.ndarray) for one in found] == [True, False, True]
        assert str(found[1]) == "image of 11×11 pixels: more than the 100 allowed"
        assert sorted(held.sides) == [10, 11]

    run(test, threads=1)


def test_an_image_that_is_too_thin_is_refused_by_its_header() -> None:
    async def test(decoder: Decoder, held: Any) -> None:
        held.go.set()
        stream = io.BytesIO()
        Image.new("L", (9_001, 1)).save(stream, "PNG")
        (refused,) = await decoder.decode([stream.getvalue()[:60]], held)  # there are no pixels to decode
        assert str(refused) == "too thin"
        assert held.sides == []

    run(test, threads=1)


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Each scan goes over the whole image: 1.6 KB of gzip took three seconds for 112,000 pixels."""
    stream = io.BytesIO()
    Image.new("L", (16, 16)).save(stream, "JPEG", progressive=True)
    start, scan, end = *stream.getvalue().removesuffix(b"\xff\xd9").rpartition(b"\xff\xda")[::2], b"\xff\xd9"
    scans = start.count(b"\xff\xda")

    async def test(decoder: Decoder, held: Any) -> None:
        held.go.set()
        many = [start + (b"\xff\xda" + scan) * (count - scans) + end for count in (100, 101)]
        fits, refused = await decoder.decode(many, held)
        assert isinstance(fits, np.ndarray)
        assert str(refused) == "JPEG of more than 100 scans"
        assert held.sides == [16]

    run(test, threads=1)


def test_the_bytes_of_a_webp_are_limited() -> None:
    """Pillow copies all of them, EXIF and XMP again, while no other thread runs."""
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, "WEBP")

    async def test(decoder: Decoder, held: Any) -> None:
        held.go.set()
        data = file.getvalue()
        fits, refused = await decoder.decode([data + bytes(2**24 - len(data)), data + bytes(2**24)], held)
        assert isinstance(fits, np.ndarray)
        assert str(refused) == "WebP of more than 16,777,216 bytes"

    run(test, threads=1)


@pytest.mark.parametrize("piece", [b"\xff", b"\xff\xfe", b"\xff\xff\xda"])
def test_scans_are_looked_for_in_pieces(piece: bytes) -> None:
    """In 63 MiB of fill bytes for 0.2 s, while no other thread ran. A scan may begin at the end of a piece."""
    size = 2**18 * 3 // len(piece) + 5
    scans = (piece * size).count(b"\xff\xda")
    assert _has_more_scans(piece * size + b"\xff\xda", scans)
    assert not _has_more_scans(piece * size + b"\xff\xda", scans + 1)


@pytest.mark.parametrize(
    "image", [b"no image" * 1000, png(np.zeros((16, 16, 3), np.uint8))[:40]], ids=["no image", "cut"]
)
def test_nothing_keeps_an_image_that_cannot_be_read(image: bytes) -> None:
    """A hundred of a megabyte each would stay until the garbage collector comes."""

    async def refuse(decoder: Decoder, held: Held) -> None:
        (found,) = await decoder.decode([image], PREPROCESSING)
        assert isinstance(found, ImageError)

    gc.disable()
    try:
        before = sys.getrefcount(image)
        run(refuse, threads=1)
        wait_until(lambda: sys.getrefcount(image) == before)  # its thread may have to end first
    finally:
        gc.enable()


def test_the_error_of_a_large_image_survives_another_process() -> None:
    error = pickle.loads(pickle.dumps(TooManyPixels(3, 4, 10)))
    assert (str(error), error.pixels) == ("image of 3×4 pixels: more than the 10 allowed", 12)


def classify(server: ServerProcess, image: bytes, query: str = "") -> int:
    return server.request("POST", f"/v1/classify{query}", image, {"Content-Type": "image/png"})[0]


def test_eight_huge_images_hold_up_neither_a_small_one_nor_a_deadline(tmp_path: Path, large: bytes) -> None:
    """They did for 25 s, and a request of another client with a deadline of a second was refused after that time."""
    bundle, gate = write_bundle(tmp_path / "tiny.vitx"), tmp_path / "gate"
    small = png(colour_image(0, np.random.default_rng(0)))
    two_threads = "from vitx.serve.http import decode; decode.usable_cores = lambda: 2\n"
    with (
        running_server(bundle.path, "--allow-uncertified", program=two_threads + held_decoding(gate)) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        gate.touch()
        huge = [clients.submit(classify, server, large) for _ in range(8)]
        try:
            wait_until(lambda: len([*tmp_path.glob("gate.*")]) == 2)
            assert (classify(server, large, "?timeout_ms=300"), classify(server, small)) == (503, 200)
            assert not any(job.done() for job in huge)
        finally:
            gate.unlink()
        assert [job.result() for job in huge] == [200] * 8
        assert server.metric("vitx_decode_seconds_count") == 9  # the refused one was not decoded
        reason = json.loads(server.request("POST", "/v1/classify?timeout_ms=1", large)[1])["error"]
        assert reason.startswith("the deadline passed after ")
