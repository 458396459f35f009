"""`--shard I/N`: jobs that know nothing of each other do every image of an input once, or are refused by name."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, listed, png
from cli_fixture import Vitx
from server_process import HANG, wait_until
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.options import PredictOptions, Share
from vitx.predict.outputs.parts import part_path, remove_leftovers


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(60):
        (folder / f"{index:02d}.png").write_bytes(png(colour_image(index % 4, rng)))
    return folder


def run(bundle: Bundle, source: Path | str, out: Path, shard: str | None, **options: Any) -> PredictionSummary:
    given = PredictOptions.model_validate({"shard_size": 5, "decode_threads": 1, "shard": shard} | options)
    return predict(bundle, NumpySession(), source, out, given, quiet=True)


def paths(out: Path) -> list[str]:
    return sorted(pq.read_table(out / PREDICTIONS, columns=["path"])["path"].to_pylist())


@pytest.mark.parametrize("count", [2, 7, 61])
def test_jobs_do_every_image_once(tiny_bundle: Bundle, photos: Path, tmp_path: Path, count: int) -> None:
    out = tmp_path / "out"
    summaries = [run(tiny_bundle, photos, out, f"{index}/{count}") for index in range(count, 0, -1)]
    assert paths(out) == sorted(path.name for path in photos.iterdir())
    share = 60 / count
    assert all(int(share) <= summary.images <= int(share) + 1 for summary in summaries)
    name = f"summary-00002-of-{count:05d}.json"
    assert json.loads((out / name).read_text()) == summaries[-2].model_dump(mode="json")
    assert summaries[-2].shard == f"2/{count}"
    assert not (out / SUMMARY).exists()


def test_jobs_at_the_same_time_are_one_run(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    """Which of them is the first to write down what they agree on does not matter."""
    out = tmp_path / "out"
    done: list[int] = []
    threads = [
        threading.Thread(target=lambda index=index: done.append(run(tiny_bundle, photos, out, f"{index}/4").images))
        for index in (1, 2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [15] * 4
    assert len(set(paths(out))) == len(paths(out)) == 60


def test_a_stopped_job_goes_on_and_a_finished_one_is_verified(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(tiny_bundle, photos, out, "2/3").images_here == 20
    part_path(out, 5).unlink()  # of 2, 5, 8 and 11
    assert run(tiny_bundle, photos, out, "2/3").images_here == 5
    assert len(paths(out)) == 20


@pytest.mark.parametrize("kind", ["tars", "row groups"])
def test_containers_are_shared_out_in_turn(tmp_path: Path, kind: str) -> None:
    if kind == "tars":
        for index in range(7):
            tarfile.open(tmp_path / f"{index}.tar", "w").close()
    else:
        table = pa.table({"image": [b"x"] * 70})
        pq.write_table(table, tmp_path / "all.parquet", row_group_size=10)
    shares = [listed(str(tmp_path), tmp_path / "list", 9, share=Share(index, 3)) for index in (1, 2, 3)]
    assert [len(share.shards) for share in shares] == [3, 2, 2]
    whole = listed(str(tmp_path), tmp_path / "list", 9)
    assert [shares[index % 3].shards[index // 3] for index in range(7)] == list(whole.shards)
    assert {share.digest for share in shares} == {whole.digest}


def test_a_job_without_work_is_done(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    one = str(photos / "03.png")
    assert run(tiny_bundle, one, tmp_path / "out", "1/2").images == 1
    found = run(tiny_bundle, one, tmp_path / "out", "2/2", draft=False)
    assert (found.images, found.errors, found.shards, found.shard) == (0, 0, 0, "2/2")
    assert run(tiny_bundle, one, tmp_path / "out", "2/2") == found


def test_a_job_without_work_has_nothing_to_draft(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    assert run(tiny_bundle, photos / "03.png", tmp_path / "out", "2/2", draft=True).draft is None


def test_a_refused_draft_leaves_no_agreement(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"--draft .* leave it out"):  # 30 images cannot show it
        run(tiny_bundle, photos, tmp_path / "out", "1/2", draft=True)
    assert run(tiny_bundle, photos, tmp_path / "out", "1/2").images == 30


def test_an_input_without_images_is_refused_for_every_job(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for shard in ("1/2", "2/2"):
        with pytest.raises(InputError, match="holds no image"):
            run(tiny_bundle, tmp_path / "empty", tmp_path / "out", shard)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard": "1/4"}, "another run: shards was 3, is 4 now"),
        ({"top_k": 1}, "another run: top_k was 5, is 1 now"),
        ({"shard_size": 6}, "another run: shard_size was 5, is 6 now"),
        ({"shard": None}, "a run with --shard: choose another folder, or continue it with --shard"),
        ({"overwrite": True}, "--overwrite with --shard would remove what the other jobs did: remove the folder"),
    ],
)
def test_jobs_that_do_not_belong_together_are_refused(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, photos, out, "1/3")
    before = paths(out)
    with pytest.raises(InputError, match=message):
        run(tiny_bundle, photos, out, **{"shard": "2/3"} | changed)
    assert paths(out) == before
    assert [path.name for path in (out / ".vitx").iterdir() if path.is_dir()] == ["shard-00001-of-00003"]


def test_a_job_does_not_continue_a_run_without_shards(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    run(tiny_bundle, photos, tmp_path, None)
    with pytest.raises(InputError, match="a run without --shard: choose another folder, or continue it without"):
        run(tiny_bundle, photos, tmp_path, "1/2")
    for path in (tmp_path / ".vitx").iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"holds predictions\.parquet of another run: .*, or remove that one$"):
        run(tiny_bundle, photos, tmp_path, "1/2")


def test_overwriting_without_shard_removes_what_jobs_left(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, photos, out, "1/2")
    assert run(tiny_bundle, photos, out, None, overwrite=True).images == 60
    assert sorted(path.name for path in out.iterdir()) == [".vitx", PREDICTIONS, SUMMARY]
    assert len(paths(out)) == 60


def test_an_input_that_changes_between_two_jobs_is_refused(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    """The images would be dealt out otherwise: some twice, some never."""
    names = tmp_path / "list.txt"
    names.write_text("".join(f"{path}\n" for path in sorted(photos.iterdir())[:10]))
    out = tmp_path / "out"
    run(tiny_bundle, names, out, "1/2")
    names.write_text("".join(f"{path}\n" for path in sorted(photos.iterdir())[1:11]))
    with pytest.raises(
        InputError, match=r"images were added to '.*list\.txt' or removed since the first job listed it"
    ):
        run(tiny_bundle, names, out, "2/2")
    with pytest.raises(InputError, match=r"since it was predicted: choose another folder, or remove that one$"):
        run(tiny_bundle, names, out, "1/2")
    with pytest.raises(InputError, match=r"top_k was 5, is 1 now; choose another folder, or remove that one$"):
        run(tiny_bundle, names, out, "1/2", top_k=1)
    assert len(paths(out)) == 5
    (out / ".vitx" / "shard-00001-of-00002" / "ledger.sqlite").write_bytes(b"text" * 2000)
    with pytest.raises(InputError, match=r"is damaged \(.*\): choose another folder, or remove that one$"):
        run(tiny_bundle, names, out, "1/2")


@pytest.mark.parametrize("damage", [b"", b"{", b"1", b"\xff", b"[" * 100_000])
def test_a_damaged_agreement_is_refused(tiny_bundle: Bundle, photos: Path, tmp_path: Path, damage: bytes) -> None:
    run(tiny_bundle, photos, tmp_path, "1/2")
    (tmp_path / ".vitx" / "shards.json").write_bytes(damage)
    with pytest.raises(InputError, match=r"shards\.json', in which the jobs agree, is damaged: choose another folder"):
        run(tiny_bundle, photos, tmp_path, "2/2")


def test_a_file_system_without_hard_links_is_refused(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(
        InputError, match=r"^--shard needs hard links, which the file system of '.*' lacks: Operation not"
    ):
        run(tiny_bundle, photos, tmp_path / "out", "1/2")
    assert not (tmp_path / "out").exists()


def test_leftovers_of_other_jobs_are_left_to_them(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4, 123456789):
        path = part_path(tmp_path, number)
        path.parent.mkdir(exist_ok=True)
        path.with_name(f".{path.name}.worker").touch()
    (tmp_path / PREDICTIONS / ".part-of-somebody.parquet.x").touch()
    remove_leftovers(tmp_path, share=Share(3, 3))
    left = [
        ".part-of-somebody.parquet.x",
        ".part-00000001.parquet.worker",
        ".part-00000002.parquet.worker",
        ".part-00000004.parquet.worker",
    ]
    assert sorted(path.name for path in (tmp_path / PREDICTIONS).iterdir()) == sorted(left)
    remove_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / PREDICTIONS).iterdir()] == [".part-of-somebody.parquet.x"]


def test_a_path_of_any_bytes_can_be_shared(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    source = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        os.mkdir(source)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    for name in ("00.png", "01.png"):
        Path(os.fsdecode(source), name).write_bytes((photos / name).read_bytes())
    for shard in ("1/2", "2/2"):
        assert run(tiny_bundle, os.fsdecode(source), tmp_path / "out", shard).images == 1


@pytest.mark.parametrize(
    "shard", ["0/4", "5/4", "1/0", "-1/4", "1/-4", "1", "1/", "/4", "1/4/2", "a/b", "1.0/4", "²/4", ""]
)
def test_a_number_that_is_no_job_is_refused(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, vitx: Vitx, shard: str
) -> None:
    code, _, err = vitx("predict", tiny_bundle.path, photos, "--out", tmp_path / "out", f"--shard={shard}")
    assert code == 2
    assert re.search(r"expected I/N, the job's number|of \d+ jobs there is no number \d+", err), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard", [(5, 2), [5, 2], [0, 2], Share(0, 0)])
def test_a_number_that_is_no_job_is_refused_in_python(shard: Any) -> None:
    with pytest.raises(ValueError, match=f"of {shard[1]} jobs there is no number {shard[0]}: they are 1 to N"):
        PredictOptions(shard=shard)


def test_ray_has_its_own_way_to_share(tiny_bundle: Bundle, photos: Path, tmp_path: Path, vitx: Vitx) -> None:
    arguments = ("predict", tiny_bundle.path, photos, "--out", tmp_path / "out", "--shard", "1/2", "--ray")
    code, _, err = vitx(*arguments)
    assert code == 2
    assert "--ray shares the work among its nodes: pass --shard without it" in err


# In the midst of the second part the model waits until the process was asked to stop: few batches run ahead of a part.
STOPPED = """
import signal, sys, threading
from pathlib import Path
from vitx.core.bundle import Bundle
from vitx.runtimes import Session, load_session
from vitx.predict import PredictOptions, predict
opened = Bundle.open(Path(sys.argv[1]))
session = load_session(opened, device="cpu", threads=1)
parts, asked, interrupt = Path(sys.argv[3]) / "predictions", threading.Event(), signal.default_int_handler
def ask(*given):
    asked.set()
    interrupt(*given)
signal.default_int_handler = ask
class Held(Session):
    def _infer(self, images):
        if len(list(parts.glob("*part-*"))) == 2:
            asked.wait()
        return session.infer(images)
    def describe(self):
        return session.describe()
options = PredictOptions(shard_size=15, batch_size=2, shard="1/2")
predict(opened, Held(), sys.argv[2], Path(sys.argv[3]), options, quiet=True)
"""


def test_a_preempted_job_leaves_nothing_half_done(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", STOPPED, str(tiny_bundle.path), str(photos), str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until(lambda: len(list((out / PREDICTIONS).glob("*part-*"))) == 2 or process.poll() is not None)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGINT or b"KeyboardInterrupt" in err
    assert not list((out / PREDICTIONS).glob(".part-*"))
    for shard in ("1/2", "2/2"):
        assert run(tiny_bundle, photos, out, shard, shard_size=15).images == 30
    assert max(Counter(paths(out)).values()) == 1


def documented(heading: str) -> str:
    """The first code block under a heading of docs/predict.md."""
    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    found = re.search(rf"^### {heading}\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def expanded(command: str, **environment: str) -> list[str]:
    """The words that a shell makes of a documented command."""
    echo = subprocess.run(
        ["bash", "-c", command.replace("vitx predict", "printf '%s\\n' predict")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return echo.stdout.splitlines()


def test_the_slurm_script_names_its_shard(vitx: Vitx) -> None:
    script = documented("Slurm")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    assert "--array=1-32\n" in script
    command = script.partition("\nsrun ")[2]
    words = expanded(command, SLURM_ARRAY_TASK_ID="32", SLURM_ARRAY_TASK_COUNT="32")
    assert words[-2:] == ["--shard", "32/32"]
    code, _, err = vitx(*words)
    assert (code, "/shared/B.vitx" in err) == (2, True), err


def test_the_kubernetes_manifest_names_its_shard(vitx: Vitx) -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(documented("Kubernetes"))
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["sh", "-c"]
    (script,) = container["args"]
    words = expanded(script.removeprefix("exec "), JOB_COMPLETION_INDEX="31")
    assert f"{job['spec']['completions']}/{job['spec']['completions']}" in words
    code, _, err = vitx(*words)
    assert (code, "/shared/B.vitx" in err) == (2, True), err
