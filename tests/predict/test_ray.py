"""`vitx predict --ray` on a cluster of two nodes, simulated on this machine: the same files as without Ray."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import LABELS, PREPROCESSING, colour_image, png, tar_of
from cli_fixture import Vitx
from ray_fixtures import gate_of, processes
from server_process import HANG, is_running, wait_until
from support.process_tree import family
from vitx.cli.options import _with_ray_address
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, VitxError
from vitx.core.files import sha256_file
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.ledger import Claim, Shard
from vitx.predict.options import PredictOptions
from vitx.predict.pipeline.worker import BATCHES_AHEAD, Job
from vitx.predict.ray import ATTEMPTS, CLAIM, RESULT, PredictionActor, RayPool
from vitx.runtimes import load_session

pytest.importorskip("ray")
# Ray Data reads the deprecated names of its own settings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")
BAD = 7  # every so many images is unreadable
IMAGES, SHARD = 840, 10
BEGUN = 3  # shards
CALLS = 2 * (1 + BATCHES_AHEAD)  # shards that an actor has at most: two a call, and a shard is no less than a batch
GATED = 420  # images: more than two actors have at most
IMAGE = png(colour_image(0, np.random.default_rng(1)))
ACTOR = b"ray::MapWorker(Map(PredictionActor))"


def write_images(folder: Path, names: list[str]) -> None:
    """In a new folder; every BAD one is unreadable."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    for index, name in enumerate(names):
        (folder / name).write_bytes(b"" if index % BAD == 0 else png(colour_image(index % 4, rng)))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of 840 paths to 28 files, four of them unreadable."""
    folder = tmp_path_factory.mktemp("paths") / "images"
    names = [f"ö {index:02d}.png" for index in range(4 * BAD)]
    write_images(folder, names)
    listed = folder / "all.txt"
    listed.write_text("".join(f"{names[index % len(names)]}\n" for index in range(IMAGES)))
    return listed


@pytest.fixture(scope="module")
def local(certified_original: Bundle, paths: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the same prediction without Ray."""
    out = tmp_path_factory.mktemp("local") / "out"
    session = load_session(certified_original, device="cpu", threads=1)
    predict(
        certified_original,
        session,
        paths,
        out,
        PredictOptions(shard_size=SHARD, batch_size=8, decode_threads=1),
        quiet=True,
    )
    return out


def on_ray(
    bundle: Bundle, source: Path, out: Path, address: str, actors: tuple[int, int] | None = None, **options: Any
) -> PredictionSummary:
    given: dict[str, Any] = {"ray": address, "ray_actors": actors, "device": "cpu", "runtime": "onnxruntime"}
    asked = PredictOptions(shard_size=SHARD, batch_size=8, threads=1, decode_threads=1, **given, **options)
    return predict(bundle, RayPool(bundle, asked), source, out, asked, quiet=True)


def command(bundle: Bundle, source: Path, out: Path, *more: str) -> list[str]:
    numbers = ("--shard-size", str(SHARD), "--batch", "8", "--threads", "1", "--decode-threads", "1")
    places = (str(bundle.path), str(source), "--out", str(out))
    return [sys.executable, "-m", "vitx", "predict", *places, *numbers, "--device", "cpu", "--quiet", *more]


def parts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / PREDICTIONS).iterdir()}


def counts(out: Path) -> dict[str, Any]:
    summary = json.loads((out / SUMMARY).read_text())
    return {name: summary[name] for name in ("images", "errors", "shards", "classes", "input", "bundle_sha256")}


def shards(out: Path) -> int:
    return len(list((out / PREDICTIONS).glob("part-*")))


def wait_for_shards(out: Path, count: int) -> None:
    """As long as a cluster takes to start where other tests have the cores."""
    wait_until(lambda: shards(out) >= count)


@contextmanager
def running(arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A driver in a process group of its own, which ends with the block if it has not before."""
    driver = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with driver:
        try:
            yield driver
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)


def test_rows_are_those_without_ray(certified_original: Bundle, ray_cluster: str, tmp_path: Path) -> None:
    """Although the run was begun without Ray and an actor is killed, the files are the same to the byte.

    Whatever an actor reads it is given here, so that each of them has some of the work however slow the others are.
    """
    out, local, listed = tmp_path / "out", tmp_path / "local", tmp_path / "all.txt"
    write_images(folder := tmp_path / "images", [f"{index:02d}.png" for index in range(4 * BAD)])
    killed: list[int] = []
    with gate_of(folder) as gate:
        listed.write_text(
            "".join(f"http://127.0.0.1:{gate.server_port}/{n % (4 * BAD):02d}.png\n" for n in range(GATED))
        )
        gate.leaves.release(GATED)
        finish_locally(certified_original, listed, local)
        shutil.copytree(local, out)
        for path in sorted((out / PREDICTIONS).iterdir())[BEGUN:]:
            path.unlink()

        def kill_one() -> None:
            wait_until(lambda: len(found := processes(ACTOR)) == 2 and all(map(gate.is_asked_by, found)))
            first, *others = processes(ACTOR)
            for other in others:
                os.kill(other, signal.SIGSTOP)
            gate.leaves.release(CALLS * SHARD)  # so many shards at most are done by the first one: at least one
            try:
                wait_for_shards(out, BEGUN + 1)
                os.kill(first, signal.SIGKILL)
                killed.append(first)
                wait_until(lambda: not {first, *others}.issuperset(processes(ACTOR)))
                gate.leaves.release(4 * GATED)
                wait_for_shards(out, BEGUN + CALLS + 1)  # the last one by the replacement
            finally:
                for other in others:
                    os.kill(other, signal.SIGCONT)

        killer = threading.Thread(target=kill_one)
        killer.start()
        summary = on_ray(certified_original, listed, out, ray_cluster)
        killer.join()
    assert parts(out) == parts(local)
    assert counts(out) == counts(local)
    assert summary.images == GATED
    assert summary.errors == len(range(0, GATED, BAD))
    assert summary.images_here == GATED - BEGUN * SHARD
    assert summary.runtime["nodes"] == 2
    assert summary.runtime["actors"] == 3  # one was killed and replaced
    assert summary.runtime["provider"] == "CPUExecutionProvider"
    assert 0 < summary.stages["decode"] <= 1
    assert killed


def test_run_that_was_killed_is_finished_locally(
    certified_original: Bundle, paths: Path, local: Path, ray_cluster: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with running(command(certified_original, paths, out, "--ray", ray_cluster, "--ray-actors", "1")) as driver:
        wait_for_shards(out, 3)
        driver.kill()
    done = sum(name[0] != "." for name in parts(out))  # the last file may be renamed but not recorded yet
    assert 3 <= done < IMAGES // SHARD
    # At once: its actors may live for a moment, but only the driver could have given their files a name.
    assert finish_locally(certified_original, paths, out).images_here == IMAGES - done * SHARD
    assert {name: data for name, data in parts(out).items() if name[0] != "."} == parts(local)
    wait_until(lambda: not processes(ACTOR))  # they end with their driver


def test_interrupted_run_ends_its_cluster_and_goes_on(
    certified_original: Bundle, paths: Path, local: Path, tmp_path: Path
) -> None:
    """Without an address the command starts a cluster of its own and ends it."""
    out = tmp_path / "out"
    with running(command(certified_original, paths, out, "--ray", "--ray-actors", "1")) as driver:
        wait_for_shards(out, 3)
        assert processes(b"/raylet/raylet", driver.pid)
        cluster = [pid for pid in family(driver.pid) if pid != driver.pid]
        os.killpg(driver.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        _, errors = driver.communicate(timeout=HANG)
    assert driver.returncode == 130, errors
    assert "Traceback" not in errors
    assert not list((out / PREDICTIONS).glob(".part-*"))
    wait_until(lambda: not any(map(is_running, cluster)))
    finish_locally(certified_original, paths, out)
    assert parts(out) == parts(local)


def finish_locally(bundle: Bundle, source: Path, out: Path) -> PredictionSummary:
    session = load_session(bundle, device="cpu", threads=1)
    return predict(bundle, session, source, out, PredictOptions(shard_size=SHARD, batch_size=8), quiet=True)


def test_strict_stops_with_the_first_unreadable_image(
    certified_original: Bundle, paths: Path, ray_cluster: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckFailed, match=r"^unreadable image ö \d+\.png: not an image: empty; without --strict"):
        on_ray(certified_original, paths, tmp_path / "out", ray_cluster, (1, 1), strict=True)
    assert not any((tmp_path / "out" / PREDICTIONS).glob(".part-*"))


JOB = Job(
    out=Path("out"),
    listing=Path("out/images"),
    base="",
    labels=LABELS,
    preprocessing=PREPROCESSING,
    options=PredictOptions(batch_size=8),
    read_threads=1,
    decode_threads=1,
    certified=True,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"out": Path("/absent/out"), "listing": Path("/absent/images")},
            r"it does not see the output folder '.*out' of this machine: with --r",
        ),
        ({"bundle": Path("/absent.vitx")}, r"does not see the bundle '/absent\.vitx' of this machine"),
        ({"sample": "/absent/1.png"}, r"does not see the input '/absent/1\.png' of this machine"),
        (
            {"footer": {"vitx.bundle_sha256": "0"}},
            r"its bundle '.*tiny\.vitx' differs from this machine's: give every",
        ),
        ({"options": PredictOptions(runtime="tensorrt")}, r"tensorrt"),
        ({"versions": {"absent": "1", "pillow": "0"}}, r"its pillow is [\d.]+, and this machine's is 0: install the s"),
    ],
)
def test_node_that_does_not_see_the_files_or_lacks_a_package(
    certified_original: Bundle, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    listing = tmp_path / "images"
    listing.write_bytes(b"none.png\0")
    given: dict[str, Any] = {"out": tmp_path, "listing": listing, "bundle": certified_original.path, "sample": None}
    given |= {"footer": {"vitx.bundle_sha256": sha256_file(certified_original.path / MANIFEST)}} | changes
    bundle, sample, versions = given.pop("bundle"), given.pop("sample"), given.pop("versions", {})
    actor = PredictionActor(replace(JOB, **given), bundle, sample, versions)
    result = actor({CLAIM: Claim(1, Shard("images", "", 0, 1))})[RESULT]
    assert isinstance(result, VitxError)
    assert re.search(f"^the node {re.escape(socket.gethostname())}: .*{message}", str(result))


def test_shard_that_kills_its_actors_is_given_up_and_the_others_done(
    certified_original: Bundle, ray_cluster: str, tmp_path: Path
) -> None:
    """The first tar file is a pipe: an actor that opens it waits, and is killed."""
    folder, out = tmp_path / "tars", tmp_path / "out"
    folder.mkdir()
    os.mkfifo(folder / "0.tar")
    for name in ("1.tar", "2.tar"):
        (folder / name).write_bytes(tar_of({"a.png": IMAGE}))

    def kill() -> None:
        with (folder / "0.tar").open("wb"):  # when an actor has opened it
            attempts = out / PREDICTIONS / ".part-00000001.parquet.attempts"
            with attempts.open("ab") as file:  # as if others had died before
                file.write(b"." * (ATTEMPTS - 1))
            for actor in processes(ACTOR):
                os.kill(actor, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(
        EnvironmentMissing, match=r"^10 actors died while working on each of 1 shard, such as Claim\(id=1"
    ):
        on_ray(certified_original, folder, out, ray_cluster, (1, 1))
    killer.join()
    assert sorted(parts(out)) == ["part-00000002.parquet", "part-00000003.parquet"]


def test_missing_ray_names_the_extra(
    tiny_bundle: Bundle, paths: Path, tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "vitx.predict.ray")
    code, _, err = vitx("predict", tiny_bundle.path, paths, "--out", tmp_path / "out", "--ray")
    assert (code, err) == (3, "error: this needs the package 'ray', which is not installed: pip install 'vitx[ray]'\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--ray", "--ray-actors", "4:2"),
            "--ray-actors 4:2: expected a number such as 4, or a least and a most such as 2:8",
        ),
        (("--ray", "--ray-actors", "many"), "--ray-actors many: expected a number such as 4, or"),
        (("--ray-actors", "4"), "--ray-actors 4 is for --ray: pass that too, or leave it out"),
        (("--ray", "ray://head:10001"), "--ray ray://head:10001: Ray Data does not run through a Ray client; run the"),
    ],
)
def test_wrong_options_are_refused(
    tiny_bundle: Bundle, paths: Path, tmp_path: Path, vitx: Vitx, options: tuple[str, ...], message: str
) -> None:
    code, _, err = vitx("predict", tiny_bundle.path, paths, "--out", tmp_path / "out", *options)
    assert code == 2
    assert message in err


def test_address_where_nothing_listens(certified_original: Bundle, paths: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=r"no Ray cluster at '127\.0\.0\.1:1': .*refused"):
        on_ray(certified_original, paths, tmp_path / "out", "127.0.0.1:1")


def test_too_large_actors_are_refused(
    certified_original: Bundle, paths: Path, ray_cluster: str, tmp_path: Path
) -> None:
    pool = RayPool(certified_original, PredictOptions(ray=ray_cluster, device="cpu", threads=64))
    with pytest.raises(EnvironmentMissing, match="an actor needs 64 CPUs, and the largest node of the cluster has 1"):
        predict(certified_original, pool, paths, tmp_path / "out", quiet=True)
    pool = RayPool(certified_original, PredictOptions(ray=ray_cluster, device="cuda"))
    with pytest.raises(EnvironmentMissing, match="needs 1 CPU and a GPU"):
        predict(certified_original, pool, paths, tmp_path / "out", quiet=True)


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (["b.vitx", "in", "--ray"], ["b.vitx", "in", "--ray=local"]),
        (["--ray", "b.vitx", "in"], ["--ray=local", "b.vitx", "in"]),
        (["--ray", "--quiet"], ["--ray=local", "--quiet"]),
        (["--ray", "auto", "in"], ["--ray", "auto", "in"]),
        (["--ray", "10.0.0.1:6379"], ["--ray", "10.0.0.1:6379"]),
        (["--ray", "ray://head:10001"], ["--ray", "ray://head:10001"]),
    ],
)
def test_ray_takes_an_address_or_none(given: list[str], understood: list[str]) -> None:
    assert _with_ray_address(given) == understood
