"""The command `vitx predict` as it comes, against every setting of its threads.

    python benchmarks/predict/defaults.py [--rounds 3] [--runtime onnxruntime] [--json FILE]

DeiT-Ti's shape with random weights; JPEGs of 320 × 256 and of 1,600 × 1,280 px, read from the page cache. In each round
every setting takes its turn. images/s are those of summary.json: listing and the start of Python are left out. `bare`
is a process that decodes and infers with one thread a core and nothing else: each thread takes the next image, and runs
the model when it has a batch. Exit code 1 when the defaults are slower than a setting by more than 5 %, or have less
than 0.95 of the bare process's rate.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from support.images import detailed_image
from support.server_peers import export_deit_tiny
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report
from support.turns import turn_order
from vitx.core.bundle import Bundle
from vitx.core.machine import usable_cores
from vitx.runtimes import load_session

SIZES = {"small": ((320, 256), 512), "large": ((1600, 1280), 480)}
SETTINGS = {
    "defaults": (),
    "1 and 1": ("--threads", "1", "--decode-threads", "1"),
    "1 and all": ("--threads", "1"),
    "all and 1": ("--threads", str(usable_cores()), "--decode-threads", "1"),
    "all and all": ("--threads", str(usable_cores())),
}
BATCH = 32
SLOWER, OF_BARE = 0.95, 0.95


def predicted(bundle: Path, images: Path, out: Path, runtime: str, setting: tuple[str, ...]) -> float:
    command = [sys.executable, "-m", "vitx", "predict", str(bundle), str(images), "--out", str(out), "--json"]
    command += ["--runtime", runtime, "--device", "cpu", "--allow-uncertified", *setting]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["images_per_second"])


def bare(bundle: Bundle, images: Path, runtime: str) -> float:
    """Images a second of decoding and the model alone, one thread a core."""
    preprocessing, cores = bundle.manifest.preprocessing, usable_cores()
    paths = sorted(images.rglob("*.jpg"))
    sessions = [load_session(bundle, runtime, device="cpu", threads=1) for _ in range(cores)]
    for session in sessions:
        session.infer(np.zeros((BATCH, 224, 224, 3), np.uint8))

    def work(number: int) -> None:
        own = paths[number::cores]
        for first in range(0, len(own), BATCH):
            batch = [preprocessing.from_bytes(path.read_bytes()) for path in own[first : first + BATCH]]
            sessions[number].infer(np.stack(batch))

    start = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, range(cores)))
    rate = len(paths) / (time.perf_counter() - start)
    for session in sessions:
        session.close()
    return rate


def compare(bundle: Bundle, scratch: Path, size: str, runtime: str, rounds: int) -> dict[str, Any]:
    shape, count = SIZES[size]
    folder, rng = scratch / size, np.random.default_rng(0)
    folder.mkdir()
    for index in range(count):
        detailed_image(rng, shape, coarse=8).save(folder / f"{index:05d}.jpg", quality=90)
    rates: dict[str, list[float]] = {name: [] for name in ("bare", *SETTINGS)}
    for turn in range(rounds):
        rates["bare"].append(bare(bundle, folder, runtime))
        for name in turn_order(SETTINGS, turn):
            out = scratch / f"{size}-{name}-{turn}"
            rates[name].append(predicted(bundle.path, folder, out, runtime, SETTINGS[name]))
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(rates["defaults"], rates[name], strict=True))
        for name in rates
    }
    holds = ratios["bare"] >= OF_BARE and min(ratios.values()) >= SLOWER
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"images_per_second": medians, "rounds": rates, "defaults_over": ratios, "holds": holds}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--runtime", default="onnxruntime")
    arguments = parser.parse_args()
    report = report_header()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        bundle = export_deit_tiny(scratch / "deit_tiny.vitx")
        results = {size: compare(bundle, scratch, size, arguments.runtime, arguments.rounds) for size in SIZES}
    for size, result in results.items():
        print(f"{size}: {'holds' if result['holds'] else 'MISSED'}")
        for setting, rate in result["images_per_second"].items():
            print(f"  {setting:12} {rate:7.1f} images/s, defaults {result['defaults_over'][setting]:.2f} times that")
    report |= {arguments.runtime: results}
    save_report(report, arguments.json)
    return 0 if all_hold(results) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
