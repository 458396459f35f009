"""`vitx predict --incremental` from and to S3 while it is killed again and again: every key once, and only whole parts.

    pip install 'moto[server]' s3fs
    python benchmarks/predict/s3.py [--images 600] [--seed 0] [--json FILE]

The process is killed (SIGKILL) at random moments and started again at once, three times over: after each round objects
of the input are changed, added and removed, and some objects of the output are removed. Meanwhile the output is
listed again and again, and every part that is there is read. The server is moto's, an S3 in memory. Exit code 1 when a
row is missing, double, old or wrong, or a part was not whole.
"""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import SlowSession

from bundle_fixture import LABELS, NumpySession, colour_image, png, write_bundle
from support.process_tree import require_running
from support.targets import at_least, command_line, exit_code, report_header, require_package, save_report
from vitx.core.bundle import Bundle
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.options import PredictOptions

BATCH, SHARD, ROUNDS = 16, 32, 3
SOURCE, OUT = "s3://bucket/images", "s3://bucket/results"
DEADLINE = 240.0


def work(bundle: Path, state: Path) -> PredictionSummary:
    opened = Bundle.open(bundle)
    options: dict[str, Any] = {"batch_size": BATCH, "shard_size": SHARD, "decode_threads": 1}
    options |= {"allow_uncertified": True, "incremental": True, "state": state}
    return predict(opened, SlowSession(opened), SOURCE, OUT, PredictOptions(**options), quiet=True)


class Input:
    """Objects of the input. expected: the class of each that was ever there, by key."""

    def __init__(self, store: Any, seed: int) -> None:
        self._store, self._random = store, random.Random(seed)
        pixels = [colour_image(index % 4, np.random.default_rng(index)) for index in range(64)]
        self._classes = [LABELS[index] for index in NumpySession().infer(np.stack(pixels)).argmax(axis=1)]
        self._images = [png(one) for one in pixels]
        self.expected: dict[str, str] = {}
        self.present: set[str] = set()

    def put(self, key: str) -> None:
        content = self._random.choice([index for index in range(64) if self._classes[index] != self.expected.get(key)])
        self._store.pipe_file(f"{SOURCE}/{key}", self._images[content])
        self.expected[key] = self._classes[content]
        self.present.add(key)

    def change(self, count: int) -> dict[str, int]:
        """Add `count` objects; if there are some, change and remove as many, without a word to the output."""
        changed = self._random.sample(sorted(self.present), min(count, len(self.present)))
        for key in changed[: count // 2]:
            self.put(key)
        for key in changed[count // 2 :]:
            self._store.rm_file(f"{SOURCE}/{key}")
            self.present.remove(key)
        for index in range(count):
            self.put(f"{index % 7}/{len(self.expected):05d} ö.png")
        return {"changed": len(changed[: count // 2]), "gone": len(changed[count // 2 :]), "new": count}


class Watcher(threading.Thread):
    """Reads every part that a listing shows, as long as it runs."""

    def __init__(self, store: Any) -> None:
        super().__init__(daemon=True)
        self._store, self.stopped = store, threading.Event()
        self.looks = self.torn = 0

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            self._store.invalidate_cache()
            with suppress(FileNotFoundError):
                for path in self._store.ls(f"{OUT}/{PREDICTIONS}", detail=False):
                    self.looks += 1
                    try:
                        # By one GET: a file that is opened notices that the object was replaced since, and refuses.
                        pq.read_table(io.BytesIO(self._store.cat_file(path)))
                    except Exception as error:  # noqa: BLE001  # whatever it is, it is counted
                        self.torn += 1
                        print(f"{path}: {error}", file=sys.stderr)


def kill_until_done(arguments: list[str], chance: random.Random) -> int:
    """Run the command until every shard is done; return how often it was killed."""
    killed, deadline = 0, time.monotonic() + DEADLINE
    while True:
        worker = subprocess.Popen(arguments)
        try:
            worker.wait(chance.uniform(1.0, 4.0) if killed < 8 else deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            if killed == 8:
                raise TimeoutError(f"not done after {DEADLINE} s") from None
        finally:
            worker.kill()
            worker.wait()
        if worker.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"it ended with {worker.returncode}")
        if worker.returncode == 0:
            return killed
        killed += 1


def check(store: Any, source: Input) -> dict[str, int]:
    """What is not as it must be: all zeros."""
    store.invalidate_cache()
    rows = []
    for path in store.ls(f"{OUT}/{PREDICTIONS}", detail=False):
        with store.open(path) as file:
            rows += pq.read_table(file, columns=["path", "class"]).to_pylist()
    times = Counter(row["path"] for row in rows)
    summary = json.loads(store.cat_file(f"{OUT}/{SUMMARY}"))
    return {
        "missing": len(source.expected.keys() - times.keys()),
        "double": sum(count - 1 for count in times.values()),
        "unknown": len(times.keys() - source.expected.keys()),
        "old or wrong": sum(source.expected.get(row["path"]) != row["class"] for row in rows),
        "summary": abs(summary["images"] - len(source.expected)) + (not summary["complete"]),
    }


def attack(images: int, seed: int, scratch: Path) -> list[dict[str, Any]]:
    import s3fs

    store = s3fs.S3FileSystem()
    store.mkdir("bucket")
    bundle, source, chance = write_bundle(scratch / "tiny.vitx"), Input(store, seed), random.Random(seed)
    state, found = scratch / "state", []
    arguments = [sys.executable, __file__, "--work", str(bundle.path), str(state)]
    for index in range(ROUNDS):
        change = source.change(images if index == 0 else images // 10)
        if index:
            store.invalidate_cache()
            parts = store.ls(f"{OUT}/{PREDICTIONS}", detail=False)
            for path in chance.sample(parts, min(3, len(parts))):
                store.rm_file(path)
        watcher = Watcher(store)
        watcher.start()
        killed = kill_until_done(arguments, chance)
        summary = work(bundle.path, state)
        watcher.stopped.set()
        watcher.join()
        wrong = check(store, source) | {"torn": watcher.torn}
        found.append({"change": change, "killed": killed, "parts read": watcher.looks, "wrong": wrong})
        print(json.dumps(found[-1]), summary.increment, flush=True)
    return found


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--images", type=at_least(1), default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("moto", "s3fs"):
        require_package(name, "pip install 'moto[server]' s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", port], stderr=subprocess.DEVNULL, text=True)
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                break
            time.sleep(0.1)
        require_running(server, "moto's server")
        with tempfile.TemporaryDirectory(prefix="vitx-s3-") as scratch:
            rounds = attack(options.images, options.seed, Path(scratch))
    finally:
        server.kill()
        server.wait()
    save_report({**report_header(), "s3": rounds}, options.json)
    return int(any(count for one in rounds for count in one["wrong"].values()))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
