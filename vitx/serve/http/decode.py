"""Decodes images on threads (Pillow releases the interpreter lock), or in a process of each, cheap ones first.

The only image of a request, if it is cheap, is decoded by the thread that computes its batch, where as many compute as
decode: a core that goes on with what it has decoded is faster than two threads that take turns on it.

An image of more than `_SMALL_PIXELS` pixels, as its header says, takes a second or more. Such images may occupy every
thread but one. Among images of a kind the next is of the client that was served least, by bytes and pixels (start-time
fair queueing: Goyal, Vin and Cheng 1996).
"""

import asyncio
import heapq
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from statistics import median_low
from typing import Any

from vitx.core.machine import usable_cores
from vitx.core.preprocess import ImageError, Preprocessing, TooManyPixels, UInt8Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.errors import DeadlineMissed, QueueFull
from vitx.serve.http.decode_process import DecodeProcess, decoded
from vitx.serve.observe.request_record import RequestRecord

_SMALL_PIXELS = 4_000_000  # a tenth of a second as PNG
_SMALL_BYTES = 4 * 2**20  # in more even finding the number of pixels may take long
_WEBP_MOST = 2**24  # pixels, and bytes: Pillow copies both while no other thread runs: 0.08 s on a slow day
_CHEAP_PIXELS = 1_000_000  # some hundredths of a second, as PNG
_CHEAP_BYTES = 2**18
_CHEAP_SCANS = 12  # also of the JPEGs in a TIFF
_UNDECODED = 64  # images that wait for a batch before one that would be decoded with it: here clients take no turns
_MOST_SCANS = 100  # each goes over the whole image, in a few bytes; progressive JPEGs have about ten
_CLIENTS = 4096  # remembered at most, and one more
Decode = Callable[[bytes, Preprocessing, int], UInt8Array]  # with the most pixels; raises ImageError


@dataclass(eq=False, slots=True)
class _Job:
    """One image; `data` is dropped when it has its pixels, failed or was cancelled."""

    data: bytes
    preprocessing: Preprocessing
    client: str
    large: bool
    pixels: "asyncio.Future[Any]"


class Decoder:
    """A decode pool that all models share. Its requests may have `capacity` images; more are refused with QueueFull."""

    def __init__(
        self,
        *,
        max_pixels: int,
        capacity: int,
        threads: int | None = None,
        processes: bool = False,
        on_decode: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """`threads` run at once, by default one a core, and one more for small images while all have large ones.

        processes: each has one that decodes for it.
        """
        self._max_pixels, self._capacity, self._on_decode = max_pixels, capacity, on_decode
        self._threads = threads or min(8, usable_cores())
        self._processes = processes
        self._waiting = 0
        self._changed = threading.Condition()  # guards all below
        self._queues: dict[bool, list[tuple[float, int, _Job]]] = {False: [], True: []}  # heaps, by `large`
        self._running = {False: 0, True: 0}
        self._served = 0.0  # the fair queue's virtual time
        self._served_to: dict[str, float] = {}  # client → when all it has asked for is served, in virtual time
        self._order = count()
        self._closed = False
        for number in range(self._threads + 1):
            work = self._work_by_process if processes else partial(self._work, decoded)
            threading.Thread(target=work, name=f"decode-{number}", daemon=True).start()

    async def decode(
        self, images: list[bytes], preprocessing: Preprocessing, *, client: str = "", deadline: float | None = None
    ) -> list[UInt8Array | Exception]:
        """Return for each image, in order, uint8 (S, S, 3), or the ImageError that says why it cannot be read.

        Raises QueueFull, and DeadlineMissed when the deadline (time.monotonic() seconds) passes before all are decoded.
        """
        if self._waiting + len(images) > self._capacity:
            raise QueueFull(self._waiting, self._capacity, retry_after=1)
        self._waiting += len(images)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        jobs = [_Job(data, preprocessing, client, len(data) > _SMALL_BYTES, loop.create_future()) for data in images]
        with self._changed:
            for job in jobs:
                self._queue(job, len(job.data))
                self._changed.notify()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - now):
                return [await job.pixels for job in jobs]
        except TimeoutError:
            raise DeadlineMissed(time.monotonic() - now, None, 1) from None
        finally:  # what is not being decoded never is
            self._waiting -= len(jobs)
            for job in jobs:
                self._end(job, None)

    def here(
        self, data: bytes, steps: Preprocessing, batcher: Batcher, record: RequestRecord
    ) -> Callable[[], UInt8Array | Exception] | None:
        """What decodes a cheap image into (1, S, S, 3), or gives TooManyPixels, on the batcher's thread; else None."""
        full = batcher.batching.instances < self._threads or batcher.queued >= _UNDECODED
        if self._processes or full or len(data) > _CHEAP_BYTES or _has_more_scans(data, _CHEAP_SCANS):
            return None

        def work() -> UInt8Array | Exception:
            started = time.monotonic()
            image = self._result(decoded, data, steps, _CHEAP_PIXELS)
            record.phases["decode"] = started, time.monotonic()
            return image if isinstance(image, Exception) else image[None]

        return work

    def close(self) -> None:
        """End the threads; images that wait are not decoded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _end(self, job: _Job, result: UInt8Array | Exception | None) -> None:
        """Give a job its result, unless it is done."""
        job.data = b""
        if not job.pixels.done():
            job.pixels.set_result(result)

    def _queue(self, job: _Job, cost: float) -> None:
        """Put a job into its queue, behind what its client has asked for already."""
        if len(self._served_to) > _CLIENTS:
            # Clients that come once do not advance the virtual time: it goes to where half of them are served.
            self._served = max(self._served, median_low(self._served_to.values()))
            self._served_to = {name: until for name, until in self._served_to.items() if until > self._served}
        start = max(self._served, self._served_to.get(job.client, 0.0))
        self._served_to[job.client] = start + cost
        heapq.heappush(self._queues[job.large], (start, next(self._order), job))

    def _work_by_process(self) -> None:
        with closing(DecodeProcess()) as process:
            self._work(process.decoded)

    def _work(self, decode: Decode) -> None:
        """A thread: decode until closed. While it waits it has no image."""
        while True:
            with self._changed:
                taken = self._changed.wait_for(lambda: self._closed or self._take())
            if not isinstance(taken, tuple):
                return
            self._run(decode, *taken)
            del taken

    def _run(self, decode: Decode, job: _Job, data: bytes) -> None:
        result = self._result(decode, data, job.preprocessing, self._max_pixels if job.large else _SMALL_PIXELS)
        with self._changed:
            self._running[job.large] -= 1
            if isinstance(result, TooManyPixels) and result.pixels <= result.allowed and not job.large:
                job.large = True
                self._queue(job, result.pixels)
                return
        with suppress(RuntimeError):  # the loop was closed by a second signal
            job.pixels.get_loop().call_soon_threadsafe(self._end, job, result)

    def _take(self) -> tuple[_Job, bytes] | None:
        small, large = (self._queues[kind] for kind in (False, True))
        for queue in (small, large):
            while queue and queue[0][2].pixels.done():
                heapq.heappop(queue)
        busy = self._running[True]
        may_small = small and self._running[False] < max(1, self._threads - busy)
        may_large = large and self._running[False] + busy < self._threads
        if not (may_small or may_large):
            return None
        start, _, job = heapq.heappop(large if may_large and not (may_small and small[0] < large[0]) else small)
        self._served = max(self._served, start)  # a large image may have waited since long ago
        self._running[job.large] += 1
        self._changed.notify()  # another thread may now have something to take, which it had not when it was woken
        return job, job.data

    def _result(self, decode: Decode, data: bytes, steps: Preprocessing, limit: int) -> UInt8Array | Exception:
        """The pixels, or why there are none; TooManyPixels where the image is not for those who take up to `limit`."""
        started = time.perf_counter()
        most = min(self._max_pixels, _WEBP_MOST) if (webp := data[8:12] == b"WEBP") else self._max_pixels
        try:
            if webp and len(data) > _WEBP_MOST:
                raise ImageError(f"WebP of more than {_WEBP_MOST:,} bytes")
            if data.startswith(b"\xff\xd8") and _has_more_scans(data, _MOST_SCANS):
                raise ImageError(f"JPEG of more than {_MOST_SCANS} scans")
            image = decode(data, steps, min(most, limit))
        except TooManyPixels as found:
            return TooManyPixels(found.width, found.height, most)
        except ImageError as failure:
            return ImageError(str(failure))  # its own frames have the image, and a circle with them is freed late
        except Exception as failure:  # noqa: BLE001 - the edge of one image
            return failure
        self._on_decode(time.perf_counter() - started)
        return image


def _has_more_scans(data: bytes, most: int) -> bool:
    """Whether more begin, if it is, or has, a JPEG: looked for in pieces, as no other thread runs meanwhile."""
    pieces = (re.compile(b"\xff\xda").finditer(data, at, at + 2**18 + 1) for at in range(0, len(data), 2**18))
    return any(islice(chain.from_iterable(pieces), most, None))
