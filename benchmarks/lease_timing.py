"""Milliseconds of a call on the GPU: replays of a CUDA graph of several calls over several input sets."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[int], Any]  # takes the number of the input set
# The sets together are larger than the L2 cache.
SETS, CALLS, REPLAYS = 4, 12, 30


def milliseconds(call: Call, device: str) -> dict[str, Any]:
    """Time of one call: replays of a CUDA graph of many, by events; on a CPU two by the clock.

    A call that cannot be captured is launched one by one, and the row says so.
    """
    if device == "cpu":
        return quartiles(cpu_times(call))
    try:
        return quartiles(graph_times(call))
    except RuntimeError as error:
        torch.cuda.synchronize()
        first = quartiles(event_times(lambda: [call(number % SETS) for number in range(CALLS)]))
        return {**first, "not_captured": first_line(error)}


def quartiles(times: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": median, "quartile_1": low, "quartile_3": high}


def event_times(calls: Callable[[], object]) -> list[float]:
    """Milliseconds of one of the CALLS calls that `calls` makes, REPLAYS times."""
    make_event: Any = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for _ in range(3):
        calls()
    events[0].record()
    for event in events[1:]:
        calls()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / CALLS for first, second in pairwise(events)]


def graph_times(call: Call) -> list[float]:
    make_stream: Any = torch.cuda.Stream
    side = make_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compilation, handles and workspaces, which capture forbids
        for number in range(3):
            call(number % SETS)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number % SETS)
    times = event_times(graph.replay)
    graph.reset()
    return times


def cpu_times(call: Call) -> list[float]:
    """A rehearsal's, after a call that compiles: of two calls, or of one that takes long."""
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
    """`milliseconds`, or the first line of why not: libraries refuse a shape by many classes of errors."""
    try:
        return milliseconds(call, device)
    except Exception as error:  # noqa: BLE001
        return {"refused": first_line(error)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
