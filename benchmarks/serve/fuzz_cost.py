"""What a request of less than a MB can cost a server: a search for the dearest of a grammar, and what each delays.

    python benchmarks/serve/fuzz_cost.py BUNDLE --minutes 5 --out DATE-fuzz-cost-cpu.json

Requests go one after another. Half are made anew, half by changing one of those that cost most so far, in seconds of
the server's processors a byte. Meanwhile another process asks for /v2/health/live every few milliseconds. A request
during which an answer took more than 100 ms is sent three times more: what the machine alone did is not repeated. A
delay is without the time that the event loop's thread and the asking process stood ready and got no processor; with it,
it is called "waited". Linux only.
"""

import argparse
import heapq
import itertools
import multiprocessing
import random
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))
import support.fuzz_http as fuzz_http
from support.cost_grammar import KINDS, MOST_BYTES, Request, chosen, made, mutated
from support.fuzzed_server import fuzz_server
from support.targets import report_header

MOST_DELAY = 0.1  # seconds
PATIENCE_SECONDS = 60.0
PIXELS, BODY_MIB = 50_000_000, 64  # the server's defaults
_PROBE_SECONDS = 0.004  # between two probes
_PROBES = 8192  # that are remembered
_ELITE = 12  # of each kind
_REPEATS = 3

Ring = Any  # start, delay and delay with waiting of each probe, in turn; the last entry is how many there were


def probe(address: tuple[str, int], server: int, ring: Ring) -> None:
    """Ask for /v2/health/live for ever."""
    request = fuzz_http.http("GET", "/v2/health/live")
    places = [Path(f"/proc/{server}/task/{server}/schedstat"), Path("/proc/self/schedstat")]

    def stood_ready() -> float:
        return sum(int(place.read_text().split()[1]) for place in places) / 1e9

    while True:
        with suppress(ConnectionError), socket.create_connection(address) as connection:
            while True:
                ready, started = stood_ready(), time.monotonic()
                connection.sendall(request)
                if not connection.recv(2**16):
                    break
                waited = time.monotonic() - started
                delay = max(0.0, waited - (stood_ready() - ready))
                place = 3 * (int(ring[-1]) % _PROBES)
                ring[place : place + 3] = [started, delay, waited]
                ring[-1] += 1
                time.sleep(_PROBE_SECONDS)


def delays_since(ring: Ring, began: float) -> list[tuple[float, float]]:
    """(delay, waited) of the probes that were not over at `began`, once one that started later is over; in seconds."""
    now = time.monotonic()
    while ring[3 * ((int(ring[-1]) - 1) % _PROBES)] < now:
        time.sleep(_PROBE_SECONDS / 4)
    last = int(ring[-1])
    places = [3 * (one % _PROBES) for one in range(max(0, last - _PROBES), last)]
    found = [ring[place : place + 3] for place in places]
    return [(delay, waited) for start, delay, waited in found if start + waited >= began]


def processor_seconds(process: int) -> float:
    """Time that the threads of a process have run, to the nanosecond."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def exchange(address: tuple[str, int], request: bytes) -> str:
    """Send bytes and take what comes until the server closes; the first status, "closed" without one, or "long"."""
    left, answer, end = memoryview(request), b"", time.monotonic() + PATIENCE_SECONDS
    with socket.create_connection(address) as connection:
        connection.setblocking(False)
        while time.monotonic() < end:
            readable, writable, _ = select.select([connection], [connection] if left else [], [], 1)
            try:
                if writable:
                    left = left[connection.send(left[: 2**18]) :]
                if readable:
                    if not (more := connection.recv(2**18)):
                        break
                    answer = answer or more[:12]
            except ConnectionError:
                break
        else:
            return "long"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"


@dataclass
class Cost:
    """What a request cost. per_byte: seconds of the server's processors; rss: MiB more than before at its worst."""

    per_byte: float
    request: Request
    seconds: float
    delay: float
    waited: float
    rss: float
    answer: str

    def report(self) -> dict[str, Any]:
        return {
            "kind": self.request.kind,
            "values": {name: str(value)[:60] for name, value in self.request.values.items()},
            "bytes": len(self.request.data),
            "answer": self.answer,
            "processor_ms": round(1e3 * self.seconds, 2),
            "processor_us_a_byte": round(1e6 * self.per_byte, 2),
            "delay_ms": round(1e3 * self.delay, 1),
            "waited_ms": round(1e3 * self.waited, 1),
            "rss_mib": round(self.rss, 1),
        }


class Server:
    """A running server: what a request costs it."""

    def __init__(self, process: int, address: tuple[str, int], grpc_address: str, ring: Ring) -> None:
        self._process, self._address, self._ring = process, address, ring
        self._channel = grpc.insecure_channel(grpc_address)
        time.sleep(2)
        began, busy = time.monotonic(), processor_seconds(process)
        time.sleep(5)
        self.idle_delays = delays_since(ring, began)
        self._idle = (processor_seconds(process) - busy) / (time.monotonic() - began)

    def cost(self, request: Request) -> Cost:
        peak = Path(f"/proc/{self._process}/clear_refs")
        peak.write_text("5")  # the peak of resident memory begins anew
        rss, busy, began = self._memory("VmRSS"), processor_seconds(self._process), time.monotonic()
        answer = self._ask(request)
        delays = delays_since(self._ring, began)
        delay, waited = (max(column) for column in zip(*delays, strict=True))
        seconds = processor_seconds(self._process) - busy - self._idle * (time.monotonic() - began)
        more = self._memory("VmHWM") - rss
        return Cost(max(0.0, seconds) / len(request.data), request, seconds, delay, waited, more, answer)

    def _ask(self, request: Request) -> str:
        if request.target == "http":
            return exchange(self._address, request.data)
        try:
            self._channel.unary_unary(request.target)(request.data, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def _memory(self, name: str) -> float:
        for line in Path(f"/proc/{self._process}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise ValueError(f"no {name} in /proc/{self._process}/status")


class Best:
    """The dearest requests of a kind, by a measure."""

    def __init__(self, measure: Callable[[Cost], float]) -> None:
        self._measure = measure
        self._heap: list[tuple[float, int, Request]] = []
        self._order = itertools.count()

    def add(self, cost: Cost) -> None:
        entry = (self._measure(cost), next(self._order), cost.request)
        (heapq.heappush if len(self._heap) < _ELITE else heapq.heappushpop)(self._heap, entry)

    @property
    def requests(self) -> list[Request]:
        return [request for _, _, request in self._heap]


def search(server: Server, model: str, end: float, seed: int) -> tuple[list[Cost], Counter[str]]:
    """Cost of every request that was sent until `end` (time.monotonic()), and how often each kind was answered how."""
    chance, costs, answers = random.Random(seed), list[Cost](), Counter[str]()
    best = {kind: (Best(lambda cost: cost.per_byte), Best(lambda cost: cost.delay)) for kind in KINDS}
    while time.monotonic() < end:
        kind = chance.choice(KINDS)
        parents = [request for of in best[kind] for request in of.requests]
        again = parents and chance.randrange(2)
        values = mutated(kind, chance.choice(parents).values, chance) if again else chosen(kind, chance)
        request = made(kind, values, model)
        if request is None:
            continue
        found = server.cost(request)
        if found.delay > MOST_DELAY:
            found.delay = min(found.delay, *(server.cost(request).delay for _ in range(_REPEATS)))
        costs.append(found)
        answers[f"{kind}: {found.answer}"] += 1
        for of in best[kind]:
            of.add(found)
    return costs, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fuzz_server(options, ["--shared-memory", "--access-log", f"{folder}/access.log"], _measure)


def _measure(process: "subprocess.Popen[str]", options: argparse.Namespace) -> dict[str, Any]:
    from vitx.core.bundle import Bundle

    assert process.stdout is not None
    url, grpc_address = (process.stdout.readline().split()[-1] for _ in range(2))
    host, _, port = url.rpartition("//")[2].rpartition(":")
    address, model = (host, int(port)), Bundle.open(options.bundle).manifest.name
    context = multiprocessing.get_context("spawn")
    ring = context.RawArray("d", 3 * _PROBES + 1)
    prober = context.Process(target=probe, args=(address, process.pid, ring), daemon=True)
    prober.start()
    while not ring[-1]:
        time.sleep(0.1)
    server = Server(process.pid, address, grpc_address, ring)
    costs, answers = search(server, model, time.monotonic() + 60 * options.minutes, options.seed)
    prober.kill()
    return _report(server, costs, answers, options)


def _report(server: Server, costs: list[Cost], answers: Counter[str], options: argparse.Namespace) -> dict[str, Any]:
    # What docs/serving.md says: a body, as sent and as it becomes, its text once more, and an image in its decoder.
    bound = (MOST_BYTES + 12 * PIXELS) / 2**20 + 2 * BODY_MIB

    def worst(by: Callable[[Cost], float]) -> list[dict[str, Any]]:
        return [one.report() for one in sorted(costs, key=by, reverse=True)[:5]]

    kinds = {kind: [one for one in costs if one.request.kind == kind] for kind in KINDS}
    slow = [one for one in costs if one.delay > MOST_DELAY]
    return {
        "command": shlex.join(["python", "benchmarks/serve/fuzz_cost.py", "BUNDLE", f"--minutes={options.minutes:g}"]),
        **report_header(),
        "seed": options.seed,
        "requests": len(costs),
        "idle_delay_ms": _percentiles([delay for delay, _ in server.idle_delays]),
        "idle_waited_ms": _percentiles([waited for _, waited in server.idle_delays]),
        "most_delay_ms": {
            "allowed": 1e3 * MOST_DELAY,
            "found": round(1e3 * max(one.delay for one in costs), 1),
            "requests_beyond": len(slow),
            "holds": not slow,
        },
        "most_rss_mib": {
            "allowed": round(bound),
            "found": round(max(one.rss for one in costs), 1),
            "holds": max(one.rss for one in costs) <= bound,
        },
        "by_kind": {
            kind: {
                "requests": len(found),
                "most_processor_us_a_byte": round(1e6 * max(one.per_byte for one in found), 2),
                "most_processor_ms": round(1e3 * max(one.seconds for one in found), 1),
                "most_delay_ms": round(1e3 * max(one.delay for one in found), 1),
                "most_rss_mib": round(max(one.rss for one in found), 1),
            }
            for kind, found in kinds.items()
            if found
        },
        "answers": dict(sorted(answers.items())),
        "dearest": worst(lambda one: one.per_byte),
        "longest": worst(lambda one: one.seconds),
        "slowest": worst(lambda one: one.delay),
        "largest": worst(lambda one: one.rss),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    found = sorted(seconds)
    shares = (("p50", 0.5), ("p99", 0.99), ("most", 1))
    return {name: round(1e3 * found[int(share * (len(found) - 1))], 2) for name, share in shares}


if __name__ == "__main__":
    main()
