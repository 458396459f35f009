"""One server's turn in a paired measurement, and the ratios of two servers' turns."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from support.http_load import closed_loop, percentile_ms
from support.server_peers import Server

WARM_UP_SECONDS = 0.7


def turn(server: Server, requests: Sequence[bytes], seconds: float, connections: int) -> dict[str, Any]:
    """One server's turn: requests a second, latencies in milliseconds, processors used."""
    server.resume()
    cpu, start = server.cpu_seconds(), time.perf_counter()
    load = closed_loop(server.address, requests, connections=connections, seconds=seconds, warm_up=WARM_UP_SECONDS)
    used = (server.cpu_seconds() - cpu) / (time.perf_counter() - start)
    server.pause()
    load.require_answers(server.name)
    return {
        "requests_per_second": round(load.rate(), 1),
        "p50_ms": percentile_ms(load.times(200), 50),
        "p99_ms": percentile_ms(load.times(200), 99),
        "server_cores": round(used, 3),
        "server_cpu_ms": round(1e3 * used / load.rate(), 4),  # of a request
        "client_cores": round(load.client_share, 3),
    }


def spread(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median of the pairs' ratios, the least and the greatest."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}
