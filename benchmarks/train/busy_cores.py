"""`vitx train` on a CPU whose cores other programs use too: how long PyTorch's threads spin, as vitx sets it and not.

    python benchmarks/train/busy_cores.py [--rounds 3] [--json FILE]

Two epochs of digits-deit with `vitx train` as it is, and with libgomp's own count of spins (300,000), in turns: alone,
and beside as many busy loops as there are cores. Seconds of the epochs by the run's own record; ratios are medians over
the rounds. Exit code 1 when a target is missed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, verdict
from support.turns import take_turns
from vitx.core.machine import usable_cores

WAYS: dict[str, dict[str, str]] = {"vitx": {}, "libgomp": {"GOMP_SPINCOUNT": "300000"}}
CHOSEN_HERE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
# Of libgomp's time: alone no more than noise adds, beside others a fifth less: else it is not worth a setting.
TARGETS = {"alone": 1.05, "beside busy loops": 0.8}
# Ends with the process whose number it is given, its parent, however that ends.
BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


def seconds_of_training(chosen: dict[str, str]) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN_HERE}
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "digits-deit", "--out", f"{folder}/run", "--set", "epochs=2", "--set", "workers=0"]
        command = [sys.executable, "-m", "vitx", *words, "--device", "cpu", "--quiet", "--json"]
        ran = subprocess.run(command, env=environment | chosen, check=True, capture_output=True, text=True)
    return float(json.loads(ran.stdout)["seconds"])


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(rounds: int) -> dict[str, Any]:
    calls = {way: partial(seconds_of_training, chosen) for way, chosen in WAYS.items()}
    seconds = take_turns(calls, rounds, warm_up=0)
    ratios = [ours / theirs for ours, theirs in zip(seconds["vitx"], seconds["libgomp"], strict=True)]
    return {"seconds": seconds, "ratio": median(ratios), "min": min(ratios), "max": max(ratios)}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    arguments = parser.parse_args()
    report = report_header()
    for condition, target in TARGETS.items():
        with busy_loops(0 if condition == "alone" else usable_cores()):
            found = measure(arguments.rounds)
        report[condition] = found | {"target": target, "holds": found["ratio"] <= target}
        print(condition, found, verdict(report[condition]), flush=True)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
