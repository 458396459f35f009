"""Several machines with one output folder and a ledger in PostgreSQL; here each machine is a process."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, png
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.options import PredictOptions
from vitx.runtimes import load_session

if TYPE_CHECKING:
    from postgres_server import PostgresServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(60):
        (folder / f"{index:02d}.png").write_bytes(png(colour_image(index % 4, rng)))
    return folder


def run(bundle: Bundle, folder: Path, out: Path, **options: Any) -> PredictionSummary:
    session = load_session(bundle, device="cpu", threads=1)
    return predict(
        bundle, session, folder, out, PredictOptions(**{"shard_size": 5, "decode_threads": 1} | options), quiet=True
    )


def paths(out: Path) -> list[str]:
    return sorted(pq.read_table(out / PREDICTIONS, columns=["path"])["path"].to_pylist())


def test_machines_share_the_work(tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer") -> None:
    out = tmp_path / "out"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "vitx",
        "predict",
        tiny_bundle.path,
        photos,
        "--out",
        out,
        "--device",
        "cpu",
    ]
    command += ["--ledger", postgres.url, "--shard-size", "2", "--decode-threads", "1", "--threads", "1", "--json"]
    machines = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    answers = [machine.communicate(timeout=60) for machine in machines]
    assert [machine.returncode for machine in machines] == [0] * 2, answers
    assert paths(out) == sorted(path.name for path in photos.iterdir())
    assert json.loads((out / SUMMARY).read_text())["images"] == 60
    assert postgres.run("SELECT count(*), sum(attempts) FROM vitx_shard WHERE run = %s", str(out)) == [(30, 30)]
    assert [path.name[:7] for path in (out / ".vitx").iterdir()] == ["images-"]
    postgres.run("DELETE FROM vitx_shard WHERE run = %s", str(out))


def test_a_stopped_run_goes_on_and_a_finished_one_is_verified(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    out = tmp_path / "out"
    first = run(tiny_bundle, photos, out, ledger_url=postgres.url)
    assert (first.images, first.images_here) == (60, 60)
    (out / PREDICTIONS / "part-00000003.parquet").unlink()
    assert run(tiny_bundle, photos, out, ledger_url=postgres.url).images_here == 5
    assert len(paths(out)) == 60
    again = run(tiny_bundle, photos, out, ledger_url=postgres.url, overwrite=True, top_k=1)
    assert again.images_here == 60


def test_runs_are_told_apart_by_their_folder(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    for name in ("a", "b"):
        assert run(tiny_bundle, photos, tmp_path / name, ledger_url=postgres.url, top_k=1).images_here == 60
    with pytest.raises(InputError, match="another run: top_k was 1, is 2 now"):
        run(tiny_bundle, photos, tmp_path / "a", ledger_url=postgres.url, top_k=2)


def test_a_folder_of_the_same_name_that_is_not_shared_is_refused(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    """Two machines with local disks: the same path and run name, but different folders."""
    name = str(tmp_path)
    run(tiny_bundle, photos, tmp_path / "here", ledger_url=postgres.url, run_name=name)
    there = tmp_path / "there"
    pattern = (
        rf"there' is not the folder in which the run '{name}' was created \(.vitx/images-\w+ is not there\): --out"
    )
    with pytest.raises(InputError, match=pattern):
        run(tiny_bundle, photos, there, ledger_url=postgres.url, run_name=name)
    assert not there.exists()


def test_machines_may_mount_the_folder_elsewhere(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    (tmp_path / "mnt").symlink_to(tmp_path)
    name = f"named {tmp_path}"
    assert run(tiny_bundle, photos, tmp_path / "out", ledger_url=postgres.url, run_name=name).images_here == 60
    joined = run(tiny_bundle, photos, tmp_path / "mnt" / "out", ledger_url=postgres.url, run_name=name)
    assert joined.images_here == 60  # the summary is still that of the process which did the work
    assert len(paths(tmp_path / "out")) == 60


def test_a_folder_keeps_its_kind_of_ledger(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    run(tiny_bundle, photos, tmp_path / "local")
    with pytest.raises(InputError, match=r"of a run that is not '.*local' of the ledger: choose another folder, or"):
        run(tiny_bundle, photos, tmp_path / "local", ledger_url=postgres.url)
    run(tiny_bundle, photos, tmp_path / "shared", ledger_url=postgres.url)
    with pytest.raises(InputError, match="choose another folder, or pass --overwrite, or its --ledger"):
        run(tiny_bundle, photos, tmp_path / "shared")
    run(tiny_bundle, photos, tmp_path / "local", ledger_url=postgres.url, overwrite=True)
    assert len(paths(tmp_path / "local")) == 60


def test_a_run_that_is_removed_meanwhile_does_not_look_finished(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    class Removing(NumpySession):
        def _infer(self, images: Any) -> Any:
            postgres.run("DELETE FROM vitx_plan WHERE run = %s", str(out))
            postgres.run("DELETE FROM vitx_shard WHERE run = %s", str(out))
            return super()._infer(images)

    with pytest.raises(EnvironmentMissing, match=r"the run '.*out' is no longer in the ledger"):
        predict(tiny_bundle, Removing(), photos, out, PredictOptions(ledger_url=postgres.url, shard_size=5), quiet=True)
    assert not (out / SUMMARY).exists()


def test_an_unreachable_ledger_leaves_no_files(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer", vitx: Vitx
) -> None:
    wrong = postgres.url.replace("vitx:", "vitx:wrong")
    arguments = ("predict", tiny_bundle.path, photos, "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = vitx(*arguments, "--ledger", wrong)
    assert code == 3
    assert re.fullmatch(r"error: cannot open the ledger 127\.0\.0\.1:\d+/postgres: .*authentication failed.*\n", err)
    assert "wrong" not in err
    assert not (tmp_path / "out").exists()
    code, _, err = vitx(*arguments, "--run-name", "mine")
    assert code == 2
    assert "--run-name mine names a run in a shared ledger: pass --ledger too" in err
    assert not (tmp_path / "out").exists()


def test_a_failing_process_does_not_remove_the_list_of_another(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    """One process is listing the input; another one, whose input is wrong, must not remove its files."""
    state = tmp_path / "out" / ".vitx"
    state.mkdir(parents=True)
    (state / "images-of-another").write_bytes(b"")
    with pytest.raises(InputError, match="holds no image"):
        run(tiny_bundle, state, tmp_path / "out", ledger_url=postgres.url)
    assert [path.name for path in state.iterdir()] == ["images-of-another"]


SLOW = """
import sys, time
from pathlib import Path
from vitx.core.bundle import Bundle
from vitx.runtimes import Session, load_session
from vitx.predict import PredictOptions, predict
opened = Bundle.open(Path(sys.argv[1]))
session = load_session(opened, device="cpu", threads=1)
class Slow(Session):
    def _infer(self, images):
        time.sleep(0.3)
        return session.infer(images)
    def describe(self):
        return session.describe()
options = PredictOptions(ledger_url=sys.argv[4], shard_size=20, batch_size=5)
predict(opened, Slow(), sys.argv[2], Path(sys.argv[3]), options, quiet=True)
"""


def test_a_preempted_process_gives_its_shards_back(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, postgres: "PostgresServer"
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tiny_bundle.path), str(photos), str(out), postgres.url], stderr=subprocess.PIPE
    )
    held = "SELECT count(*) FROM vitx_shard WHERE run = %s AND owner IS NOT NULL AND digest IS NULL"
    deadline = time.monotonic() + 30
    while not (postgres.run("SELECT to_regclass('vitx_shard')")[0][0] and postgres.run(held, str(out))[0][0]):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT or b"KeyboardInterrupt" in err
    assert postgres.run(held, str(out)) == [(0,)]
    assert not list((out / PREDICTIONS).glob(".part-*"))
    assert run(tiny_bundle, photos, out, ledger_url=postgres.url, shard_size=20).images == 60
    assert max(Counter(paths(out)).values()) == 1


def documented(heading: str) -> str:
    """The first code block under a heading of docs/predict.md."""
    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    found = re.search(rf"^### {heading}\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_slurm_script_parses(vitx: Vitx) -> None:
    script = documented("Slurm")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    command = shlex.split(script.partition("\nsrun ")[2].replace("\\\n", " "))
    code, _, err = vitx(*command[1:])
    assert (code, "/shared/B.vitx" in err) == (2, True), err


def test_the_kubernetes_manifest_parses(vitx: Vitx) -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(documented("Kubernetes"))
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(argument, str) for argument in container["args"])
    code, _, err = vitx(*container["args"][1:])
    assert (code, "/shared/B.vitx" in err) == (2, True), err


@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, forkserver, tmpfs")
def test_chaos_on_a_server_that_crashes(tmp_path: Path, postgres: "PostgresServer") -> None:
    """Ten workers are killed, stopped and disconnected, server and disk fail: 1,500 images, each once."""
    script = BENCHMARKS / "predict" / "chaos.py"
    command = [sys.executable, str(script), "--images", "1500", "--seeds", "1", "--ledger", "private"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert '"killed"' in finished.stdout
