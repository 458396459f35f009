"""`vitx serve` without options against the two settings of its cores, by the number of clients. Linux, with wrk.

    python benchmarks/serve/cores.py [--rounds 3] [--seconds 6] [--json FILE]

DeiT-Ti's shape at 224 px with random weights, tensors of one image; `one a core` is --instances CORES --threads 1, `all
cores` is --instances 1. In each round every setting takes its turn, the others idle; a ratio, over the better of the
two, is the median of the rounds'. Written down beside it are the images a batch. Exit code 1 when the defaults have
less than .97.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from server import random_images
from with_wrk import load, turn, write_script

from support.server_peers import DEIT_TI, bundle_of, served
from support.server_turns import spread
from support.targets import (
    all_hold,
    at_least,
    command_line,
    exit_code,
    report_header,
    require_program,
    save_report,
    verdict,
)
from support.turns import turn_order
from vitx.core.machine import usable_cores

CLIENTS = (1, 4, 32, 64)
SETTINGS = {
    "defaults": (),
    "one a core": ("--instances", str(usable_cores()), "--threads", "1"),
    "all cores": ("--instances", "1"),
}
TARGET = 0.97


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    bundle, image = bundle_of(DEIT_TI, folder), random_images(1, DEIT_TI.image_size)[0]
    rows: dict[int, dict[str, list[dict[str, float]]]] = {
        clients: {name: [] for name in SETTINGS} for clients in CLIENTS
    }
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(name, bundle, *given)) for name, given in SETTINGS.items()}
        script = folder / "request.lua"
        path = write_script(script, servers["defaults"].request(image))
        for number in range(arguments.rounds):
            for clients in CLIENTS:
                for name in turn_order(SETTINGS, number):
                    load(servers[name], script, path, 1, clients)
                    rows[clients][name].append(turn(servers[name], script, path, arguments.seconds, clients))
    return {str(clients): compared(clients, found) for clients, found in rows.items()}


def compared(clients: int, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    rates = {name: [row["rate"] for row in found] for name, found in rounds.items()}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    better = max(("one a core", "all cores"), key=medians.__getitem__)
    each: dict[str, Any] = spread(rates["defaults"], rates[better])
    found = {"rounds": rounds, "better": better, **each, "target": TARGET, "holds": each["ratio"] >= TARGET}
    sizes = {name: statistics.median(row["images a batch"] for row in found) for name, found in rounds.items()}
    found_at = f"{clients} clients: {medians}, {sizes} images a batch"
    print(f"{found_at}, defaults over {better} {each} {verdict(found)}", flush=True)
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=at_least(1), default=6)
    arguments = parser.parse_args()
    require_program("wrk")
    report: dict[str, Any] = report_header()
    with tempfile.TemporaryDirectory() as name:
        report["requests a second by clients"] = measure(arguments, Path(name))
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
