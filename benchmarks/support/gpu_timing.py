"""Times of calls on a GPU by events on its own clock: of single calls, or of replays of a CUDA graph of several."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[int], Any]  # takes the number of the input set
# The sets together are larger than the L2 cache.
SETS, CALLS, REPLAYS = 4, 12, 30
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}


def milliseconds(call: Call, device: str) -> dict[str, Any]:
    """Median and quartiles of one call: replays of a CUDA graph of CALLS calls; on a CPU two calls by the clock.

    A call that cannot be captured is launched one by one, and the row says so.
    """
    if device == "cpu":
        return quartiles(cpu_times(call))
    try:
        return quartiles(graph_times(call))
    except RuntimeError as error:
        torch.cuda.synchronize()
        first = quartiles(times_of_calls(lambda: [call(number % SETS) for number in range(CALLS)]))
        return {**first, "not_captured": first_line(error)}


def quartiles(times: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": median, "quartile_1": low, "quartile_3": high}


def event_times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls: events stand between them, and the host waits once, at the end."""
    make_event: Any = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(events)]


def times_of_calls(calls: Callable[[], object]) -> list[float]:
    """Milliseconds of one of the CALLS calls that `calls` makes, REPLAYS times."""
    for _ in range(3):
        calls()
    return [taken / CALLS for taken in event_times(calls, REPLAYS)]


def capture(calls: Callable[[], Any], warm_up: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `calls` and what they returned; `warm_up` runs before, on a stream of its own.

    Capture forbids compilation, new handles and workspaces: those happen in the warm-up.
    """
    make_stream: Any = torch.cuda.Stream
    side = make_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = calls()
    return graph, result


def graph_times(call: Call) -> list[float]:
    graph, _ = capture(
        lambda: [call(number % SETS) for number in range(CALLS)], lambda: [call(number % SETS) for number in range(3)]
    )
    times = times_of_calls(graph.replay)
    graph.reset()
    return times


def cpu_times(call: Call) -> list[float]:
    """Of a rehearsal, after one call that compiles: two calls, or one that takes long, twice."""
    call(0)
    times: list[float] = []
    while len(times) < 2:
        started = time.perf_counter()
        call(len(times))
        times.append(1e3 * (time.perf_counter() - started))
        if times[0] > 300:
            return times * 2
    return times


def timed(call: Call, device: str) -> dict[str, Any]:
    """`milliseconds`, or the first line of the error: libraries refuse a shape by many classes of errors."""
    try:
        return milliseconds(call, device)
    except Exception as error:  # noqa: BLE001
        return {"refused": first_line(error)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def device_times(run: Callable[[], object], seconds: float, device: str) -> list[float]:
    """Seconds of each call in about `seconds`: by events between the calls on a GPU, by the clock on a processor."""
    if device == "cpu":
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return times
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    calls = max(3, min(2000, round(seconds / (time.perf_counter() - start))))
    return [taken / 1000 for taken in event_times(run, calls)]


def product_rate(precision: str, device: str, seconds: float) -> float:
    """FLOP/s of a square product of random values in this precision now."""
    side = PRODUCT_SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=PRECISIONS[precision]) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / statistics.median(device_times(lambda: torch.mm(left, right, out=out), seconds, device))
