"""The server's Prometheus metrics (/metrics), and a short summary for the web page (/v1/stats)."""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from vitx.serve.observe.model_statistics import BatchTimes

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL = ("model", "version")
_RECENT = 1024  # the page's percentiles are of this many latest requests


class ModelMetrics:
    """The series of one model. Their labels are resolved once, so that a batch needs no look-up."""

    def __init__(self, metrics: "Metrics", model: str, version: str) -> None:
        self.batches = 0
        self.images = 0
        self._images_total = metrics.images.labels(model, version)
        self._batch_size = metrics.batch_size.labels(model, version)
        self._compute = metrics.compute_seconds.labels(model, version)
        self._queue = metrics.queue_seconds.labels(model, version)
        self._latencies = metrics.latencies

    def batch(self, times: BatchTimes) -> None:
        """Record one batch that ran."""
        self.batches += 1
        self.images += times.rows
        self._images_total.inc(times.rows)
        self._batch_size.observe(times.rows)
        self._compute.observe(times.compute)
        for seconds in times.queue:
            self._queue.observe(seconds)


class Metrics:
    """All series of one server, in its own registry."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter("vitx_requests", "Requests answered.", ("route", "status", "model"), registry=registry)
        self.request_seconds = Histogram(
            "vitx_request_seconds",
            "Whole time of an inference request.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.rejections = Counter(
            "vitx_rejections", "Requests and images refused.", ("reason", "model"), registry=registry
        )
        self.images = Counter("vitx_images", "Images that went through the model.", _MODEL, registry=registry)
        self.batch_size = Histogram("vitx_batch_size", "Images in a batch.", _MODEL, buckets=_ROWS, registry=registry)
        self.compute_seconds = _seconds("vitx_compute_seconds", "Time of one batch in the runtime.", registry)
        self.queue_seconds = _seconds("vitx_queue_seconds", "Time of a request in the queue.", registry)
        self.decode_seconds = Histogram(
            "vitx_decode_seconds", "Time to decode and resize one image.", buckets=_SECONDS, registry=registry
        )
        self._replaced = Gauge(
            "vitx_replaced_instances",
            "Instances that died and were replaced.",
            _MODEL,
            registry=registry,
        )
        self._queue_depth = Gauge("vitx_queue_depth", "Images waiting for a batch.", _MODEL, registry=registry)
        self._running = Gauge("vitx_running_images", "Images in batches that run.", _MODEL, registry=registry)
        self._model_info = Gauge(
            "vitx_model_info",
            "1 for each model served: what it is, where it runs, and what its certificate says.",
            (*_MODEL, "certificate", "runtime", "provider", "precision"),
            registry=registry,
        )
        self.loads = Counter(
            "vitx_model_loads", "Loads of a running server: loaded or refused.", (*_MODEL, "result"), registry=registry
        )
        self.canaries = Counter(
            "vitx_canaries", "Replays of the canary batch: pass or fail.", (*_MODEL, "result"), registry=registry
        )
        ProcessCollector(registry=registry)
        self._models: dict[tuple[str, str], tuple[ModelMetrics, tuple[str, ...]]] = {}
        self.gather: Callable[[], Awaitable[bytes]] | None = None  # /metrics of all workers or replicas together
        self._counters: dict[tuple[str, int, str], Counter] = {}  # by labels: `Counter.labels` takes longer than `inc`
        self._histograms: dict[str, Histogram] = {}
        self.latencies: deque[float] = deque(maxlen=_RECENT)
        self.answered = 0
        self.rejected = 0
        self._started = time.monotonic()

    def add_model(
        self,
        key: tuple[str, str],
        info: dict[str, str],
        queued: Callable[[], float],
        running: Callable[[], float],
        replaced: Callable[[], float],
    ) -> ModelMetrics:
        """Return the series of a model; a model that replaces another of the same key continues its series.

        `key`: name and version. `info`: the labels certificate, runtime, provider, precision, in this order. The
        callbacks are read when the metrics are scraped.
        """
        known, labels = self._models.get(key), (*key, *info.values())
        if known is not None and known[1] != labels:
            self._model_info.remove(*known[1])
        self._model_info.labels(*labels).set(1)
        self._queue_depth.labels(*key).set_function(queued)
        self._running.labels(*key).set_function(running)
        self._replaced.labels(*key).set_function(replaced)
        series = known[0] if known is not None else ModelMetrics(self, *key)
        self._models[key] = (series, labels)
        return series

    def remove_model(self, key: tuple[str, str]) -> None:
        """Remove the gauges of a model; its counters stay."""
        _, labels = self._models.pop(key)
        self._model_info.remove(*labels)
        for gauge in (self._queue_depth, self._running, self._replaced):
            gauge.remove(*key)

    def reject(self, reason: str, model: str = "") -> None:
        """Record a refusal. `model`: a name that is or was served, "" where none was found: clients make up others."""
        self.rejected += 1
        self.rejections.labels(reason, model).inc()

    def answer(self, route: str, status: int, seconds: float | None = None, model: str = "") -> None:
        """Record one reply; `seconds` only for `infer` and `classify`, `model` as in `reject`."""
        counter = self._counters.get((route, status, model))
        if counter is None:
            counter = self._counters[route, status, model] = self.requests.labels(route, str(status), model)
        counter.inc()
        if seconds is not None:
            self.answered += 1
            histogram = self._histograms.get(route)
            if histogram is None:
                histogram = self._histograms[route] = self.request_seconds.labels(route)
            histogram.observe(seconds)
            if status < 400:  # refusals are fast and would make the percentiles look better
                self.latencies.append(seconds)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def summary(self) -> dict[str, Any]:
        """Counters since the start, of which the page takes differences, and percentiles of the latest requests."""
        recent = sorted(self.latencies)
        return {
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "requests": self.answered,
            "rejected": self.rejected,
            "latency_ms": {name: _percentile(recent, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        }


def _seconds(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, _MODEL, buckets=_SECONDS, registry=registry)


def _percentile(ascending: list[float], share: float) -> float | None:
    """In milliseconds; None before the first request."""
    return round(1000 * ascending[int(share * (len(ascending) - 1))], 3) if ascending else None
