"""The response cache (`--cache`): what models computed for the same content before, the least recently asked out first.

Kept are the rows of a batcher (see `Contract`), not replies: those are made for every request as it wants them. So, as
in Triton's cache ("local", its docs/user_guide/response_cache.md), parameters of a request do not matter.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

import numpy as np
from prometheus_client import Counter

from vitx.runtimes.session import Float32Array
from vitx.serve.observe.model_statistics import ModelStatistics

_ENTRY_BYTES = 512  # of an answer beside its numbers: 410 were measured
_MOST_BYTES = 8 * 2**20  # of content: the digest of more would hold up the event loop for longer than 8 ms
_DROPPED_AT_ONCE = 1000  # a millisecond


class ResponseCache:
    """The answers of all models of a server, at most `limit` bytes. Use it on the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        # By what the model has been since it last forgot, and the digest of the content; the last asked is the last.
        self.answers: OrderedDict[tuple[object, bytes], Float32Array] = OrderedDict()

    def drop(self, key: tuple[object, bytes]) -> None:
        if (rows := self.answers.pop(key, None)) is not None:
            self.used -= rows.nbytes + _ENTRY_BYTES


class ModelCache:
    """The answers of one loaded model: another that is loaded in its place has others."""

    def __init__(self, cache: ResponseCache, statistics: ModelStatistics, lookups: Callable[[str], Counter]) -> None:
        """`lookups` returns the counter of "hit" or of "miss"."""
        self._cache, self._statistics, self._lookups = cache, statistics, lookups
        self._since = object()  # another one after each `forget`

    def find(
        self, content: bytes | memoryview, further: object
    ) -> tuple[Float32Array | None, Callable[[Float32Array], None]]:
        """The rows (N, C) of pixels or of an encoded image, None if they are not known, and what keeps them.

        further: whether rows with all outputs are asked for.
        """
        if memoryview(content).nbytes > _MOST_BYTES:
            return None, lambda rows: None
        started = time.monotonic()
        digest = blake2b(repr((bool(further), getattr(content, "shape", None))).encode(), digest_size=32)
        digest.update(content)
        key = self._since, digest.digest()
        if (found := self._cache.answers.get(key)) is not None:
            self._cache.answers.move_to_end(key)
        self._lookups("miss" if found is None else "hit").inc()
        self._statistics.add_lookup(time.monotonic() - started, found=found is not None)
        return found, partial(self._keep, key)

    def _keep(self, key: tuple[object, bytes], rows: Float32Array) -> None:
        """Keep a copy; none of what is not finite or too large, or was asked before the model was forgotten."""
        cache, size = self._cache, rows.nbytes + _ENTRY_BYTES
        if key[0] is not self._since or key in cache.answers or size > cache.limit:
            return
        if np.isfinite(rows).all():
            cache.answers[key] = rows.copy()
            cache.used += size
            while cache.used > cache.limit:
                cache.drop(next(iter(cache.answers)))

    async def forget(self) -> None:
        """Drop all answers, some at a time; those to requests in flight will not be kept."""
        since, self._since = self._since, object()
        for number, key in enumerate([*self._cache.answers]):
            if key[0] is since:
                self._cache.drop(key)
            if number % _DROPPED_AT_ONCE == 0:
                await asyncio.sleep(0)
