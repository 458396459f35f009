"""Decodes images in a pool of threads (Pillow releases the interpreter lock while it decodes)."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from vitx.core.preprocess import Preprocessing, UInt8Array, decode
from vitx.serve.errors import QueueFull


class Decoder:
    """A decode pool that all models share. Up to `capacity` images may be in it; more are refused with QueueFull."""

    def __init__(
        self,
        *,
        max_pixels: int,
        capacity: int,
        threads: int | None = None,
        on_decode: Callable[[float], None] | None = None,
    ) -> None:
        self._max_pixels = max_pixels
        self._capacity = capacity
        self._on_decode = on_decode
        self._pool = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="decode")
        self._waiting = 0

    async def decode(self, images: list[bytes], preprocessing: Preprocessing) -> list[UInt8Array | Exception]:
        """Return for each image, in order, uint8 (S, S, 3), or the ImageError that says why it cannot be read."""
        self._admit(len(images))
        loop = asyncio.get_running_loop()
        try:
            jobs = [loop.run_in_executor(self._pool, self._decode_one, data, preprocessing) for data in images]
            return [_image_or_error(result) for result in await asyncio.gather(*jobs, return_exceptions=True)]
        finally:
            self._waiting -= len(images)

    def enqueue(
        self, data: bytes, preprocessing: Preprocessing, on_pixels: Callable[[UInt8Array | Exception], None]
    ) -> Callable[[], object]:
        """`decode` of one image with a callback, which runs on the event loop. Raises QueueFull.

        Returns a function that cancels the decoding if it has not started; `on_pixels` is then not called.
        """
        self._admit(1)
        loop = asyncio.get_running_loop()

        def finish(pixels: UInt8Array | Exception) -> None:
            self._waiting -= 1
            on_pixels(pixels)

        def run() -> None:
            try:
                pixels: UInt8Array | Exception = self._decode_one(data, preprocessing)
            except Exception as failure:  # noqa: BLE001 - the edge of one image
                pixels = failure
            with suppress(RuntimeError):  # the loop was closed by a second signal
                loop.call_soon_threadsafe(finish, pixels)

        job = self._pool.submit(run)

        def cancel() -> None:
            if job.cancel():
                self._waiting -= 1

        return cancel

    def _admit(self, images: int) -> None:
        if self._waiting + images > self._capacity:
            raise QueueFull(self._waiting, self._capacity, retry_after=1)
        self._waiting += images

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _decode_one(self, data: bytes, preprocessing: Preprocessing) -> UInt8Array:
        started = time.perf_counter()
        image = preprocessing.apply(decode(data, max_pixels=self._max_pixels))
        if self._on_decode is not None:
            self._on_decode(time.perf_counter() - started)
        return image


def _image_or_error(result: UInt8Array | BaseException) -> UInt8Array | Exception:
    if isinstance(result, BaseException) and not isinstance(result, Exception):
        raise result
    return result
