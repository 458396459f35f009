"""The server's Prometheus metrics (/metrics), and a short summary for the web page (/v1/stats)."""

import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from vitx.serve.observe.model_statistics import BatchTimes

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL = ("model", "version")
_RECENT = 1024  # the page's percentiles are of this many latest requests


class LoopHistogram(Collector):
    """A histogram for one thread: without prometheus_client's locks and checks, which are most of a number's time."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._family = partial(HistogramMetricFamily, name, about, labels=labels)
        self._bounds = [*map(float, buckets), float("inf")]
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}  # counts by bucket, and the sum
        registry.register(self)

    def labels(self, *values: str) -> Callable[[float], None]:
        """What observes a number under these labels."""
        counts, total = self._series.setdefault(values, ([0] * len(self._bounds), [0.0]))

        def observe(number: float) -> None:
            counts[bisect_left(self._bounds, number)] += 1
            total[0] += number

        return observe

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family, names = self._family(), [*map(str, self._bounds[:-1]), "+Inf"]
        for values, (counts, total) in list(self._series.items()):
            family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total[0])
        yield family


class ModelMetrics:
    """The series of one model. Their labels are resolved once, so that a batch needs no look-up."""

    def __init__(self, metrics: "Metrics", model: str, version: str) -> None:
        self.batches = self.images = 0
        self._images_total = metrics.images.labels(model, version)
        self._batch_size = metrics.batch_size.labels(model, version)
        self._compute = metrics.compute_seconds.labels(model, version)
        self._queue = metrics.queue_seconds.labels(model, version)
        self.lookups = partial(metrics.lookups.labels, model, version)

    def batch(self, times: BatchTimes) -> None:
        self.batches += 1
        self.images += times.rows
        self._images_total.inc(times.rows)
        self._batch_size(times.rows)
        self._compute(times.compute)
        for seconds in times.queue:
            self._queue(seconds)


class Metrics:
    """All series of one server, in its own registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(LoopHistogram, registry=registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self.requests = counter("vitx_requests", "Requests answered.", ("route", "status", "model"))
        self.request_seconds = seconds("vitx_request_seconds", "Whole time of an inference request.", ("route",))
        self.rejections = counter("vitx_rejections", "Requests and images refused.", ("reason", "model"))
        self.images = counter("vitx_images", "Images that went through the model.", _MODEL)
        self.batch_size = histogram("vitx_batch_size", "Images in a batch.", _MODEL, buckets=_ROWS)
        self.compute_seconds = seconds("vitx_compute_seconds", "Time of one batch in the runtime.", _MODEL)
        self.queue_seconds = seconds("vitx_queue_seconds", "Time of a request in the queue.", _MODEL)
        decoded = "Time to decode and resize one image."  # on any thread
        self.decode_seconds = Histogram("vitx_decode_seconds", decoded, registry=registry, buckets=_SECONDS)
        self._gauges = (
            gauge("vitx_queue_depth", "Images waiting for a batch.", _MODEL),
            gauge("vitx_running_images", "Images in batches that run.", _MODEL),
            gauge("vitx_replaced_instances", "Instances that died and were replaced.", _MODEL),
        )
        about = "1 for each model served: what it is, where it runs, and what its certificate says."
        self._model_info = gauge("vitx_model_info", about, (*_MODEL, "certificate", "runtime", "provider", "precision"))
        result = (*_MODEL, "result")
        self.loads = counter("vitx_model_loads", "Loads of a running server: loaded or refused.", result)
        self.canaries = counter("vitx_canaries", "Replays of the canary batch: pass or fail.", result)
        self.lookups = counter("vitx_cache_lookups", "Answers looked for in the cache: hit or miss.", result)
        ProcessCollector(registry=registry)
        self._models: dict[tuple[str, str], tuple[ModelMetrics, tuple[str, ...]]] = {}
        self.gather: Callable[[], Awaitable[bytes]] | None = None  # /metrics of all workers or replicas together
        self._requests_of, self._seconds_of = cache(self.requests.labels), cache(self.request_seconds.labels)
        self.latencies: deque[float] = deque(maxlen=_RECENT)
        self.answered = self.rejected = 0
        self.started = time.monotonic()

    def add_model(self, key: tuple[str, str], about: Sequence[str], *reads: Callable[[], float]) -> ModelMetrics:
        """Return the series of a model; a model that replaces another of the same key continues its series.

        `key`: name and version. about: certificate, runtime, provider, precision. reads: of the images queued, those
        running and the replaced instances; called when the metrics are scraped.
        """
        series, before = self._models.get(key) or (ModelMetrics(self, *key), None)
        if before is not None:
            self._model_info.remove(*before)
        labels = (*key, *about)
        self._model_info.labels(*labels).set(1)
        for gauge, read in zip(self._gauges, reads, strict=True):
            gauge.labels(*key).set_function(read)
        self._models[key] = (series, labels)
        return series

    def remove_model(self, key: tuple[str, str]) -> None:
        """Remove the gauges of a model; its counters stay."""
        _, labels = self._models.pop(key)
        self._model_info.remove(*labels)
        for gauge in self._gauges:
            gauge.remove(*key)

    def reject(self, reason: str, model: str = "") -> None:
        """Record a refusal. `model`: a name that is or was served, "" where none was found: clients make up others."""
        self.rejected += 1
        self.rejections.labels(reason, model).inc()

    def answer(self, route: str, status: int, seconds: float | None = None, model: str = "") -> None:
        """Record one reply; `seconds` only for `infer` and `classify`, `model` as in `reject`."""
        self._requests_of(route, status, model).inc()
        if seconds is not None:
            self.answered += 1
            self._seconds_of(route)(seconds)
            if status < 400:  # refusals are fast and would make the percentiles look better
                self.latencies.append(seconds)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def summary(self) -> dict[str, Any]:
        """Counters since the start, of which the page takes differences, and percentiles of the latest requests."""
        recent, last = sorted(self.latencies), len(self.latencies) - 1
        p50, p99 = (round(1e3 * recent[int(share * last)], 3) if recent else None for share in (0.5, 0.99))
        counters = {"uptime_seconds": round(time.monotonic() - self.started, 3), "requests": self.answered}
        return {**counters, "rejected": self.rejected, "latency_ms": {"p50": p50, "p99": p99}}


def merged(texts: Mapping[str, bytes], label: str) -> bytes:
    """Prometheus texts, by source, as one: a family's lines stay together, and `label` names the source."""
    families: dict[str, list[str]] = {}
    for source, text in texts.items():
        for family in re.split(r"^(?=# HELP )", text.decode(), flags=re.MULTILINE)[1:]:
            head, kind, *samples = family.splitlines()
            lines = families.setdefault(head, [head, kind])
            for sample in samples:  # `name{a="b"} 1` → `name{worker="0",a="b"} 1`
                name, brace, rest = re.split(r"([{ ])", sample, maxsplit=1)
                lines.append(f'{name}{{{label}="{source}"' + ("," if brace == "{" else "} ") + rest)
    return "".join(line + "\n" for lines in families.values() for line in lines).encode()
