"""`vitx predict` measured: against its stages alone, its bookkeeping, its memory, and two processes against one.

    python benchmarks/predict/speed.py [--parts speed,bookkeeping,processes,memory] [--json FILE]

speed        DeiT-Ti's shape with random weights on 224-px JPEGs, one thread decoding and one in the model, so that each
             has a core: images/s of the whole over the smaller of decoding alone and the model alone, in turns; the
             median of the rounds' ratios. `model_beside_decoding` is the model with another process that decodes as
             many images a second: what the hardware takes when both its cores work, whatever the pipeline.
bookkeeping  100,000 images whose pixels and logits cost nothing: what is left is listing, claims, ranking, Parquet,
             digests. At 100,000 images a minute (the rate of the target) it takes that part of the minute.
processes    Two jobs (--shard) of one input against one, each on its own core.
memory       Listing 100,000 and 1,000,000 paths and reading the list back: the largest resident size of a process.

Every image is in a tmpfs or the page cache. Exit code 1 when a target is missed.
"""

import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import LABELS, write_bundle
from support.images import detailed_image
from support.process_tree import own_peak_bytes, together
from support.server_peers import export_deit_tiny
from support.targets import all_hold, command_line, exit_code, report_header, save_report, some_of
from support.turns import turn_order
from vitx.core.bundle import Bundle
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.predict import predict
from vitx.predict.ledger import Ledger, image_shards, names_of
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.outputs.parts import warm_up
from vitx.runtimes import Session, load_session

JPEGS, TINY, BATCH = 512, 100_000, 16
SPEED_TARGET, BOOKKEEPING_TARGET, PROCESSES_TARGET, MEMORY_TARGET = 0.95, 0.03, 1.9, 1.1


def write_jpegs(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for index in range(count):
        path = folder / f"{index % 8}" / f"{index:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        detailed_image(rng, (320, 256), coarse=8).save(path, quality=90)


def bind(core: int) -> None:
    os.sched_setaffinity(0, {core})


def speed(scratch: Path, bundle: Bundle, rounds: int = 3) -> dict[str, Any]:
    folder = scratch / "jpegs"
    paths = sorted(folder.rglob("*.jpg"))
    preprocessing = bundle.manifest.preprocessing
    session = load_session(bundle, device="cpu", threads=1)
    batch = np.stack([preprocessing.from_bytes(path.read_bytes()) for path in paths[:BATCH]])
    session.infer(batch)
    rates: dict[str, list[float]] = {"decode": [], "infer": [], "model_beside_decoding": [], "predict": []}
    stages = {}
    for turn in range(rounds):
        start = time.perf_counter()
        for path in paths:
            preprocessing.from_bytes(path.read_bytes())
        rates["decode"].append(len(paths) / (time.perf_counter() - start))
        rates["infer"].append(model_rate(session, batch, len(paths)))
        with decoding_beside(paths, preprocessing, rates["infer"][-1]):
            rates["model_beside_decoding"].append(model_rate(session, batch, len(paths)))
        summary = run_predict(bundle, session, folder, scratch / f"speed-{turn}", batch_size=BATCH, decode_threads=1)
        rates["predict"].append(summary.images_per_second)
        stages = summary.stages
    alone = {name: statistics.median(rates[name]) for name in rates}
    ratios = {
        name: statistics.median(
            rate / min(decode, infer)
            for rate, decode, infer in zip(rates[name], rates["decode"], rates["infer"], strict=True)
        )
        for name in ("predict", "model_beside_decoding")
    }
    return {
        "images_per_second": alone,
        "rounds": rates,
        "stages": stages,
        "ratio": ratios["predict"],
        "ratio_of_the_hardware": ratios["model_beside_decoding"],
        "target": SPEED_TARGET,
        "holds": ratios["predict"] >= SPEED_TARGET,
    }


def model_rate(session: Any, batch: UInt8Array, images: int) -> float:
    start = time.perf_counter()
    for _ in range(images // BATCH):
        session.infer(batch)
    return images / (time.perf_counter() - start)


@contextmanager
def decoding_beside(paths: list[Path], preprocessing: Preprocessing, rate: float) -> Iterator[None]:
    """Another process decodes `rate` images a second meanwhile."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=decode_at_rate, args=(paths, preprocessing, rate, ready), daemon=True)
    process.start()
    ready.wait()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def decode_at_rate(paths: list[Path], preprocessing: Preprocessing, rate: float, ready: Any) -> None:
    ready.set()
    start = time.perf_counter()
    for number, path in enumerate(itertools.cycle(paths)):
        preprocessing.from_bytes(path.read_bytes())
        time.sleep(max(0, start + number / rate - time.perf_counter()))


def run_predict(bundle: Bundle, session: Any, folder: Path, out: Path, **options: Any) -> Any:
    return predict(bundle, session, folder, out, PredictOptions(allow_uncertified=True, **options), quiet=True)


class NoModel(Session):
    """A session whose logits are computed beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self._logits = np.random.default_rng(0).normal(size=(4096, len(LABELS))).astype(np.float32)

    def _infer(self, images: UInt8Array) -> Any:
        return self._logits[: len(images)]

    def describe(self) -> dict[str, Any]:
        return {"runtime": "none"}


def bookkeeping(scratch: Path) -> dict[str, Any]:
    """The seconds that `predict` takes when reading, decoding and the model take none."""
    bundle = write_bundle(scratch / "tiny.vitx")
    listed = scratch / "names.txt"
    listed.write_text("".join(f"{index % 100:03d}/{index:06d}.png\n" for index in range(TINY)))
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    target = "vitx.predict.inputs.stores.read_bytes"
    reading = mock.patch(target, lambda location, stopped, found: b"")  # noqa: PT008  # a Mock records every call
    decoding = mock.patch.object(Preprocessing, "from_bytes", lambda self, data, draft: pixels)  # noqa: PT008  # likewise
    seconds, cpu = [], []
    with reading, decoding:
        for turn in range(3):
            start, used = time.perf_counter(), time.process_time()
            run_predict(bundle, NoModel(), listed, scratch / f"bookkeeping-{turn}", decode_threads=1)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    share = statistics.median(seconds) / 60
    found = {"images": TINY, "seconds": seconds, "processor_seconds": cpu, "share": share}
    return found | {"target": BOOKKEEPING_TARGET, "holds": share <= BOOKKEEPING_TARGET}


def one_job(core: int, jobs: int, bundle: Path, folder: Path, out: Path, ready: Any) -> tuple[float, float]:
    """In a process of its own on one core: when it began and ended."""
    bind(core)
    opened = Bundle.open(bundle)
    session = load_session(opened, device="cpu", threads=1)
    warm_up()
    ready.wait()
    start = time.monotonic()
    sizes: dict[str, Any] = {"batch_size": BATCH, "shard_size": 32, "decode_threads": 1}
    run_predict(opened, session, folder, out, shard=Share(core + 1, jobs), **sizes)
    return start, time.monotonic()


def processes(scratch: Path, bundle: Bundle, rounds: int = 3) -> dict[str, Any]:
    """Seconds from the common start to the end of the last; a shard is 32 images, so that the work divides evenly."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for count in turn_order((1, 2), turn):
            out = scratch / f"processes-{turn}-{count}"
            out.mkdir()
            times = together(one_job, count, count, bundle.path, scratch / "jpegs", out)
            seconds[count].append(max(end for _, end in times) - min(start for start, _ in times))
    ratio = statistics.median(one / two for one, two in zip(*seconds.values(), strict=True))
    found = {"images": JPEGS, "seconds": seconds, "ratio": ratio}
    return found | {"target": PROCESSES_TARGET, "holds": ratio >= PROCESSES_TARGET}


def list_paths(scratch: Path, count: int, result: Any) -> None:
    names = (f"{index * 7919 % count:09d}/photo of something.jpg" for index in range(count))
    start = time.perf_counter()
    with closing(Ledger(scratch / f"{count}.sqlite")) as ledger:
        ledger.find((name, None) for name in names)
        shards = image_shards(0, ledger.number(WHOLE)[0], 4096)
        read = sum(1 for shard in shards for _ in names_of(shard, ledger.path))
    result.put((read, time.perf_counter() - start, own_peak_bytes()))


def memory(scratch: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    found = {}
    for count in (100_000, 1_000_000):
        result = context.Queue()
        process = context.Process(target=list_paths, args=(scratch, count, result))
        process.start()
        read, seconds, peak = result.get()
        process.join()
        found[count] = {"read": read, "seconds": seconds, "largest_resident_mib": peak / 2**20}
    ratio = found[1_000_000]["largest_resident_mib"] / found[100_000]["largest_resident_mib"]
    return {"paths": found, "ratio": ratio, "target": MEMORY_TARGET, "holds": ratio <= MEMORY_TARGET}


PARTS = ("speed", "bookkeeping", "processes", "memory")


def main() -> int:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    options = parser.parse_args()
    found: dict[str, Any] = {}
    warm_up()
    memory_disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="vitx-predict-", dir=memory_disk if memory_disk.is_dir() else None) as name:
        scratch = Path(name)
        if {"speed", "processes"} & set(options.parts):
            write_jpegs(scratch / "jpegs", JPEGS)
            bundle = export_deit_tiny(scratch / "deit.vitx")
        if "speed" in options.parts:
            found["speed"] = speed(scratch, bundle)
        if "bookkeeping" in options.parts:
            found["bookkeeping"] = bookkeeping(scratch)
        if "processes" in options.parts:
            found["processes"] = processes(scratch, bundle)
        if "memory" in options.parts:
            found["memory"] = memory(scratch)
    print(json.dumps(found, indent=2))
    save_report({**report_header(), **found}, options.json)
    return 0 if all_hold(found) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
