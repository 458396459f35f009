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
from itertools import count
from weakref import WeakSet

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
        self.limit = limit
        self.used = 0
        self.moments = count()
        self.models: WeakSet[ModelCache] = WeakSet()


class ModelCache:
    """The answers of one loaded model: another that is loaded in its place has others."""

    def __init__(self, cache: ResponseCache, statistics: ModelStatistics, lookups: Callable[[str], Counter]) -> None:
        """`lookups` returns the counter of "hit" or of "miss"."""
        self._cache, self._statistics, self._lookups = cache, statistics, lookups
        # By digest of the content: the moment of its last request, as a number that grows, and the rows.
        self.answers: OrderedDict[bytes, tuple[int, Float32Array]] = OrderedDict()
        cache.models.add(self)

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
        key = digest.digest()
        if (found := self.answers.pop(key, None)) is not None:
            self.answers[key] = next(self._cache.moments), found[1]
        self._lookups("miss" if found is None else "hit").inc()
        self._statistics.add_lookup(time.monotonic() - started, found=found is not None)
        return found and found[1], partial(self._keep, self.answers, key)

    def _keep(self, answers: object, key: bytes, rows: Float32Array) -> None:
        """Keep a copy; none of what is not finite or too large, or was asked before the model was forgotten."""
        size = rows.nbytes + _ENTRY_BYTES
        if answers is not self.answers or key in self.answers or size > self._cache.limit:
            return
        if np.isfinite(rows).all():
            self.answers[key] = next(self._cache.moments), rows.copy()
            self._cache.used += size
            while self._cache.used > self._cache.limit:
                models = (model for model in self._cache.models if model.answers)
                self._drop_first(min((model.answers for model in models), key=lambda one: next(iter(one.values()))[0]))

    async def forget(self) -> None:
        """Drop all answers, some at a time; those to requests in flight will not be kept."""
        answers, self.answers = self.answers, OrderedDict()
        while answers:
            for _ in range(min(_DROPPED_AT_ONCE, len(answers))):
                self._drop_first(answers)
            await asyncio.sleep(0)

    def _drop_first(self, answers: OrderedDict[bytes, tuple[int, Float32Array]]) -> None:
        _, (_, rows) = answers.popitem(last=False)
        self._cache.used -= rows.nbytes + _ENTRY_BYTES
