"""`vitx serve` against its peers, and its own promises, in one run on this machine. Linux.

    python benchmarks/serve/server.py --triton VENV --litserve VENV
        [--parts a,c,d] [--rounds 5] [--seconds 4] [--soak 200000] [--folder DIR] [--json FILE]

(a) Requests of one image, a 32-px ViT of 6 blocks × 96 with random weights, binary tensors (LitServe: JSON), 64
    connections. Servers: ours, Triton 2.51, LitServe, and the least collector that batches (../support/peers). All run
    the same model.onnx in ONNX Runtime, two one-thread instances, batches of up to 32 within 2 ms, and get the same
    client. They take turns; while one is measured the others are stopped (SIGSTOP). A ratio is the median of the
    rounds'. `sessions` is the limit: two threads, each with a one-thread session, no server, at the best of three batch
    sizes.
(b) JPEG bytes: in with_wrk.py, whose client misses no answer.
(c) Processor time of an idle server over 20 s; resident memory over --soak requests; seconds from the start of the
    command to ready, for DeiT-S at 224 px.
(d) Overload: ten times what a slow network (32 px, 12 blocks × 384) can do arrives by a Poisson process, for 10 s, once
    with a deadline in each request and once with a queue of 32 images and none.

Logits of every server are compared with a session's before anything is timed. Exit code 1 when a target is missed, 3
when a peer is not installed. With --json the parts that were run replace those in FILE.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.http_load import Connection, Load, closed_loop, open_loop, percentile_ms
from support.onnx_session import cpu_session
from support.server_peers import (
    DEIT_S,
    INSTANCES,
    SLOW,
    SMALL,
    TINY,
    Server,
    bundle_of,
    collector_server,
    infer_request,
    litserve_server,
    package_versions,
    triton_server,
    vitx_server,
)
from support.server_turns import spread, turn
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, some_of, verdict
from support.turns import turn_order
from vitx.core.bundle import Bundle
from vitx.core.preprocess import UInt8Array

# What was promised.
RATE_TARGETS = {"triton": 1.25, "litserve": 3.0, "collector": 1.0}
P99_TARGETS = {"triton": 0.8}
IDLE_TARGET, GROWTH_TARGET, START_TARGET = 0.01, 0.02, 2.0
REFUSAL_MS = 10.0

CONNECTIONS = 64
SESSION_BATCHES = (1, 8, 32)
LOGIT_TOLERANCE = 1e-4
IDLE_SECONDS, STARTS, SOAK_STEPS = 20.0, 5, 10
OVERLOAD, OVERLOAD_SECONDS, DEADLINE_MS, SHORT_QUEUE = 10, 10.0, 500, 32


def random_images(count: int, size: int) -> list[UInt8Array]:
    return list(np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8))


def side_by_side(work: Callable[[int], Any], images: int, seconds: float) -> float:
    """Images a second of `INSTANCES` threads that each repeat `work(thread)`, of so many images, for `seconds`."""
    end = time.perf_counter() + seconds

    def repeat(thread: int) -> float:
        calls, start = 0, time.perf_counter()
        while time.perf_counter() < end:
            work(thread)
            calls += 1
        return calls * images / (time.perf_counter() - start)

    with ThreadPoolExecutor(INSTANCES) as threads:
        return sum(threads.map(repeat, range(INSTANCES)))


class Sessions:
    """The limit: sessions with nothing around them."""

    def __init__(self, bundle: Bundle) -> None:
        self.sessions = [cpu_session(bundle.model_path) for _ in range(INSTANCES)]
        images = np.stack(random_images(max(SESSION_BATCHES), bundle.manifest.preprocessing.image_size))
        self._batches = {size: images[:size] for size in SESSION_BATCHES}
        self.rates: dict[int, list[float]] = {size: [] for size in SESSION_BATCHES}

    def logits(self, image: UInt8Array) -> Any:
        return self.sessions[0].run(None, {"images": image[None]})[0][0]

    def _run(self, size: int, thread: int) -> None:
        self.sessions[thread].run(None, {"images": self._batches[size]})

    def measure(self, seconds: float) -> float:
        """Images a second at the best batch size."""
        for size in self._batches:
            self.rates[size].append(side_by_side(partial(self._run, size), size, seconds / len(self._batches)))
        return max(rates[-1] for rates in self.rates.values())

    def report(self) -> dict[str, Any]:
        return {f"images/s at batch {size}": round(statistics.median(rates), 1) for size, rates in self.rates.items()}


def check_logits(server: Server, sessions: Sessions, images: Sequence[UInt8Array]) -> float:
    """The largest difference of an answer's logits from a session's; raise RuntimeError beyond the tolerance."""
    connection = Connection(server.address)
    worst = 0.0
    for image in images:
        status, answer = connection.ask(server.request(image))
        if status != 200:
            raise RuntimeError(f"{server.name} answered {status}: {answer[-300:]!r}")
        worst = max(worst, float(np.abs(server.logits(answer) - sessions.logits(image)).max()))
    connection.close()
    if worst > LOGIT_TOLERANCE:
        raise RuntimeError(f"{server.name}: logits differ by {worst:g} from the session's: at most {LOGIT_TOLERANCE}")
    return worst


def against_peers(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(a) All servers in turns, and the sessions alone."""
    bundle = bundle_of(SMALL, arguments.folder or folder)
    images = random_images(CONNECTIONS, SMALL.image_size)
    sessions = Sessions(bundle)
    report: dict[str, Any] = {"connections": CONNECTIONS, "seconds_a_turn": arguments.seconds, "servers": {}}
    rows: dict[str, list[dict[str, Any]]] = {}
    limits: list[float] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(vitx_server(bundle))]
        if "triton" in arguments.peers:
            servers.append(stack.enter_context(triton_server(bundle, arguments.triton, folder / "triton")))
        if "litserve" in arguments.peers:
            servers.append(stack.enter_context(litserve_server(bundle, arguments.litserve)))
        if "collector" in arguments.peers:
            servers.append(stack.enter_context(collector_server(bundle)))
        requests = {server.name: [server.request(image) for image in images] for server in servers}
        differences = {server.name: check_logits(server, sessions, images[:8]) for server in servers}
        for server in servers:
            server.pause()
        for number in range(arguments.rounds):
            limits.append(sessions.measure(arguments.seconds))
            for server in turn_order(servers, number):
                row = turn(server, requests[server.name], arguments.seconds, CONNECTIONS)
                rows.setdefault(server.name, []).append(row)
            print(f"(a) round {number + 1}: sessions {limits[-1]:.0f}, {_rates(rows)} requests/s", flush=True)
    for name, turns in rows.items():
        medians = {key: round(statistics.median(row[key] for row in turns), 3) for key in turns[0]}
        report["servers"][name] = {**medians, "max_logit_error": differences[name], "rounds": turns}
    report["sessions"] = sessions.report()
    report["ours_over"] = {name: _over(rows["vitx"], rows[name], name) for name in rows if name != "vitx"}
    report["ours_over"]["sessions"] = spread([row["requests_per_second"] for row in rows["vitx"]], limits)
    report["peers"] = {
        "triton": package_versions(arguments.triton, "nvidia-pytriton", "onnxruntime", "numpy"),
        "litserve": package_versions(arguments.litserve, "litserve", "onnxruntime", "uvicorn", "uvloop"),
    }
    for name, ratio in report["ours_over"].items():
        print(f"(a) ours over {name}: {ratio}")
    return report


def _rates(rows: dict[str, list[dict[str, Any]]]) -> str:
    return ", ".join(f"{name} {turns[-1]['requests_per_second']:.0f}" for name, turns in rows.items())


def _over(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    report: dict[str, Any] = {
        key: spread([row[key] for row in ours], [row[key] for row in theirs])
        for key in ("requests_per_second", "p50_ms", "p99_ms")
    }
    rate, p99 = report["requests_per_second"]["ratio"], report["p99_ms"]["ratio"]
    report |= {"rate_target": RATE_TARGETS[name], "p99_target": P99_TARGETS.get(name)}
    report["holds"] = rate >= RATE_TARGETS[name] and p99 <= P99_TARGETS.get(name, float("inf"))
    return report


def at_rest(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(c) Idle processor time, start and memory."""
    place = arguments.folder or folder
    report = {"idle": idle(bundle_of(SMALL, place)), "start": start_to_ready(bundle_of(DEIT_S, place))}
    if arguments.soak:
        report["memory"] = memory(bundle_of(TINY, place), arguments.soak)
    return report


def idle(bundle: Bundle) -> dict[str, Any]:
    """Processor seconds a second of a server that was used and has an open connection."""
    with vitx_server(bundle) as server:
        requests = [server.request(random_images(1, SMALL.image_size)[0])]
        closed_loop(server.address, requests, connections=CONNECTIONS, seconds=1)
        connection = Connection(server.address)
        connection.ask(requests[0])
        before, start = server.cpu_seconds(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        share = (server.cpu_seconds() - before) / (time.perf_counter() - start)
        connection.close()
    report = {"cores": round(share, 5), "seconds": IDLE_SECONDS, "target": IDLE_TARGET, "holds": share < IDLE_TARGET}
    print(f"(c) idle: {100 * share:.2f} % of a core; target {100 * IDLE_TARGET:g} %: {verdict(report)}", flush=True)
    return report


def start_to_ready(bundle: Bundle) -> dict[str, Any]:
    seconds = []
    for _ in range(STARTS):
        start = time.perf_counter()
        with vitx_server(bundle):
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    report = {"seconds": [round(value, 3) for value in seconds], "median": round(median, 3)}
    report |= {"target": START_TARGET, "holds": median < START_TARGET}
    print(f"(c) start to ready: {median:.2f} s; target {START_TARGET:g} s: {verdict(report)}", flush=True)
    return report


def memory(bundle: Bundle, count: int) -> dict[str, Any]:
    """Resident memory over `count` requests: the median of the last three tenths' ends over that of the first three."""
    resident = []
    with vitx_server(bundle) as server:
        requests = [server.request(image) for image in random_images(CONNECTIONS, TINY.image_size)]
        for _ in range(SOAK_STEPS):
            load = closed_loop(server.address, requests, connections=CONNECTIONS, count=count // SOAK_STEPS)
            load.require_answers(server.name)
            resident.append(server.resident_bytes())
    growth = statistics.median(resident[-3:]) / statistics.median(resident[:3]) - 1
    report = {"requests": count, "resident_mib": [round(value / 2**20, 2) for value in resident]}
    report |= {"growth": round(growth, 5), "target": GROWTH_TARGET, "holds": growth < GROWTH_TARGET}
    print(f"(c) memory over {count} requests: {100 * growth:+.2f} %: {verdict(report)}", flush=True)
    return report


def overload(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(d) Ten times the capacity: with deadlines, and with a short queue."""
    bundle = bundle_of(SLOW, arguments.folder or folder)
    images = random_images(CONNECTIONS, SLOW.image_size)
    plain = [infer_request(SLOW.name, image) for image in images]
    dated = [infer_request(SLOW.name, image, {"timeout": 1000 * DEADLINE_MS}) for image in images]
    report: dict[str, Any] = {"times_capacity": OVERLOAD, "seconds": OVERLOAD_SECONDS}
    for title, requests, options in (
        ("deadline", dated, ()),
        ("queue", plain, ("--queue", str(SHORT_QUEUE))),
    ):
        with vitx_server(bundle, *options) as server:
            capacity = closed_loop(server.address, plain, connections=SHORT_QUEUE, seconds=4, warm_up=2).rate()
            before, rate = server.resident_bytes(), OVERLOAD * capacity
            load = open_loop(server.address, requests, rate=rate, seconds=OVERLOAD_SECONDS, connections=900)
            row = _overloaded(load, capacity, rate) | {"resident_growth": server.resident_bytes() / before - 1}
            again = closed_loop(server.address, plain, connections=SHORT_QUEUE, seconds=3).rate()
        row["capacity_afterwards"] = round(again, 1)
        if title == "deadline":
            late = [value for value in load.times(200) if value > DEADLINE_MS / 1e3]
            row |= {"deadline_ms": DEADLINE_MS, "accepted_but_late": len(late)}
            row["holds"] = row["holds"] and row["accepted_p99_ms"] <= DEADLINE_MS
        report[title] = row
        print(f"(d) {title}: {row}", flush=True)
    return report


def _overloaded(load: Load, capacity: float, rate: float) -> dict[str, Any]:
    refused = load.times(429, 503)
    expected = set(load.counts()) <= {200, 429, 503} and not load.unanswered
    p99 = percentile_ms(refused, 99)
    return {
        "capacity": round(capacity, 1),
        "offered": round(rate, 1),
        "answers": load.counts(),
        "unanswered": load.unanswered,
        "goodput": round(len(load.times(200)) / load.seconds, 1),
        "accepted_p50_ms": percentile_ms(load.times(200), 50),
        "accepted_p99_ms": percentile_ms(load.times(200), 99),
        "refused_p50_ms": percentile_ms(refused, 50),
        "refused_p99_ms": p99,
        "refused_within_10_ms": round(sum(value < REFUSAL_MS / 1e3 for value in refused) / max(1, len(refused)), 5),
        "client_late_p99_ms": percentile_ms(load.late, 99),
        "client_cores": round(load.client_share, 3),
        "holds": expected and bool(load.times(200)) and p99 is not None and p99 < REFUSAL_MS,
    }


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], dict[str, Any]]]] = {
    "a": ("a: against peers", against_peers),
    "c": ("c: at rest", at_rest),
    "d": ("d: overload", overload),
}


def command_of(arguments: argparse.Namespace) -> str:
    """The command as it is written down: without this machine's folders, and with what decided the numbers."""
    words = ["python benchmarks/serve/server.py --parts", ",".join(arguments.parts)]
    if "a" in arguments.parts:
        words += ["--triton VENV --litserve VENV --peers", ",".join(arguments.peers)]
        words += [f"--rounds {arguments.rounds} --seconds {arguments.seconds:g}"]
    if "c" in arguments.parts:
        words += [f"--soak {arguments.soak}"]
    return " ".join(words)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    parser.add_argument("--peers", type=some_of(RATE_TARGETS), default=[*RATE_TARGETS], help="of (a)")
    parser.add_argument("--triton", type=Path, default=Path(".venv-triton"), help="a venv with nvidia-pytriton")
    parser.add_argument("--litserve", type=Path, default=Path(".venv-litserve"), help="a venv with litserve")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of one turn")
    parser.add_argument("--soak", type=at_least(0), default=200_000, help="requests of (c); 0: none")
    parser.add_argument("--folder", type=Path, help="where exported networks are kept; default: exported for each run")
    arguments = parser.parse_args()
    report = report_header()
    print(json.dumps(report["machine"]))
    for part in arguments.parts:
        title, measure = PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            report[title] = measure(arguments, Path(folder))
    save_report(report, arguments.json, command_of(arguments))
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
