"""Workers of `vitx predict` that are killed, put to sleep beyond their leases, and left without disk: every image once.

    python benchmarks/predict/chaos.py [--images 20000] [--seeds 0,1,2] [--json FILE]

Ten processes share a folder of tiny images, one in 97 of them unreadable. At random moments one is killed (SIGKILL) and
replaced, or stopped until another has its shard and then woken, so that two work on it; and the disk is filled twice
for a while (a small tmpfs: needs the right to mount; said in the result). The sessions are slowed down, so that there
are shards to be interrupted. Exit code 1 when a row is missing, double or wrong.
"""

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import LABELS, NumpySession, colour_image, png, write_bundle
from support.targets import command_line, report_header, save_report
from vitx.core.bundle import Bundle
from vitx.core.preprocess import UInt8Array
from vitx.predict import PREDICTIONS, SUMMARY, predict
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import warm_up
from vitx.runtimes import Session, load_session

# Imported once by the process that forks the workers: a new worker starts in a tenth of a second.
warm_up()
WORKERS, BATCH, SHARD, LEASE = 10, 16, 64, 1.0
UNREADABLE_EVERY = 97
SECONDS_A_BATCH = 0.02
DEADLINE = 240.0


class SlowSession(Session):
    """The bundle's session, and a while for each batch."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self._session = load_session(bundle, device="cpu", threads=1)

    def _infer(self, images: UInt8Array) -> Any:
        time.sleep(SECONDS_A_BATCH)
        return self._session.infer(images)

    def describe(self) -> dict[str, Any]:
        return self._session.describe()


def work(bundle: Path, folder: Path, out: Path) -> None:
    opened = Bundle.open(bundle)
    options: dict[str, Any] = {"batch_size": BATCH, "shard_size": SHARD, "top_k": 2, "decode_threads": 1}
    options |= {"lease_seconds": LEASE, "allow_uncertified": True}
    predict(opened, SlowSession(opened), folder, out, PredictOptions(**options), quiet=True)


def write_images(folder: Path, count: int) -> dict[str, str | None]:
    """Write `count` images of 64 contents; return the class that each must get, None for an unreadable one."""
    rng = np.random.default_rng(0)
    pixels = [colour_image(index % 4, rng) for index in range(64)]
    classes = [LABELS[index] for index in NumpySession().infer(np.stack(pixels)).argmax(axis=1)]
    encoded = [png(one) for one in pixels]
    expected: dict[str, str | None] = {}
    for index in range(count):
        path = folder / f"{index // 500:03d}" / f"ö {index:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        bad = index % UNREADABLE_EVERY == 0
        path.write_bytes(b"" if bad else encoded[index % 64])
        expected[path.relative_to(folder).as_posix()] = None if bad else classes[index % 64]
    return expected


@contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[bool]:
    """Mount a tmpfs at `path`, where this process may; yield whether it could."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(path)]
    mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def is_done(ledger: Path) -> bool:
    if not ledger.exists():
        return False
    # Never waits: the worker that holds the lock may be stopped, and this process has to wake it.
    with closing(sqlite3.connect(ledger, timeout=0)) as database, suppress(sqlite3.OperationalError):
        # A ledger that was made a moment ago has no shards yet, and is not done.
        shards, finished = database.execute("SELECT count(*), count(digest) FROM shard").fetchone()
        return bool(0 < shards == finished)
    return False


class Chaos:
    """Ten workers and what happens to them."""

    def __init__(self, bundle: Path, folder: Path, out: Path, seed: int, *, full_disks: int) -> None:
        self._arguments = (bundle, folder, out)
        self._out, self._random = out, random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["chaos", "onnxruntime"])
        # The server is begun by the first worker, and finds the module only so.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        self._asleep: dict[int, float] = {}
        self._ballast = out / "ballast"
        self._full_until = 0.0
        self._full_disks = full_disks
        self.events: Counter[str] = Counter()
        self.workers = [self._start() for _ in range(WORKERS)]

    def run(self) -> None:
        """Until every shard is done; raise TimeoutError when that takes too long, RuntimeError if a worker fails."""
        deadline = time.monotonic() + DEADLINE
        try:
            while self._full_until or not is_done(self._out / ".vitx" / "ledger.sqlite"):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done after {DEADLINE} s: {dict(self.events)}")
                time.sleep(self._random.uniform(0.05, 0.25))
                self._wake()
                self._replace_dead()
                self._disk()
                with suppress(ProcessLookupError):  # it ended by itself, and nobody here knows it yet
                    self._strike()
            self._ballast.unlink(missing_ok=True)
            self._wake(everyone=True)
            for worker in self.workers:
                worker.join(30)
        finally:
            self._ballast.unlink(missing_ok=True)
            for worker in self.workers:
                worker.kill()
                worker.join()

    def _start(self) -> ForkServerProcess:
        worker = self._context.Process(target=work, args=self._arguments, daemon=True)
        worker.start()
        return worker

    def _strike(self) -> None:
        worker = self._random.choice(self.workers)
        if worker.pid is None or not worker.is_alive():
            return
        if self._random.random() < 0.75:
            self._asleep.pop(worker.pid, None)
            os.kill(worker.pid, signal.SIGKILL)
            self.events["killed"] += 1
        elif worker.pid not in self._asleep:
            os.kill(worker.pid, signal.SIGSTOP)
            self._asleep[worker.pid] = time.monotonic() + self._random.uniform(LEASE, 2 * LEASE)
            self.events["slept beyond the lease"] += 1

    def _wake(self, *, everyone: bool = False) -> None:
        for process, until in list(self._asleep.items()):
            if everyone or time.monotonic() >= until:
                del self._asleep[process]
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def _replace_dead(self) -> None:
        for place, worker in enumerate(self.workers):
            if not worker.is_alive():
                if worker.exitcode not in (0, -signal.SIGKILL):
                    raise RuntimeError(f"a worker ended with {worker.exitcode}")
                self.workers[place] = self._start()

    def _disk(self) -> None:
        now = time.monotonic()
        if self._full_until and now > self._full_until:
            self._ballast.unlink()
            self._full_until = 0.0
        elif self._full_disks and self._random.random() < 0.2 and (self._out / PREDICTIONS).exists():
            self._full_disks -= 1
            self._full_until = now + self._random.uniform(0.5, 1.5)
            self.events["disk full"] += 1
            with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))


def check(out: Path, expected: dict[str, str | None]) -> dict[str, int]:
    """Count what is not as it must be: all zeros when every image is in the output once, with its class."""
    rows = pq.read_table(out / PREDICTIONS, columns=["path", "class", "error"]).to_pylist()
    times = Counter(row["path"] for row in rows)
    summary = json.loads((out / SUMMARY).read_text())
    return {
        "missing": len(expected.keys() - times.keys()),
        "double": sum(count - 1 for count in times.values()),
        "unknown": len(times.keys() - expected.keys()),
        "wrong": sum(expected.get(row["path"]) != row["class"] for row in rows),
        "errors_without_reason": sum(row["class"] is None and not row["error"] for row in rows),
        "temporary_files": len(list((out / PREDICTIONS).glob(".*"))),
        "summary": abs(summary["images"] - len(expected)) + abs(summary["errors"] - unreadable(expected)),
    }


def unreadable(expected: dict[str, str | None]) -> int:
    return sum(name is None for name in expected.values())


def chaos(images: int, seed: int, scratch: Path) -> dict[str, Any]:
    """One run; the result names what happened to the workers, and what was wrong in the output."""
    expected = write_images(scratch / "images", images)
    bundle = write_bundle(scratch / "tiny.vitx")
    started = time.perf_counter()
    out = scratch / "disk" / "out"
    with small_disk(scratch / "disk", 16) as mounted:
        out.mkdir()
        run = Chaos(bundle.path, scratch / "images", out, seed, full_disks=2 if mounted else 0)
        run.run()
        # The last worker may have been killed before it wrote the summary.
        work(bundle.path, scratch / "images", out)
        wrong = check(out, expected)
    seconds = time.perf_counter() - started
    return {"images": images, "seed": seed, "seconds": seconds, "events": dict(+run.events), "wrong": wrong}


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    runs = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="vitx-chaos-") as scratch:
            runs.append(chaos(options.images, seed, Path(scratch)))
        print(json.dumps(runs[-1]), flush=True)
    save_report({**report_header(), "chaos": runs}, options.json)
    sys.exit(any(count for run in runs for count in run["wrong"].values()))


if __name__ == "__main__":
    main()
