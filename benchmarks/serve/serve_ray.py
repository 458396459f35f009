"""`vitx serve BUNDLE --ray` against `vitx serve BUNDLE`: what Ray adds to a request. Linux, with `vitx[ray]`.

    python benchmarks/serve/serve_ray.py [--rounds 3] [--seconds 4] [--folder DIR] [--json FILE]

A 32-px network of one block, its image as a binary tensor, and DeiT-Ti at 224 px, its image as a JPEG; random weights;
1 and 16 connections, each of which sends its next request when it has an answer. Ray: a cluster of its own, one replica
with all cores. The two servers are started and ended in turns, for a cluster costs time while nobody asks. Medians over
the rounds.
"""

import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.http_load import closed_loop
from support.server_peers import (
    DEIT_TI,
    TINY,
    Server,
    bundle_of,
    http_request,
    infer_request,
    sample_photographs,
    served,
)
from support.targets import at_least, command_line, report_header, save_report
from support.turns import turn_order
from vitx.core.bundle import Bundle

CONNECTIONS = (1, 16)
WARM_UP_SECONDS = 1.0


def measure(server: Server, request: bytes, seconds: float) -> dict[int, dict[str, float]]:
    """By the number of connections."""
    found = {}
    for connections in CONNECTIONS:
        load = closed_loop(server.address, [request], connections=connections, seconds=seconds, warm_up=WARM_UP_SECONDS)
        load.require_answers(server.name)
        median_ms = 1e3 * statistics.median(load.times(200))
        found[connections] = {"requests_per_second": load.rate(), "p50_ms": median_ms}
    return found


def compared(bundle: Bundle, request: bytes, rounds: int, seconds: float) -> dict[str, Any]:
    rows: dict[str, list[dict[int, dict[str, float]]]] = {"vitx": [], "ray": []}
    starts = {"vitx": partial(served, "vitx", bundle), "ray": partial(served, "ray", bundle, "--ray")}
    for number in range(rounds):
        for name in turn_order(starts, number):
            with starts[name]() as server:
                rows[name].append(measure(server, request, seconds))
    report: dict[str, Any] = {}
    for connections in CONNECTIONS:
        of = {name: [row[connections] for row in turns] for name, turns in rows.items()}
        line = {name: {key: _median(turns, key) for key in turns[0]} for name, turns in of.items()}
        pairs = zip(of["ray"], of["vitx"], strict=True)
        ratio = statistics.median(ray["requests_per_second"] / ours["requests_per_second"] for ray, ours in pairs)
        report[f"{connections} connections"] = {**line, "ray_over_vitx": round(ratio, 3)}
        print(bundle.manifest.name, connections, json.dumps(report[f"{connections} connections"]), flush=True)
    return report


def _median(turns: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(turn[key] for turn in turns), 2)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--folder", type=Path, help="where exported networks are kept")
    options = parser.parse_args()
    image = np.random.default_rng(0).integers(0, 256, (TINY.image_size, TINY.image_size, 3), dtype=np.uint8)
    tensor = infer_request(TINY.name, image)
    jpeg = http_request("/v1/classify", sample_photographs()[0], "Content-Type: image/jpeg\r\n")
    report = report_header()
    with tempfile.TemporaryDirectory() as name:
        for network, request, title in ((TINY, tensor, "tensor"), (DEIT_TI, jpeg, "jpeg")):
            bundle = bundle_of(network, options.folder or Path(name))
            report[title] = compared(bundle, request, options.rounds, options.seconds)
    command = f"python benchmarks/serve/serve_ray.py --rounds {options.rounds} --seconds {options.seconds:g}"
    save_report(report, options.json, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
