"""What a request of less than a MB can cost a server: a search for the dearest of a grammar, and what each delays.

    python benchmarks/serve/fuzz_cost.py BUNDLE --minutes 5 --seed 1 --costs COSTS --out DATE-fuzz-cost-cpu.json

Requests go one after another, each kind for its share of the time. Half are made anew, half by changing one of
those that cost most so far, in seconds of the server's processors a byte, or that delayed most. COSTS gets a line for
each request; another run with another seed continues it, and reports on all of its lines. Meanwhile another process
asks for /v2/health/live every few milliseconds. A request during which an answer took more than 100 ms is sent three
times more, then and by the next run: what the machine alone did is not repeated. A delay is without the time that the
event loop's thread and the asking process stood ready and got no processor, and no more than the server's processors
ran meanwhile: who holds the interpreter's lock may stand ready too. With all that, it is called "waited". Linux only.
Exit code 1 when a delay or the memory is beyond what is allowed, or the server ends badly.
"""

import argparse
import heapq
import itertools
import json
import multiprocessing
import random
import select
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))
import support.fuzz_http as fuzz_http
from support.cost_grammar import KINDS, MOST_BYTES, Model, Request, chosen, made, mutated
from support.fuzzed_server import FuzzedServer, fuzz_server
from support.targets import all_hold, exit_code, report_header

MOST_DELAY = 0.1  # seconds
PATIENCE_SECONDS = 60.0
PIXELS, BODY_MIB = 50_000_000, 64  # the server's defaults
_PROBE_SECONDS = 0.004  # between two probes
_PROBES = 8192  # that are remembered
_ELITE = 12  # of each kind
_REPEATS = 3
_SHARES = {"image": 2, "other call": 0.5}  # of the time, beside 1 of every other kind

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
                ready, ran, started = stood_ready(), processor_seconds(server), time.monotonic()
                connection.sendall(request)
                if not connection.recv(2**16):
                    break
                waited = time.monotonic() - started
                delay = max(0.0, min(waited - (stood_ready() - ready), processor_seconds(server) - ran))
                place = 3 * (int(ring[-1]) % _PROBES)
                ring[place : place + 3] = [started, delay, waited]
                ring[-1] += 1
                time.sleep(_PROBE_SECONDS)


def newest_probe(ring: Ring) -> float:
    """When the last probe that is over had started."""
    return float(ring[3 * ((int(ring[-1]) - 1) % _PROBES)])


def delays_in(ring: Ring, began: float, ended: float) -> list[tuple[float, float]]:
    """(delay, waited) in seconds of the probes that were not over at `began` and had started before `ended`."""
    last = int(ring[-1])
    places = [3 * (one % _PROBES) for one in range(last - 1, max(0, last - _PROBES) - 1, -1)]
    found = []
    for place in places:  # the newest first
        start, delay, waited = ring[place : place + 3]
        if start + waited < began:
            break
        if start <= ended:
            found.append((delay, waited))
    return found


def processor_seconds(process: int) -> float:
    """Time that the threads of a process have run, those that ended too, to the nanosecond."""
    return time.clock_gettime(~process << 3 | 2)  # clock_getcpuclockid(3)


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
    rss: float
    answer: str
    began: float
    ended: float
    delay: float = 0.0
    waited: float = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "kind": self.request.kind,
            "values": dict(self.request.values),
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
        ended = time.monotonic()
        self.idle_delays = delays_in(ring, began, ended)
        self._idle = (processor_seconds(process) - busy) / (ended - began)

    def cost(self, request: Request) -> Cost:
        """What the request cost, but for its delay, which is known once a probe that started after it is over."""
        peak = Path(f"/proc/{self._process}/clear_refs")
        peak.write_text("5")  # the peak of resident memory begins anew
        rss, busy, began = self._memory("VmRSS"), processor_seconds(self._process), time.monotonic()
        answer = self._ask(request)
        ended = time.monotonic()
        seconds = processor_seconds(self._process) - busy - self._idle * (ended - began)
        more = self._memory("VmHWM") - rss
        per_byte = max(0.0, seconds) / len(request.data)
        return Cost(per_byte, request, seconds, more, answer, began=began, ended=ended)

    def settled(self, cost: Cost) -> bool:
        """Whether its delay is known, and now in it."""
        if newest_probe(self._ring) <= cost.ended:
            return False
        delays = delays_in(self._ring, cost.began, cost.ended) or [(0.0, 0.0)]
        cost.delay, cost.waited = (max(column) for column in zip(*delays, strict=True))
        return True

    def delay(self, request: Request) -> float:
        """How long a probe took beside the request alone."""
        cost = self.cost(request)
        while not self.settled(cost):
            time.sleep(_PROBE_SECONDS / 4)
        return cost.delay

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


def search(server: Server, model: Model, end: float, seed: int) -> Iterator[Cost]:
    """The cost of every request that is sent until `end` (time.monotonic())."""
    chance, spent, waiting = random.Random(seed), dict.fromkeys(KINDS, 0.0), deque[Cost]()
    best = {kind: (Best(lambda cost: cost.per_byte), Best(lambda cost: cost.delay)) for kind in KINDS}
    while waiting or time.monotonic() < end:
        while waiting and server.settled(waiting[0]):
            found = waiting.popleft()
            if found.delay > MOST_DELAY:  # of it, of one beside it, or of the machine
                found.delay = min(found.delay, *(server.delay(found.request) for _ in range(_REPEATS)))
            for of in best[found.request.kind]:
                of.add(found)
            yield found
        if (began := time.monotonic()) >= end:
            time.sleep(_PROBE_SECONDS / 4)
            continue
        kind = min(KINDS, key=spent.__getitem__)
        parents = [request for of in best[kind] for request in of.requests]
        again = parents and chance.randrange(2)
        values = mutated(kind, chance.choice(parents).values, chance) if again else chosen(kind, chance)
        if (request := made(kind, values, model)) is not None:
            waiting.append(server.cost(request))
        spent[kind] += (time.monotonic() - began) / _SHARES.get(kind, 1)


def ask_again(server: Server, model: Model, costs: Path) -> None:
    """Send what delayed too long in earlier runs again, and keep the shortest delay."""
    lines = [json.loads(line) for line in costs.read_text().splitlines()] if costs.exists() else []
    for line in lines:
        if line.get("delay_ms", 0) > 1e3 * MOST_DELAY and (request := made(line["kind"], line["values"], model)):
            delays = [server.delay(request) for _ in range(_REPEATS)]
            line["delay_ms"] = min(line["delay_ms"], round(1e3 * min(delays), 1))
    costs.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz_server(options, ["--shared-memory", "--access-log", f"{folder}/access.log"], _measure)
    return 0 if all_hold(report) and not report["exit_code"] else 1


def _measure(served: FuzzedServer, options: argparse.Namespace) -> dict[str, Any]:
    from vitx.core.bundle import Bundle

    manifest = Bundle.open(options.bundle).manifest
    model = Model(manifest.name, manifest.preprocessing.image_size)
    context = multiprocessing.get_context("spawn")
    ring = context.RawArray("d", 3 * _PROBES + 1)
    prober = context.Process(target=probe, args=(served.address, served.process, ring), daemon=True)
    prober.start()
    while not ring[-1]:
        if not prober.is_alive():
            raise RuntimeError("the process that asks for /v2/health/live has ended")
        time.sleep(0.1)
    server = Server(served.process, served.address, served.grpc_address, ring)
    idle = {"idle_delay_ms": [delay for delay, _ in server.idle_delays]}
    idle |= {"idle_waited_ms": [waited for _, waited in server.idle_delays]}
    ask_again(server, model, options.costs)
    with options.costs.open("a") as lines:
        run = {"seed": options.seed, **{name: _percentiles(found) for name, found in idle.items()}}
        print(json.dumps({"run": run}), file=lines)
        for cost in search(server, model, time.monotonic() + 60 * options.minutes, options.seed):
            print(json.dumps(cost.report()), file=lines, flush=True)
    prober.kill()
    return _report([json.loads(line) for line in options.costs.read_text().splitlines()])


def _report(lines: list[dict[str, Any]]) -> dict[str, Any]:
    # What docs/serving.md says: a body, as sent and as it becomes, and an image in its decoder, which takes more than
    # three further copies of JSON.
    bound = round((MOST_BYTES + 12 * PIXELS) / 2**20 + 2 * BODY_MIB)
    costs = [line for line in lines if "run" not in line]
    measures = ("processor_us_a_byte", "processor_ms", "delay_ms", "rss_mib")

    def most(name: str, of: list[dict[str, Any]] = costs) -> float:
        return max(float(one[name]) for one in of)

    def worst(name: str) -> list[dict[str, Any]]:
        return heapq.nlargest(5, costs, key=lambda one: float(one[name]))

    kinds = {kind: [one for one in costs if one["kind"] == kind] for kind in KINDS}
    slow = sum(one["delay_ms"] > 1e3 * MOST_DELAY for one in costs)
    return {
        "command": "python benchmarks/serve/fuzz_cost.py BUNDLE --minutes=M --seed=S --costs=COSTS",
        **report_header(),
        "requests": len(costs),
        "runs": [line["run"] for line in lines if "run" in line],
        "most_delay_ms": {
            "allowed": 1e3 * MOST_DELAY,
            "found": most("delay_ms"),
            "requests_beyond": slow,
            "holds": not slow,
        },
        "most_rss_mib": {"allowed": bound, "found": most("rss_mib"), "holds": most("rss_mib") <= bound},
        "by_kind": {
            kind: {"requests": len(found), **{f"most_{name}": most(name, found) for name in measures}}
            for kind, found in kinds.items()
            if found
        },
        "answers": dict(sorted(Counter(f"{one['kind']}: {one['answer']}" for one in costs).items())),
        **{f"worst_{name}": worst(name) for name in measures},
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    found = sorted(seconds)
    shares = (("p50", 0.5), ("p99", 0.99), ("most", 1))
    return {name: round(1e3 * found[int(share * (len(found) - 1))], 2) for name, share in shares}


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
