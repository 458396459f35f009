"""One process a run, with real processes: who comes second is refused, and who is killed leaves no lock behind."""

import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import colour_image, png
from cli_fixture import Vitx
from server_process import HANG, wait_until
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS
from vitx.predict.inputs.inventory import Inventory
from vitx.predict.ledger import Shard
from vitx.predict.options import PredictOptions, Share
from vitx.predict.pipeline.lock import LOCK, locked
from vitx.predict.state import LEDGER, STATE, open_ledger, open_run

COUNT, SHARD = 12, 2
REFUSED = "is writing to '{}': wait until it has ended, or stop it; for several processes give each a part of the input"
# Predicts with as many batches as there are lines on standard input; each shard is a batch. Begins with the first line.
PREDICT = f"""
import sys
from pathlib import Path
from bundle_fixture import NumpySession
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PredictOptions, predict
from vitx.predict.outputs.parts import warm_up

class Gated(NumpySession):
    def _infer(self, images):
        sys.stdin.readline()
        return super()._infer(images)

warm_up()
bundle = Bundle.open(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    predict(bundle, Gated(), sys.argv[2], Path(sys.argv[3]), PredictOptions(shard_size={SHARD}), quiet=True)
except InputError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for index in range(COUNT):
        (folder / f"{index:02d}.png").write_bytes(png(colour_image(index % 4, np.random.default_rng(index))))
    return folder


class Processes(list["subprocess.Popen[bytes]"]):
    def start(self, bundle: Bundle, images: Path, out: Path) -> "subprocess.Popen[bytes]":
        """Begins to predict when it is sent a line."""
        support = str(Path(__file__).parents[2] / "support")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([support, *sys.path])}
        command = [sys.executable, "-c", PREDICT, str(bundle.path), str(images), str(out)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
        self.append(process)
        return self[-1]


def send(process: "subprocess.Popen[bytes]", lines: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n" * lines)
    process.stdin.flush()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(processes: Processes, tiny_bundle: Bundle, images: Path, tmp_path: Path) -> "subprocess.Popen[bytes]":
    """A process that has finished two shards of six and waits in the third."""
    process = processes.start(tiny_bundle, images, tmp_path / "out")
    send(process, 3)
    wait_until(lambda: recorded(tmp_path / "out") == 2 or process.poll() is not None)
    return process


def parts(out: Path) -> list[str]:
    return sorted(path.name for path in (out / PREDICTIONS).glob("part-*"))


def recorded(out: Path) -> int:
    """Finished shards, by the ledger of a process that is at work."""
    try:
        with closing(sqlite3.connect(f"file:{out}/{STATE}/{LEDGER}?mode=ro", uri=True)) as ledger:
            return int(ledger.execute("SELECT count(digest) FROM shard").fetchone()[0])
    except sqlite3.OperationalError:  # there is none yet
        return 0


def rows(out: Path) -> list[str]:
    return sorted(pq.read_table(out / PREDICTIONS)["path"].to_pylist())


def content(out: Path) -> dict[str, bytes]:
    """Of the files; of the ledger only that it is there."""
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    return {name: b"" if LEDGER in name else path.read_bytes() for name, path in files.items()}


NAMES = [f"{index:02d}.png" for index in range(COUNT)]


def test_a_second_process_is_refused_also_while_the_first_is_stopped(
    holder: "subprocess.Popen[bytes]", tiny_bundle: Bundle, images: Path, tmp_path: Path, vitx: Vitx
) -> None:
    out = tmp_path / "out"
    given = ("predict", tiny_bundle.path, images, "--out", out, "--shard-size", SHARD, "--quiet", "--device", "cpu")
    before = content(out)
    said = f"error: process {holder.pid} on {socket.gethostname()} {REFUSED.format(out)}, by --shard I/N\n"
    assert vitx(*given) == (2, "", said)
    assert vitx(*given, "--overwrite") == (2, "", said)
    os.kill(holder.pid, signal.SIGSTOP)
    assert vitx(*given) == (2, "", said)
    assert vitx(*given, "--overwrite") == (2, "", said)
    os.kill(holder.pid, signal.SIGCONT)
    assert content(out) == before
    send(holder, COUNT)
    assert holder.wait(HANG) == 0
    assert rows(out) == NAMES


def test_after_a_kill_the_same_command_goes_on_at_once(
    holder: "subprocess.Popen[bytes]", tiny_bundle: Bundle, images: Path, tmp_path: Path, vitx: Vitx
) -> None:
    out = tmp_path / "out"
    holder.kill()
    holder.wait()
    left = content(out)
    given = ("predict", tiny_bundle.path, images, "--out", out, "--shard-size", SHARD, "--device", "cpu")
    code, said, error = vitx(*given, "--json")
    assert code == 0, error
    assert json.loads(said)["images_here"] == COUNT - 2 * SHARD
    assert "predict: 2 of 6 shards done and verified\n" in error
    assert rows(out) == NAMES
    assert not list((out / PREDICTIONS).glob(".*"))
    after = content(out)
    assert all(after[f"{PREDICTIONS}/{name}"] == left[f"{PREDICTIONS}/{name}"] for name in parts(out)[:2])


def test_of_two_that_start_at_the_same_moment_one_works(
    processes: Processes, tiny_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    both = [processes.start(tiny_bundle, images, out) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in both:
        send(process, 1)
    wait_until(lambda: any(process.poll() is not None for process in both))
    (winner,) = (process for process in both if process.poll() is None)
    (loser,) = (process for process in both if process.poll() is not None)
    assert loser.stderr is not None
    assert re.search(re.escape(REFUSED.format(out)), loser.stderr.read().decode())
    send(winner, COUNT)
    assert winner.wait(HANG) == 0
    assert rows(out) == NAMES


CHILDREN = """
import os, subprocess, sys
from pathlib import Path
from vitx.predict.pipeline.lock import locked
with locked(Path(sys.argv[1]), Path(sys.argv[1])):
    started = subprocess.Popen([sys.executable, "-c", "input()"], close_fds=False)
    ready, begun = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(begun, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
    print(started.pid, forked, flush=True)
    sys.stdin.read()
"""


def test_no_child_keeps_the_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    """Neither one that was forked nor a program that was started, though both live on."""
    command = [sys.executable, "-c", CHILDREN, str(tmp_path / "state")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        with pytest.raises(InputError, match=f"^process {process.pid} on "), locked(tmp_path / "state", tmp_path):
            pass
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED)
        try:
            with locked(tmp_path / "state", tmp_path):
                for child in children:
                    os.kill(child, 0)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_a_lock_is_held_within_the_block_alone(tmp_path: Path) -> None:
    with locked(tmp_path, tmp_path / "out"):
        assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        with (
            pytest.raises(InputError, match=rf"^process {os.getpid()} on .* is writing to '{tmp_path}/out': wait "),
            locked(tmp_path, tmp_path / "out"),
        ):
            pass
        (tmp_path / LOCK).write_bytes(b"")  # as its holder leaves it for a moment
        with pytest.raises(InputError, match=r"^another process is writing to "), locked(tmp_path, tmp_path / "out"):
            pass
    with locked(tmp_path, tmp_path):
        pass


def test_a_lock_that_is_removed_before_it_is_taken_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a process that made the folder, found no input, and removes it again."""
    take, removed = fcntl.flock, list[Path]()

    def slow(file: io.FileIO, how: int) -> None:
        if not removed:
            shutil.rmtree(tmp_path / "state")
            removed.append(tmp_path)
        take(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with (
        locked(tmp_path / "state", tmp_path),
        pytest.raises(InputError, match="is writing to"),
        locked(tmp_path / "state", tmp_path),
    ):
        pass
    assert removed


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        pytest.raises(InputError, match=rf"^the file system of '{tmp_path}' has no locks \(No locks available\), and "),
        locked(tmp_path, tmp_path),
    ):
        pass


def opened(out: Path, **options: Any) -> Any:
    return open_ledger(out, PredictOptions(**options))


def overwrite(out: Path) -> None:
    with opened(out, overwrite=True) as ledger:
        open_run(ledger, out, {"input": "a.tar"}, lambda share: Inventory("", (Shard("tar", "a.tar"),)))


def test_overwriting_is_refused_while_a_job_of_several_works(tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS).mkdir()
    with opened(tmp_path, shard=Share(1, 2)), opened(tmp_path, shard=Share(2, 2)):
        (tmp_path / STATE / "shards.json").touch()
        (tmp_path / PREDICTIONS / "part-00000001.parquet").touch()
        before = content(tmp_path)
        with pytest.raises(InputError, match="is writing to"), opened(tmp_path, overwrite=True):
            pass
        with pytest.raises(InputError, match="is writing to"), opened(tmp_path, shard=Share(1, 2)):
            pass
        after = content(tmp_path)
        assert after.pop(f"{STATE}/{LOCK}")
        assert after == before
    overwrite(tmp_path)
    assert not list((tmp_path / STATE).glob("shard*"))
    assert not list((tmp_path / PREDICTIONS).iterdir())


def test_overwriting_leaves_the_lock_in_its_place(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    before = (tmp_path / STATE / LOCK).stat().st_ino
    overwrite(tmp_path)
    assert (tmp_path / STATE / LOCK).stat().st_ino == before
