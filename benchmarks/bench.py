"""The meter measured: what it adds to a call, how well its shares repeat, and what it says of some networks.

    python benchmarks/bench.py BUNDLE... [--parts a,b,c,d] [--runs 5] [--threads 1,2] [--json FILE]

(a) Overhead: the meter's loop against a bare loop of the same session, at a batch whose call takes about 1 ms, of the
    first bundle. Both call the session equally often; the two of a pair take turns, and the order within a pair
    alternates. The ratio is the median of the pairs'.
(b) Repeatability: the whole of `vitx bench` --runs times for each bundle, each with sessions and probes of its own. The
    spread of a share is its largest less its smallest value over the median, and beside it the spread of the time;
    `between_two_runs` is the largest change of the share of the named limit from one run to the next.
(c) The batch sweep of each bundle on one thread and on all cores, or on --threads.
(d) `--tune` of each bundle.

Exit code 1 when a target is missed. With --json what was run replaces the same in FILE: a part, of it a bundle, of a
sweep a number of threads. So it can be run in pieces.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.targets import command_line, exit_code, merged, report_header, some_of, write_report
from support.turns import take_turns
from vitx.bench import bench_bundle, random_images
from vitx.bench.autotune import tune
from vitx.bench.timing import Lane
from vitx.core.bundle import Bundle
from vitx.core.latency import Latency, LatencyPoint
from vitx.core.machine import usable_cores
from vitx.runtimes import load_session

OVERHEAD_TARGET, SPREAD_TARGET = 0.01, 0.05
CALL_SECONDS = 1e-3
PAIRS, PAIR_SECONDS = 60, 0.15


def overhead(bundle: Bundle) -> dict[str, Any]:
    """(a) Seconds of a call in the meter's loop over those in a bare one, less one."""
    session = load_session(bundle, device="cpu", threads=1)
    shape = tuple(int(extent) for extent in bundle.manifest.input.shape[1:])
    images = random_images(64, shape)
    single = Lane("", lambda: session.infer(images[:1]))
    single.warm_up()
    single.take_turn(0.3)
    size = max(1, min(64, round(CALL_SECONDS / single.median)))
    batch = images[:size]

    def bare(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            session.infer(batch)
        return (time.perf_counter() - start) / calls

    calls = 50

    def metered() -> float:
        nonlocal calls  # as many are made in the other loop: a turn that is shorter is interrupted less
        lane = Lane("", lambda: session.infer(batch))
        start = time.perf_counter()
        calls = len(lane._calls(PAIR_SECONDS))
        return (time.perf_counter() - start) / calls

    times = take_turns({"bare": lambda: bare(calls), "metered": metered}, PAIRS)
    ratios = [ours / theirs for ours, theirs in zip(times["metered"], times["bare"], strict=True)]
    return {
        "model": bundle.manifest.name,
        "batch_size": size,
        "call_ms": 1e3 * statistics.median(times["bare"]),
        "overhead": statistics.median(ratios) - 1,
        "target": OVERHEAD_TARGET,
    }


def sweep(path: Path, threads: int, sizes: tuple[int, ...], seconds: float) -> Latency:
    """One run of `vitx bench --threads`, from the file on."""
    bundle = Bundle.open(path)
    load = partial(load_session, device="cpu", threads=threads)
    measured = bench_bundle(
        *(bundle, {"onnxruntime": load(bundle)}, {"onnxruntime": load}), batch_sizes=sizes, seconds=seconds, quiet=True
    )
    return measured["onnxruntime"]


def repeatability(path: Path, runs: int) -> dict[str, Any]:
    """(b) Spreads of the shares and of the time over `runs` runs on one thread, by batch size."""
    found = [sweep(path, 1, (1, 4), 2.0).points for _ in range(runs)]
    rows = {}
    for points in zip(*found, strict=True):
        values = {
            "median_ms": [point.median_ms for point in points],
            "compute_share": [point.compute_share or 0.0 for point in points],
            "memory_share": [point.memory_share or 0.0 for point in points],
        }
        spreads = {name: (max(each) - min(each)) / statistics.median(each) for name, each in values.items()}
        changes = [share_change(first, second) for first, second in pairwise(points)]
        rows[str(points[0].batch_size)] = {
            **values,
            "spread": spreads,
            "limits": [point.limit for point in points],
            "between_two_runs": max(changes),
        }
    return rows


def share_change(first: LatencyPoint, second: LatencyPoint) -> float:
    """Relative change of the share of the limit that the first run named."""
    name = "memory_share" if first.limit == "memory" else "compute_share"
    before, after = getattr(first, name), getattr(second, name)
    return float(abs(after / before - 1))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--parts", type=some_of("abcd"), default=[*"abcd"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", default=",".join(str(threads) for threads in sorted({1, usable_cores()})))
    arguments = parser.parse_args()
    known = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    command = "python benchmarks/bench.py " + " ".join(Path(word).name for word in sys.argv[1:])
    report: dict[str, Any] = {**report_header(), "commands": [*known.get("commands", []), command]}
    if "a" in arguments.parts:
        report["overhead"] = overhead(Bundle.open(arguments.bundles[0]))
        print(json.dumps(report["overhead"]), flush=True)
    for part, title, measure in (
        ("b", "repeatability", lambda path: repeatability(path, arguments.runs)),
        ("c", "sweep", lambda path: measure_sweeps(path, map(int, arguments.threads.split(",")))),
        ("d", "tuning", measure_tuning),
    ):
        if part in arguments.parts:
            report[title] = {}
            for path in arguments.bundles:
                report[title][path.stem] = measure(path)
                print(title, path.stem, json.dumps(report[title][path.stem]), flush=True)
                write_report(merged(known, report), arguments.json)
    write_report(merged(known, report), arguments.json)
    return 0 if targets_met(report) else 1


def measure_sweeps(path: Path, threads: Iterable[int]) -> dict[str, Any]:
    """(c) The batch sweep for each number of threads."""
    return {
        f"{count} threads": sweep(path, count, (1, 8, 32), 1.0).model_dump(
            mode="json", include={"runtime", "cost", "roof", "points"}
        )
        for count in threads
    }


def measure_tuning(path: Path) -> dict[str, Any]:
    """(d) What `--tune` found and how long it took."""
    bundle = Bundle.open(path)
    start = time.perf_counter()
    tuning = tune(
        bundle, lambda threads: load_session(bundle, device="cpu", threads=threads), cores=usable_cores(), quiet=True
    )
    return {"seconds": time.perf_counter() - start, **tuning.model_dump(mode="json", include={"best", "tried"})}


def targets_met(report: dict[str, Any]) -> bool:
    met = True
    if "overhead" in report:
        met &= report["overhead"]["overhead"] <= OVERHEAD_TARGET
    for rows in report.get("repeatability", {}).values():
        met &= all(row["between_two_runs"] <= SPREAD_TARGET for row in rows.values())
    return met


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
