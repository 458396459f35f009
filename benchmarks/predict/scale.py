"""How many cores, network cards and devices a rate needs: measured stage costs, a model of the pipeline, a check of it.

    python benchmarks/predict/scale.py --measure --json FILE [--folder F] [--parts model_binds,ledger]     # here
    python benchmarks/predict/scale.py --plan --results FILE --images-per-day 1e9 \
        --node-cores 16 --node-devices 1 --node-gbit 25 --device-images-per-second R [--node-price P]

--measure   The costs of each stage alone, with one core busy and with all; then `vitx predict`'s work in 1, 2 and 4
            jobs (--shard) on two inputs, one that the model binds and one that decoding binds, and beside each the
            seconds that the model of benchmarks/support/pipeline.py expects from the costs alone. Of the ledger: shards
            a second of a billion images'.
--plan      Nodes for a rate, what binds them, the ledger's load, and the price of an image where one is given. What a
            device does is an input unless --device-images-per-second is left out: then it is one measured core.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import LABELS, colour_image, png, write_bundle
from support.images import detailed_image
from support.pipeline import Costs, processes_on_cores, simulate, worker
from support.process_tree import together
from support.server_peers import export_deit_tiny
from support.targets import report_header, results_file, save_report, some_of
from vitx.core.bundle import Bundle
from vitx.predict import PREDICTIONS, predict
from vitx.predict.ledger import Ledger, Shard, ShardRecord
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.outputs.parts import warm_up
from vitx.runtimes import load_session

BATCH, SHARD, ROUNDS = 16, 16, 3
PROCESSES = (1, 2, 4)
# What a billion images are in shards of 4,096.
MANY_SHARDS, SHARD_SIZE = 244_141, 4096
SIDES = {"small": ((320, 240), (400, 300), (512, 384), (640, 480)), "large": ((640, 480), (1024, 768), (1600, 1200))}
IMAGES, COPIES = 128, 4


def write_jpegs(folder: Path, count: int, sides: tuple[tuple[int, int], ...]) -> None:
    """Images of the given sizes in turn, each under several names."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for index, size in enumerate(sides[number % len(sides)] for number in rng.permutation(count)):
        detailed_image(rng, size, coarse=16).save(folder / f"0-{index:05d}.jpg", quality=85)
        for copy in range(1, COPIES):
            os.link(folder / f"0-{index:05d}.jpg", folder / f"{copy}-{index:05d}.jpg")


def originals(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("0"))


def stage_seconds(core: int, bundle: Path, folder: Path, ready: Any) -> dict[str, Any]:
    """In a process of its own on one core: seconds to read, to decode each image, and of a batch in the model."""
    os.sched_setaffinity(0, {core})
    opened = Bundle.open(bundle)
    session = load_session(opened, device="cpu", threads=1)
    paths = originals(folder)
    preprocessing = opened.manifest.preprocessing
    batch = [preprocessing.from_bytes(path.read_bytes()) for path in paths[:BATCH]]
    session.infer(np.stack(batch))
    ready.wait()
    start = time.perf_counter()
    contents = [path.read_bytes() for path in paths]
    read = (time.perf_counter() - start) / len(paths)
    decode, model = [], []
    for number, data in enumerate(contents):
        start = time.perf_counter()
        preprocessing.from_bytes(data)
        decode.append(time.perf_counter() - start)
        if number % BATCH == BATCH - 1:  # in turns: a machine that slows down slows both
            start = time.perf_counter()
            session.infer(np.stack(batch))
            model.append(time.perf_counter() - start)
    return {"read": read, "decode": decode, "batch": model, "bytes": sum(map(len, contents)) / len(contents)}


def predict_seconds(number: int, jobs: int, bundle: Path, folder: Path, out: Path, ready: Any) -> dict[str, float]:
    """In a process of its own: one job of the prediction; when it ended, and what its stages took."""
    opened = Bundle.open(bundle)
    session = load_session(opened, device="cpu", threads=1)
    warm_up()
    ready.wait()
    start = time.monotonic()
    sizes: dict[str, Any] = {"batch_size": BATCH, "shard_size": SHARD, "decode_threads": 1, "allow_uncertified": True}
    options = PredictOptions(shard=Share(number + 1, jobs), **sizes)
    summary = predict(opened, session, folder, out, options, quiet=True)
    write = (summary.stages["write"] + summary.stages["commit"]) * summary.seconds / max(1, summary.images_here)
    return {"start": start, "end": time.monotonic(), "write": write}


def measured(count: int, bundle: Path, folder: Path, out: Path) -> tuple[float, float]:
    """Seconds from the common start until all is done, and seconds to write an image."""
    out.mkdir()
    ends = together(predict_seconds, count, count, bundle, folder, out)
    return max(end["end"] for end in ends) - min(end["start"] for end in ends), ends[0]["write"]


def stages(scratch: Path, folder: Path, bundle: Path) -> dict[str, Any]:
    """Costs alone, the seconds expected of them, and the seconds measured, of one input and one model."""
    cores = len(os.sched_getaffinity(0))
    one = scratch / "one" / folder.name
    one.mkdir(parents=True)
    (one / "0.jpg").write_bytes(sorted(folder.iterdir())[0].read_bytes())
    name = f"{folder.name}-{bundle.stem}"
    found: dict[str, Any] = {"images": len(list(folder.iterdir())), "costs": {}, "processes": {}}
    seconds: dict[int, list[float]] = {count: [] for count in PROCESSES}
    begin, write = [], []
    loads: dict[int, list[dict[str, Any]]] = {busy: [] for busy in (1, cores)}
    for turn in range(ROUNDS):
        begin.append(measured(1, bundle, one, scratch / f"{name}-{turn}-begin")[0])
        for busy in loads:
            loads[busy] += together(stage_seconds, busy, bundle, folder)
        for count in PROCESSES:
            took, each = measured(count, bundle, folder, scratch / f"{name}-{turn}-{count}")
            seconds[count].append(took)
            write.append(each)
    begins = statistics.median(begin)
    for count in PROCESSES:
        busy = 1 if count == 1 else cores
        decode = np.tile(np.median([load["decode"] for load in loads[busy]], axis=0), COPIES)
        batch = statistics.median(value for load in loads[busy] for value in load["batch"])
        read = statistics.median(load["read"] for load in loads[busy])
        costs = Costs(read, decode, batch, statistics.median(write), BATCH)
        expected = begins + processes_on_cores(costs, count, cores, 1, SHARD)
        took = statistics.median(seconds[count])
        found["processes"][count] = {
            "seconds": seconds[count],
            "images_per_second": found["images"] / took,
            "expected_images_per_second": found["images"] / expected,
            "error_percent": 100 * (took / expected - 1),
        }
        found["costs"][f"{busy} busy cores"] = {
            "read_seconds": read,
            "decode_seconds": {
                "mean": float(decode.mean()),
                "deviation": float(decode.std()),
                "max": float(decode.max()),
            },
            "batch_seconds": batch,
            "write_seconds": costs.write,
        }
    return found | {
        "bytes": loads[1][0]["bytes"],
        "begin_seconds": begins,
        "decode": [round(float(v), 6) for v in decode],
    }


def plan_shards(where: Path, count: int) -> None:
    shards = tuple(Shard("images", "", number * 100_000, SHARD_SIZE) for number in range(count))
    with closing(Ledger(where)) as ledger:
        ledger.create({}, shards)


def take_all(where: Path, seconds: float) -> int:
    """Read and finish shards, which cost nothing, for a while; how many."""
    done = 0
    with closing(Ledger(where)) as ledger:
        end = time.monotonic() + seconds
        for claim in ledger.unfinished():
            if time.monotonic() > end:
                break
            ledger.commit(claim, ShardRecord("0" * 64, SHARD_SIZE, 0, {0: SHARD_SIZE}), lambda: None)
            done += 1
    return done


def ledger_rates(where: Path, seconds: float = 4.0) -> dict[str, Any]:
    """Shards a second that a process reads and finishes, of a billion images."""
    start = time.perf_counter()
    plan_shards(where, MANY_SHARDS)
    found: dict[str, Any] = {"shards": MANY_SHARDS, "plan_seconds": time.perf_counter() - start}
    return found | {"shards_per_second": take_all(where, seconds) / seconds}


def listing(scratch: Path, count: int = 300_000) -> dict[str, float]:
    """Paths a second that one process lists, sorts and writes down."""
    names = (f"{index * 7919 % count:09d}/photo of something.jpg" for index in range(count))
    start = time.perf_counter()
    with closing(Ledger(scratch / "names.sqlite")) as ledger:
        ledger.find((name, None) for name in names)
        ledger.number(WHOLE)
    return {"paths_per_second": count / (time.perf_counter() - start)}


def verification() -> dict[str, float]:
    """Bytes a second that one process hashes: what a process that joins does with every finished file."""
    import hashlib

    data = os.urandom(2**26)
    start = time.perf_counter()
    hashlib.sha256(data)
    return {"bytes_per_second": len(data) / (time.perf_counter() - start)}


# input and model of each check
CHECKS = {"model_binds": ("small", "deit"), "decode_binds": ("large", "tiny")}
PARTS = (*CHECKS, "ledger", "output")


def prepare(scratch: Path) -> None:
    """Make the images and the bundles that are not there yet."""
    for name, sides in SIDES.items():
        if not (scratch / name).exists():
            write_jpegs(scratch / name, IMAGES, sides)
    for name, write in (("deit", export_deit_tiny), ("tiny", write_bundle)):
        if not (scratch / f"{name}.vitx").exists():
            write(scratch / f"{name}.vitx")


def output(scratch: Path) -> dict[str, float]:
    """Bytes of an image's row, and seconds to write it, in one shard of the usual size."""
    bundle, folder = write_bundle(scratch / "rows.vitx"), scratch / "rows"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(SHARD_SIZE):
        (folder / f"{number:08d}.png").write_bytes(png(colour_image(number % len(LABELS), rng)))
    session = load_session(bundle, device="cpu", threads=1)
    warm_up()
    summary = predict(bundle, session, folder, scratch / "out", PredictOptions(allow_uncertified=True), quiet=True)
    parts = (scratch / "out" / PREDICTIONS).iterdir()
    return {
        "bytes_per_image": sum(path.stat().st_size for path in parts) / SHARD_SIZE,
        "write_seconds": (summary.stages["write"] + summary.stages["commit"]) * summary.seconds / SHARD_SIZE,
    }


def measure(scratch: Path, parts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if set(CHECKS) & set(parts):
        prepare(scratch)
    for part, (folder, bundle) in CHECKS.items():
        if part in parts:
            with tempfile.TemporaryDirectory(dir=scratch) as outs:
                found[part] = stages(Path(outs), scratch / folder, scratch / f"{bundle}.vitx")
    if "ledger" in parts:
        with tempfile.TemporaryDirectory() as disk:  # not the memory that the images are in
            found["ledger"] = {"sqlite": ledger_rates(Path(disk) / "ledger.sqlite")}
            found["listing"] = listing(Path(disk))
        found["verification"] = verification()
    if "output" in parts:
        with tempfile.TemporaryDirectory() as disk:
            found["output"] = output(Path(disk))
    return found


def node_rates(found: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Images a second that each resource of a node could do alone, and the share of its time that a model is fed."""
    check = found[options.images]
    costs = check["costs"][max(check["costs"])]  # with all cores busy
    decode = np.random.default_rng(0).choice(check["decode"], 16_384)
    write = found["output"]["write_seconds"]
    rates = {"network": options.node_gbit * 1e9 / 8 / check["bytes"]}
    if options.device_images_per_second is None:
        line = Costs(costs["read_seconds"], decode, costs["batch_seconds"], write, BATCH)
        return rates | {"cores (decoding and model)": options.node_cores / line.processor_seconds}, 1.0
    batch = options.batch / options.device_images_per_second
    line = Costs(costs["read_seconds"], decode, batch, write, options.batch, model_threads=0)
    run = simulate(worker(line, max(1, options.node_cores // options.node_devices)))
    rates["cores (decoding)"] = options.node_cores / line.processor_seconds
    rates["devices"] = options.node_devices * options.device_images_per_second
    rates["pipeline of bounded buffers"] = options.node_devices * len(decode) / run.seconds
    return rates, run.busy["infer"]


def plan(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The fleet for a rate, used to the full: headroom is for the reader to add."""
    rate = options.images_per_day / 86_400
    rates, fed = node_rates(found, options)
    node = min(rates.values())
    binding = min((name for name in rates if name != "pipeline of bounded buffers"), key=lambda name: rates[name])
    nodes = math.ceil(rate / node)
    workers = nodes * max(1, options.node_devices)
    shard_seconds = options.shard_size * workers / (node * nodes)
    again = shard_seconds / 2 + found[options.images]["begin_seconds"]
    lost = min(1.0, options.preemptions_per_hour * again / 3600)
    measured = found["ledger"]["sqlite"]["shards_per_second"]
    if isinstance(measured, dict):  # of the earlier ledger: by the number of processes
        measured = measured["1"]
    output = rate * 86_400 * found["output"]["bytes_per_image"]
    price = options.node_price and options.node_price * nodes / (rate * 3600) / (1 - lost) * 1e6
    return {
        "images_per_second": rate,
        "node_images_per_second": rates,
        "binding": binding,
        "model_is_fed_share": fed,
        "nodes": nodes,
        "workers": workers,
        "fleet": {
            "cores": nodes * options.node_cores,
            "devices": nodes * options.node_devices,
            "gbit_per_second_in": rate * found[options.images]["bytes"] * 8 / 1e9,
            "decoding_cores_a_device": options.node_cores / max(1, options.node_devices),
            "gigabytes_out_a_day": output / 1e9,
        },
        # Each job of a --shard has its own.
        "ledger": {
            "shards_per_second": rate / options.shard_size / workers,
            "share_of_measured_rate": rate / options.shard_size / workers / measured,
        },
        "preemption": {
            "seconds_done_again": again,
            "share_of_capacity_lost": lost,
            "last_shard_late_by_seconds": shard_seconds,
            "verification_seconds_to_join": output / found["verification"]["bytes_per_second"],
        },
        "listing_hours_of_single_files": options.images_per_day / found["listing"]["paths_per_second"] / 3600,
        "price_of_a_million_images": price or "no --node-price was given",
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true")
    what.add_argument("--plan", action="store_true")
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS], help="of --measure")
    parser.add_argument("--folder", type=Path, help="where the images and bundles are made, and found again")
    parser.add_argument("--json", type=results_file, help="of --measure: what is measured is added to this file")
    parser.add_argument("--results", type=Path, help="of --plan: what --measure wrote")
    parser.add_argument("--images", choices=list(CHECKS), default="decode_binds", help="whose bytes and decoding times")
    parser.add_argument("--images-per-day", type=float, default=1e9)
    parser.add_argument("--node-cores", type=int, default=16)
    parser.add_argument("--node-devices", type=int, default=0)
    parser.add_argument("--node-gbit", type=float, default=10.0)
    parser.add_argument(
        "--device-images-per-second", type=float, help="not measured here; left out: cores do the model"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shard-size", type=int, default=SHARD_SIZE)
    parser.add_argument("--preemptions-per-hour", type=float, default=0.0, help="of a node")
    parser.add_argument("--node-price", type=float, help="of an hour, in any currency")
    options = parser.parse_args()
    for name, given in vars(options).items():
        may_be_none = name in ("node_devices", "preemptions_per_hour")
        if type(given) in (int, float) and not (0 < given < math.inf or (may_be_none and given == 0)):
            wanted = "from 0 on" if may_be_none else "above 0"
            parser.error(f"--{name.replace('_', '-')} {given:g}: expected a number {wanted}")
    if options.plan and options.results is None:
        parser.error("--plan needs --results FILE, which --measure --json FILE writes")
    if (options.device_images_per_second is None) != (options.node_devices == 0):
        parser.error("--node-devices and --device-images-per-second go together")
    return options


def main() -> None:
    options = arguments()
    if options.plan:
        print(json.dumps(plan(json.loads(options.results.read_text()), options), indent=2))
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        found = measure(options.folder or Path(name), options.parts)
    print(json.dumps(found, indent=2))
    save_report({**report_header(), **found}, options.json)


if __name__ == "__main__":
    main()
