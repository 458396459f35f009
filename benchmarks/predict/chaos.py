"""`vitx predict` that is killed, stopped, left without disk, and started beside itself: every image once.

    python benchmarks/predict/chaos.py [--images 20000] [--seeds 0,1,2] [--slow SECONDS] [--json FILE]

A process predicts a folder of tiny images, one in 97 of them unreadable. At random moments it is killed (SIGKILL) and
started again at once, or stopped for a while and woken; meanwhile others are started on the same output, half of them
with --overwrite, all of which must be refused; and the disk is filled twice for a while (a small tmpfs: needs the right
to mount; said in the result), on which the process must end with one error, and go on when there is room. The sessions
are slowed down, so that there are shards to be interrupted; --slow makes each process start and end slower, as on a
busy machine. Exit code 1 when a row is missing, double or wrong.
"""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import UInt8Array
from vitx.predict import PREDICTIONS, SUMMARY, predict
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import warm_up
from vitx.predict.pipeline.lock import LOCK
from vitx.predict.state import STATE
from vitx.runtimes import Session, load_session

# Imported once by the process that forks the workers: a new worker starts in a tenth of a second.
warm_up()
BATCH, SHARD = 16, 64
UNREADABLE_EVERY = 97
SECONDS_A_BATCH = 0.02
# Without a new part.
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


def work(bundle: Path, folder: Path, out: Path, slow: float, overwrite: bool = False) -> None:
    """With exit code 2 if it is refused, 3 if the disk is full."""
    time.sleep(slow)
    opened = Bundle.open(bundle)
    options: dict[str, Any] = {"batch_size": BATCH, "shard_size": SHARD, "top_k": 2, "decode_threads": 1}
    options |= {"overwrite": overwrite, "allow_uncertified": True}
    try:
        predict(opened, SlowSession(opened), folder, out, PredictOptions(**options), quiet=True)
    except InputError as error:
        print(error, file=sys.stderr)
        full = "No space left on device" in str(error)
        sys.exit(2 if "is writing to" in str(error) else 3 if full else 1)
    except EnvironmentMissing as error:
        print(error, file=sys.stderr)
        sys.exit(3 if "is full" in str(error) else 1)
    finally:
        time.sleep(slow)


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


class Chaos:
    """A worker and what happens to it."""

    def __init__(self, bundle: Path, folder: Path, out: Path, seed: int, *, full_disks: int, slow: float) -> None:
        self._arguments = (bundle, folder, out, slow)
        self._out, self._random = out, random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["chaos", "onnxruntime"])
        # The server is begun by the first worker, and finds the module only so.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        self._ballast = out / "ballast"
        self._full_until = 0.0
        self._full_disks = full_disks
        self.events: Counter[str] = Counter()
        # Parts when a worker was killed last, and whether there were as many when the one before it was killed.
        self._parts, self._in_vain = 0, False
        self._worker = self._start()

    def run(self) -> None:
        """Until every shard is done; raise TimeoutError when that takes too long, RuntimeError if a worker fails."""
        deadline, before = time.monotonic() + DEADLINE, 0
        try:
            while self._full_until or self._worker.exitcode != 0:
                if (made := self._made()) > before:
                    deadline, before = time.monotonic() + DEADLINE, made
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no new part in {DEADLINE} s: {dict(self.events)}")
                self._worker.join(self._random.uniform(0.1, 1.0))
                self._disk()
                self._strike()
        finally:
            self._ballast.unlink(missing_ok=True)
            self._worker.kill()
            self._worker.join()

    def _start(self, *, overwrite: bool = False) -> ForkServerProcess:
        worker = self._context.Process(target=work, args=(*self._arguments, overwrite), daemon=True)
        worker.start()
        return worker

    def _strike(self) -> None:
        if self._worker.exitcode == 3 and self.events["disk full"]:
            self.events["ended by the full disk"] += 1
            self._worker = self._start()
        elif self._worker.exitcode is not None:
            if self._worker.exitcode not in (0, -signal.SIGKILL):
                raise RuntimeError(f"the worker ended with {self._worker.exitcode}")
        elif not self.events["killed"] or self._random.random() < 0.6:
            self._kill()
        else:
            self._stop()
            if self._holds():
                rival = self._start(overwrite=self._random.random() < 0.5)
                rival.join()
                if rival.exitcode != 2:
                    raise RuntimeError(f"a second process was not refused: {rival.exitcode}")
                self.events["stopped, and another refused"] += 1
            self._send(signal.SIGCONT)
        if self._worker.exitcode == -signal.SIGKILL:
            self._worker = self._start()

    def _kill(self) -> None:
        """Kill the worker, unless the last two made no part between them: a slow machine would never be done."""
        made = self._made()
        in_vain = made == self._parts
        if in_vain and self._in_vain:
            return
        self._worker.kill()
        self._worker.join()
        self._parts, self._in_vain = made, in_vain
        self.events["killed"] += 1

    def _made(self) -> int:
        return len(list((self._out / PREDICTIONS).glob("part-*")))

    def _stop(self) -> None:
        """Return when the worker is stopped, which it need not be yet when the signal is sent; it may have ended."""
        self._send(signal.SIGSTOP)
        with suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{self._worker.pid}/stat").read_text().rpartition(") ")[2][0] not in "TZX":
                time.sleep(0.001)

    def _send(self, number: int) -> None:
        assert self._worker.pid is not None
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self._worker.pid, number)

    def _holds(self) -> bool:
        """Whether the worker, which is stopped, has the lock; it may have been starting, or ending."""
        with suppress(FileNotFoundError), (self._out / STATE / LOCK).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

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


def chaos(images: int, seed: int, scratch: Path, slow: float = 0.0) -> dict[str, Any]:
    """One run; the result names what happened to the workers, and what was wrong in the output."""
    expected = write_images(scratch / "images", images)
    bundle = write_bundle(scratch / "tiny.vitx")
    started = time.perf_counter()
    out = scratch / "disk" / "out"
    with small_disk(scratch / "disk", 16) as mounted:
        out.mkdir()
        run = Chaos(bundle.path, scratch / "images", out, seed, full_disks=2 if mounted else 0, slow=slow)
        run.run()
        wrong = check(out, expected)
    seconds = time.perf_counter() - started
    return {"images": images, "seed": seed, "seconds": seconds, "events": dict(+run.events), "wrong": wrong}


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--slow", type=float, default=0.0)
    options = parser.parse_args()
    runs = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="vitx-chaos-") as scratch:
            runs.append(chaos(options.images, seed, Path(scratch), options.slow))
        print(json.dumps(runs[-1]), flush=True)
    save_report({**report_header(), "chaos": runs}, options.json)
    sys.exit(any(count for run in runs for count in run["wrong"].values()))


if __name__ == "__main__":
    main()
