"""Image bytes to model input, in a pool of threads beside the model (Pillow releases the interpreter lock)."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vitx.core.preprocess import Preprocessing, UInt8Array, decode
from vitx.serve.errors import QueueFull


class Decoder:
    """A bounded decode pool that all models share; an image waits in `capacity` or is refused with QueueFull."""

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
        """Return, in order, uint8 (S, S, 3) for each image, or the ImageError that says why it cannot be read."""
        if self._waiting + len(images) > self._capacity:
            raise QueueFull(self._waiting, self._capacity, retry_after=1)
        loop = asyncio.get_running_loop()
        self._waiting += len(images)
        try:
            jobs = [loop.run_in_executor(self._pool, self._decode_one, data, preprocessing) for data in images]
            return [_image_or_error(result) for result in await asyncio.gather(*jobs, return_exceptions=True)]
        finally:
            self._waiting -= len(images)

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
