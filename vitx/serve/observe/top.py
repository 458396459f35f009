"""The numbers of `vitx top`: reads a running server's statistics over HTTP, and computes rates between two readings."""

import json
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from math import inf
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.urls import http_opener, is_http, whole_body

Labels = frozenset[tuple[str, str]]

_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Reading:
    """A server's /v1/stats and /metrics at one moment; `samples` by name and labels."""

    url: str
    stats: Mapping[str, Any]
    samples: Mapping[str, Mapping[Labels, float]] = field(repr=False)
    moment: float = field(default_factory=time.monotonic, compare=False)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        return sum(value for given, value in self.samples.get(name, {}).items() if labels.items() <= given)

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sums of the samples that have `labels`, by the value of another label."""
        values = {dict(given)[label] for given in self.samples.get(name, {}) if labels.items() <= given}
        return {value: self.total(name, **labels, **{label: value}) for value in values}

    def answered(self, kind: str = "worker") -> dict[str | None, float]:
        """Requests that each worker, or "replica", in it has answered; None: of a server that is one process."""
        counts = {dict(labels).get(kind): 0.0 for series in self.samples.values() for labels in series}
        for labels, count in self.samples.get("vitx_requests_total", {}).items():
            counts[dict(labels).get(kind)] += count
        return counts


class ServerClient:
    """Reads a server at `url`, such as http://127.0.0.1:8000; `token`: the bearer token it asks for, if any.

    metrics_token: that of /metrics, where it has one of its own.
    """

    def __init__(
        self, url: str, token: str | None = None, cafile: str | None = None, metrics_token: str | None = None
    ) -> None:
        """Raise InputError if `url` is not HTTP; without a scheme it is http://."""
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not is_http(url):
            raise InputError(f"'{url}' is not the address of a server: expected one such as http://127.0.0.1:8000")
        self.url = url
        self._tokens = {"/v1/stats": token, "/metrics": metrics_token or token}
        self._opener = http_opener(cafile)

    def read(self) -> Reading:
        """Read now; raise EnvironmentMissing if nothing answers, or something other than `vitx serve`."""
        statistics, metrics = self._get("/v1/stats"), self._get("/metrics")
        try:
            stats = json.loads(statistics)
            families = text_string_to_metric_families(metrics.decode())
            samples: dict[str, dict[Labels, float]] = {}
            for sample in (sample for family in families for sample in family.samples):
                samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
            if "\\" in json.dumps(snapshot(Reading("", stats, samples), None), allow_nan=False):  # an escape in a name
                raise ValueError("it has other characters than the names of vitx")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise self._not_vitx(f"its answer cannot be read ({error!r:.80})") from None
        return Reading(self.url, stats, samples)

    def _get(self, path: str) -> bytes:
        token = self._tokens[path]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with self._opener.open(Request(self.url + path, headers=headers), timeout=_TIMEOUT_SECONDS) as reply:
                if len(answer := whole_body(reply, _MOST_BYTES)) > _MOST_BYTES:
                    raise self._not_vitx(f"its answer to {path} does not end")
                return answer
        except HTTPError as error:
            with error:
                if error.code == 401:
                    option = "--metrics-token-file, or --token-file" if path == "/metrics" else "--token-file"
                    what = "takes another token" if token else "asks for a token"
                    raise InputError(f"{self.url}{path} {what}: give it with {option}") from None
                if error.code == 404 and path == "/metrics":  # and /v1/stats was there
                    raise EnvironmentMissing(f"the metrics of {self.url} are off: serve with --metrics token") from None
                raise self._not_vitx(f"it answered {error.code} to {path}") from None
        except HTTPException as error:
            raise self._not_vitx(f"what it sent is no HTTP or, as with --tls-client-ca, ends ({error!r:.80})") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if why := getattr(reason, "verify_message", ""):
                raise InputError(f"the certificate of {self.url} is not trusted ({why}): give --ca-file") from None
            remedy = "start `vitx serve BUNDLE`, or give the address it printed"
            raise EnvironmentMissing(f"nothing answers at {self.url} ({reason}): {remedy}") from None

    def _not_vitx(self, found: str) -> EnvironmentMissing:
        text = f"what answers at {self.url} is not `vitx serve`: {found}"
        return EnvironmentMissing(f"{text}; give the address that `vitx serve` printed")


def snapshot(now: Reading, before: Reading | None) -> dict[str, Any]:
    """What happened between two readings, or since the server's start if `before` is None. `vitx top --json` prints it.

    Rates are per second, times in milliseconds, memory in MiB; None where nothing happened. Of workers nothing is known
    without `before`: one that was replaced counts anew.
    """
    uptime = float(now.stats["uptime_seconds"])
    other = before is not None and now.answered("replica").keys() != before.answered("replica").keys()  # Ray chose it
    if before is None or other or now.answered().get(None, inf) < before.answered().get(None, 0):  # or it restarted
        before = Reading(now.url, {}, {}, now.moment - uptime)
    gained, seconds = _gained(now, before), now.moment - before.moment
    return {
        "url": now.url,
        "ready": now.stats["ready"],
        "uptime_seconds": uptime,
        "interval_seconds": round(seconds, 3),
        "requests_per_second": _rate(gained.total("vitx_request_seconds_count"), seconds),
        "latency_ms": {name: value and float(value) for name, value in now.stats["latency_ms"].items()},
        "rejections": {of: int(value) for of, value in sorted(now.by_label("vitx_rejections_total", "reason").items())},
        "cpu_percent": _rate(100 * gained.total("process_cpu_seconds_total"), seconds),
        "rss_mib": round(now.total("process_resident_memory_bytes") / 2**20, 1),
        "open_files": int(now.total("process_open_fds")),
        "models": [_model(model, now, gained, seconds) for model in now.stats["models"]],
    }


def _model(stats: Mapping[str, Any], now: Reading, gained: Reading, seconds: float) -> dict[str, Any]:
    model = {"model": str(stats["name"]), "version": str(stats["version"])}
    images = gained.total("vitx_images_total", **model)
    batches = gained.total("vitx_batch_size_count", **model)
    about = next((dict(labels) for labels in now.samples.get("vitx_model_info", {}) if model.items() <= labels), {})
    return {
        "name": model["model"],
        "version": model["version"],
        "images_per_second": _rate(images, seconds),
        "batches_per_second": _rate(batches, seconds),
        "mean_batch": round(images / batches, 2) if batches else None,
        "queued": int(now.total("vitx_queue_depth", **model)),
        "running": int(now.total("vitx_running_images", **model)),
        "queue_ms": _percentiles("vitx_queue_seconds_bucket", gained, model),
        "compute_ms": _percentiles("vitx_compute_seconds_bucket", gained, model),
        **{key: about.get(key, "unknown") for key in ("certificate", "runtime", "provider", "precision")},
    }


def _rate(gained: float, seconds: float) -> float:
    return round(gained / seconds, 2) if seconds > 0 else 0.0


def _gained(now: Reading, before: Reading) -> Reading:
    """What every sample has grown by: of a worker that was replaced all, of one that `before` lacks nothing.

    One that does not answer in time is left out of /metrics, and is in the next with all that it ever counted.
    """
    counted, counts = {None: 0.0, **before.answered()}, now.answered()
    samples: dict[str, dict[Labels, float]] = {name: {} for name in now.samples}
    for name, series in now.samples.items():
        for labels, value in series.items():
            past = before.samples.get(name, {}).get(labels, 0.0)
            if (count := counted.get(worker := dict(labels).get("worker"))) is None:
                past = value
            elif counts[worker] < count:
                past = 0.0
            samples[name][labels] = value - past
    return replace(now, samples=samples)


def _percentiles(name: str, gained: Reading, model: Mapping[str, str]) -> dict[str, float | None]:
    """p50 and p99 of a histogram of seconds, in milliseconds."""
    buckets = {float(le): value for le, value in gained.by_label(name, "le", **model).items()}
    found = {"p50": quantile(buckets, 0.5), "p99": quantile(buckets, 0.99)}
    return {name: None if seconds is None else round(1e3 * seconds, 3) for name, seconds in found.items()}


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile of cumulative histogram buckets (upper bound → count), linear within a bucket as in Prometheus.

    None without samples; the largest finite bound if the quantile lies beyond it.
    """
    bounds = [0.0, *sorted(buckets)]
    counts = [0.0, *(buckets[bound] for bound in bounds[1:])]
    if not (rank := share * counts[-1]):
        return None
    place = bisect_left(counts, rank)
    low, high, below = bounds[place - 1], bounds[place], counts[place - 1]
    return low if high == float("inf") else low + (high - low) * (rank - below) / (counts[place] - below)
