"""The steps of `predict` around the work: what it refuses, verifies, leaves alone and writes at its end."""

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, png
from cli_fixture import Vitx
from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file
from vitx.core.machine import usable_cores
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.job import sigterm_interrupts
from vitx.predict.ledger import Ledger, Shard, names_of
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import PartWriter
from vitx.predict.pipeline.draft import DraftCheck
from vitx.predict.pipeline.executor import Output, Performance, execute_here
from vitx.predict.pipeline.worker import Job


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for index in range(6):
        (folder / f"{index}.png").write_bytes(png(colour_image(index % 4, np.random.default_rng(index))))
    return folder


class Spy:
    """Keeps the jobs it is given; `work` False: does nothing."""

    def __init__(self, *, work: bool = True) -> None:
        self.jobs: list[Job] = []
        self.work = work

    def __call__(self, job: Job, ledger: Ledger, output: Output) -> Performance:
        self.jobs.append(job)
        here = execute_here(NumpySession(), job, ledger, output) if self.work else None
        return here or Performance(0, 1.0, {"read": 0.0}, {})


def run(bundle: Bundle, session: Any, source: object, out: Path, **options: Any) -> PredictionSummary:
    return predict(bundle, session, str(source), out, PredictOptions(**{"shard_size": 2} | options), quiet=True)


def test_every_option_reaches_the_job(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    spy, out = Spy(work=False), tmp_path / "out"
    asked: dict[str, Any] = {
        "batch_size": 7,
        "top_k": 3,
        "logits": True,
        "strict": True,
        "read_threads": 5,
        "decode_threads": 6,
    }
    run(tiny_bundle, spy, images, out, embeddings=True, image_column="c", **asked)
    (job,) = spy.jobs
    assert (job.options.outputs, job.options.lists) == (("embedding",), ("logits", "embedding"))
    taken = ("path", "class", "class_index", "score", "top_k_classes", "top_k_scores", "error", "logits", "embeddings")
    assert job.columns == TableColumns("c", None, None, taken)
    assert {name: getattr(job.options, name) for name in asked} == asked
    assert (job.read_threads, job.decode_threads) == (5, 6)
    assert (job.out, job.base, job.has_single_files) == (out, str(images), True)
    assert (job.labels, job.preprocessing) == (tiny_bundle.manifest.labels, tiny_bundle.manifest.preprocessing)
    assert list(names_of(Shard("images", "", 0, 9), job.listing)) == [f"{index}.png" for index in range(6)]


def test_threads_are_by_the_machine_and_readers_by_the_place(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    import fsspec

    spy = Spy(work=False)
    run(tiny_bundle, spy, images, tmp_path / "local")
    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/a.png", b"")
    run(tiny_bundle, spy, f"memory://{tmp_path.name}", tmp_path / "remote")
    assert [job.read_threads for job in spy.jobs] == [2, 16]
    assert [job.decode_threads for job in spy.jobs] == [usable_cores()] * 2


def test_a_relative_source_is_the_same_run(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spy = Spy()
    assert run(tiny_bundle, spy, "in", Path("out")).input == str(images)
    monkeypatch.chdir(images)
    assert run(tiny_bundle, spy, "../in/", tmp_path / "out").images_here == 6


def test_a_relative_pattern_is_of_this_folder_alone(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(images, tmp_path / "a1")
    images.rename(images.parent / "a[1]")
    monkeypatch.chdir(tmp_path / "a[1]")
    run(tiny_bundle, Spy(), "*.png", tmp_path / "out")
    found = pq.read_table(tmp_path / "out" / PREDICTIONS)["path"].to_pylist()
    assert found == [f"{tmp_path}/a[1]/{index}.png" for index in range(6)]


def settings(out: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(out / ".vitx" / "ledger.sqlite")) as ledger:
        (text,) = ledger.execute("SELECT description FROM run").fetchone()
    return dict(json.loads(text))


def test_what_decides_about_the_rows_is_kept_with_the_run(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    run(tiny_bundle, Spy(), images, tmp_path / "out", top_k=2, logits=True, batch_size=3)
    found = settings(tmp_path / "out")
    assert len(found.pop("id")) == 32
    assert found == {
        "input": str(images),
        "bundle": sha256_file(tiny_bundle.path / MANIFEST),
        "top_k": 2,
        "logits": True,
        "shard_size": 2,
        "image_column": None,
        "key": None,
        "columns": None,
        "incremental": False,
        "embeddings": False,
        "attention": False,
        "draft": False,
        "measured": {},
        "source": "folder",
        "digest": found["digest"],
        "skipped": {"by_suffix": {}, "first": []},
        "schema": None,
        "unread": [],
    }


def test_a_finished_run_is_left_alone_and_its_summary_returned(
    tiny_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = run(tiny_bundle, Spy(), images, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if ".vitx" not in path.parts}
    assert run(tiny_bundle, Spy(), images, out, batch_size=1) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if ".vitx" not in path.parts} == before
    assert sorted(path.name for path in (out / ".vitx").iterdir()) == ["ledger.sqlite", "lock"]
    (out / SUMMARY).unlink()
    again = run(tiny_bundle, Spy(), images, out)
    assert (again.images, again.images_here, again.shards) == (6, 0, 3)
    assert (out / SUMMARY).exists()


@pytest.mark.parametrize("change", ["add", "remove", "rename"])
def test_a_finished_run_of_another_input_is_refused(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, change: str
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, Spy(), images, out)
    match change:
        case "add":
            (images / "6.png").touch()
        case "remove":
            (images / "5.png").unlink()
        case "rename":
            (images / "5.png").rename(images / "7.png")
    with pytest.raises(InputError, match=rf"^images were added to '{images}' or removed since it was predicted: cho"):
        run(tiny_bundle, Spy(), images, out)
    assert not list((out / ".vitx").glob(".again*"))


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("*.nope", {}, "names no image"),
        ("empty", {}, "holds no image"),
        ("list.txt", {}, "names no image"),
        ("typo", {}, "there is nothing at"),
        ("a.parquet", {"columns": "nope"}, "--columns names 'nope'"),
        ("a.parquet", {"key": "nope"}, "expected one named 'nope'"),
        ("in", {"draft": True}, "--draft changes the class"),
    ],
)
def test_overwriting_removes_nothing_for_an_input_that_is_refused(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, source: str, options: dict[str, Any], reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").touch()
    pq.write_table(pa.table({"image": [(images / "0.png").read_bytes()]}), tmp_path / "a.parquet")
    out = tmp_path / "out"
    first = run(tiny_bundle, NumpySession(), images, out)
    before = content(out)
    with pytest.raises((InputError, CheckFailed), match=reason):
        run(tiny_bundle, NumpySession(), tmp_path / source, out, overwrite=True, **options)
    after = content(out)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {".vitx/lock"}  # which says who holds it
    assert run(tiny_bundle, NumpySession(), images, out) == first
    assert run(tiny_bundle, NumpySession(), images / "0.png", out, overwrite=True).images == 1


def test_an_empty_input_or_output_is_not_the_working_folder(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(images)
    before = content(images)
    out = tmp_path / "out"
    for given, source, to in (("", "", out), ("file://", "file://", out), ("", images, ""), ("s3://", images, "s3://")):
        what = "input" if to == out else "output"
        with pytest.raises(InputError, match=f"^the {what} is '{given}': expected a path or a URL; is a variable"):
            predict(tiny_bundle, NumpySession(), source, to, quiet=True)
    assert content(images) == before
    assert not out.exists()


def test_the_table_cuts_names_of_any_length(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tiny_bundle, NumpySession(), images, tmp_path / "out")
    long = {"classes": {"ξ" * 60_000: 6}, "skipped_names": SkippedNames({".txt": 1}, ["ψ" * 60_000])}
    monkeypatch.setattr("vitx.predict.job.launch", lambda *arguments, **options: found.model_copy(update=long))
    code, out, _ = vitx("predict", tiny_bundle.path, images, "--out", tmp_path / "out")
    assert (code, out.count("ξ"), out.count("ψ"), out.count("…")) == (0, 79, 79, 2)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_predictions_that_were_removed_are_made_again(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    first = run(tiny_bundle, NumpySession(), images, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / PREDICTIONS)
    again = run(tiny_bundle, NumpySession(), images, tmp_path / "out")
    assert (again.classes, again.images, again.images_here) == (first.classes, 6, 6)


def test_a_file_beside_the_parts_that_readers_would_read_is_refused(
    tiny_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = run(tiny_bundle, NumpySession(), images, out)
    (out / PREDICTIONS / "_SUCCESS").touch()
    assert run(tiny_bundle, NumpySession(), images, out) == first
    part = (out / PREDICTIONS / "part-00000001.parquet").read_bytes()
    for name in ("old", "part-00000001.parquet.bak", "part-00000099.parquet"):
        stranger = out / PREDICTIONS / name
        stranger.mkdir() if name == "old" else stranger.write_bytes(part)
        expected = rf"parquet' holds {re.escape(name)}, which is not of this run, and readers"
        with pytest.raises(InputError, match=expected):
            run(tiny_bundle, NumpySession(), images, out)
        stranger.rename(tmp_path / name)
    (tmp_path / name).rename(stranger)
    assert run(tiny_bundle, NumpySession(), images, out, overwrite=True).images == 6


def test_damaged_parts_are_made_again_and_said(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, Spy(), images, out)
    (out / PREDICTIONS / "part-00000002.parquet").write_bytes(b"damaged")
    (out / PREDICTIONS / ".part-00000003.parquet.killed").touch()
    idle = Spy(work=False)
    idle_summary = predict(tiny_bundle, idle, images, out, PredictOptions(shard_size=2))
    err = capsys.readouterr().err
    assert "predict: making 1 finished file again, changed or removed since\n" in err
    assert "predict: 2 of 3 shards done and verified\n" in err
    assert idle_summary.images == 4  # the old summary was removed: this one is of what is there
    assert not (out / PREDICTIONS / ".part-00000003.parquet.killed").exists()
    assert run(tiny_bundle, Spy(), images, out).images_here == 2


def test_strict_finds_the_unreadable_image_of_a_finished_shard(
    tiny_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    (images / "3.png").write_bytes(b"")
    (images / "5.png").write_bytes(b"")
    out = tmp_path / "out"
    assert run(tiny_bundle, Spy(), images, out).errors == 2
    spy = Spy()
    with pytest.raises(CheckFailed, match=r"^unreadable image 3\.png: not an image: empty; without --strict it become"):
        run(tiny_bundle, spy, images, out, strict=True)
    assert spy.jobs == []


def test_sigterm_interrupts_within_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        mine: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
        with sigterm_interrupts():
            signal.raise_signal(signal.SIGTERM)
        assert mine == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_the_command_with_the_shells_code_and_nothing_half_written(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vitx: Vitx
) -> None:
    monkeypatch.setattr(PartWriter, "add", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, out, _ = vitx("predict", tiny_bundle.path, images, "--out", tmp_path / "out", "--device", "cpu")
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert f"with exit code {code} " in (Path(__file__).parents[2] / "docs" / "predict.md").read_text(encoding="utf-8")
    assert list((tmp_path / "out" / PREDICTIONS).iterdir()) == []


def test_a_bundle_without_a_certificate_is_refused_unless_that_is_allowed(
    uncertified_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    spy = Spy()
    with pytest.raises(CheckFailed, match="has no certificate"):
        run(uncertified_bundle, spy, images, tmp_path / "out")
    assert (spy.jobs, (tmp_path / "out").exists()) == ([], False)
    assert not run(uncertified_bundle, Spy(), images, tmp_path / "out", allow_uncertified=True).certified


def test_progress_is_of_images_where_they_are_counted_and_of_shards_elsewhere(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextmanager
    def progress(title: str, total: int, *, quiet: bool) -> Iterator[Any]:
        asked.append((title, total, quiet))
        yield SimpleNamespace(update=lambda done, note="": None)

    monkeypatch.setattr("vitx.predict.job.progress", progress)
    run(tiny_bundle, Spy(), images, tmp_path / "out")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for path in sorted(images.iterdir()):
            archive.add(path, path.name)
    assert run(tiny_bundle, Spy(), tmp_path / "a.tar", tmp_path / "tar").images == 6
    assert asked == [("predict", 6, True), ("predict", 1, True)]


def test_a_url_is_no_folder_of_this_machine(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"^--out 's3:/bucket/out': expected a folder or a URL; in Python a URL is a te"
    ):
        run(tiny_bundle, Spy(), images, Path("s3://bucket/out"))
    with pytest.raises(InputError, match=r"^--out 'gs:/b': "):
        run(tiny_bundle, Spy(), images, Path("gs://b"))
    assert run(tiny_bundle, Spy(), images, Path("c:/out")).images == 6  # a drive's letter


@pytest.mark.parametrize("given", [{}, {"state": Path("state\udcff")}])
def test_an_output_that_is_not_utf8_is_refused_before_the_listing(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    out = "memory://bucket/out" if given else tmp_path / "out\udcff"
    with pytest.raises(InputError, match=r"the output '.*\udcff' is not UTF-8, and Parquet files cannot be written th"):
        run(tiny_bundle, Spy(), images, out, **given)  # type: ignore[arg-type]  # a URL
    assert not (tmp_path / "out\udcff").exists()


def test_a_part_says_what_it_was_made_with(uncertified_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    spy = Spy(work=False)
    run(uncertified_bundle, spy, images, tmp_path / "out", allow_uncertified=True)
    assert spy.jobs[0].footer == {
        "vitx.bundle": uncertified_bundle.manifest.name,
        "vitx.bundle_sha256": sha256_file(uncertified_bundle.path / MANIFEST),
    }
    assert not spy.jobs[0].certified


def test_a_bundle_that_is_replaced_or_removed_meanwhile_is_the_one_that_was_loaded(
    tiny_bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    loaded, out = sha256_file(tiny_bundle.path / MANIFEST), tmp_path / "out"

    def replaced(job: Job, ledger: Ledger, output: Output) -> Performance:
        with (tiny_bundle.path / MANIFEST).open("ab") as file:
            file.write(b"\n")
        return execute_here(NumpySession(), job, ledger, output)

    def removed(job: Job, ledger: Ledger, output: Output) -> Performance:
        shutil.rmtree(tiny_bundle.path)
        return execute_here(NumpySession(), job, ledger, output)

    for folder, session, allow in ((out, replaced, False), (tmp_path / "other", removed, True)):
        expected = sha256_file(tiny_bundle.path / MANIFEST)
        summary = run(tiny_bundle, session, images, folder, allow_uncertified=allow)
        assert summary.bundle_sha256 == expected
        assert json.loads((folder / SUMMARY).read_text())["bundle_sha256"] == expected
        footer = pq.read_metadata(next((folder / PREDICTIONS).iterdir())).metadata
        assert footer[b"vitx.bundle_sha256"].decode() == expected
    assert loaded != expected


def test_a_certified_part_names_the_certificate(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    spy = Spy(work=False)
    run(tiny_bundle, spy, images, tmp_path / "out")
    assert spy.jobs[0].footer["vitx.certificate_sha256"] == sha256_file(tiny_bundle.path / CERTIFICATE)
    assert spy.jobs[0].certified


def test_what_is_tried_again_is_said_and_done(
    tiny_bundle: Bundle, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    good = (images / "5.png").read_bytes()
    for name in ("1.png", "4.png", "5.png"):
        (images / name).write_bytes(b"")
    assert run(tiny_bundle, Spy(), images, out).errors == 3
    (images / "5.png").write_bytes(good)
    assert run(tiny_bundle, Spy(), images, out).errors == 3  # not unless it is asked for
    options = PredictOptions(shard_size=2, retry_errors=True)
    summary = predict(tiny_bundle, Spy(), images, out, options)
    said = capsys.readouterr().err
    assert "predict: trying 3 unreadable images in 2 files again\n" in said
    assert "predict: 1 of 3 shards done and verified\n" in said
    assert (summary.images, summary.errors) == (6, 2)
    assert json.loads((out / SUMMARY).read_text())["errors"] == 2
    idle = Spy(work=False)
    predict(tiny_bundle, idle, images, out, options)
    assert "2 unreadable images in 2 files" in capsys.readouterr().err


def test_a_summary_of_what_an_earlier_call_did_is_left(tiny_bundle: Bundle, images: Path, tmp_path: Path) -> None:
    """It tells of the call that did the work; this one did nothing, and all was done when it came."""
    out = tmp_path / "out"
    run(tiny_bundle, Spy(), images, out)
    (out / SUMMARY).write_text((out / SUMMARY).read_text().replace('"seconds": ', '"seconds": 1'))
    before = (out / SUMMARY).read_text()
    found = run(tiny_bundle, Spy(), images, out)
    assert found.seconds == json.loads(before)["seconds"]
    assert (out / SUMMARY).read_text() == before


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path) -> None:
    """Of the command, and of the function, which is imported when it is first asked for."""
    missing = "import sys; sys.modules['pyarrow'] = None\n"
    error = "this needs the package 'pyarrow', which is not installed: pip install 'vitx[serve]'"
    command = f"sys.argv = ['vitx', 'predict', 'B.vitx', '.', '--out', r'{tmp_path}/out']; vitx.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", f"{missing}import vitx.cli; {command}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, f"error: {error}\n")
    assert not (tmp_path / "out").exists()
    called = subprocess.run(
        [sys.executable, "-c", f"{missing}from vitx.predict import predict"], capture_output=True, text=True
    )
    assert f"EnvironmentMissing: {error}" in called.stderr


def test_a_session_that_was_drafted_with_is_enough(
    tiny_bundle: Bundle,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked = DraftCheck(
        images=6,
        drafted=4,
        flips=1,
        flip_rate_bound=0.5,
        max_flip_rate=0.6,
        max_logit_difference=0.1,
        max_grey_difference=2,
    )
    asked: list[Any] = []

    def check(
        bundle: Bundle, model: Any, inventory: Any, listing: Path, columns: TableColumns, *, batch_size: int
    ) -> Any:
        names = len(list(names_of(Shard("images", "", 0, 9), listing)))
        asked.append((bundle, model, len(inventory.shards), names, columns.image, batch_size))
        return checked

    monkeypatch.setattr("vitx.predict.job.check_draft", check)
    session, options = NumpySession(), PredictOptions(shard_size=2, batch_size=3, draft=True)
    summary = predict(tiny_bundle, session, images, tmp_path / "out", options)
    assert asked == [(tiny_bundle, session, 3, 6, None, 3)]
    assert "predict: --draft changes the class of 1 of 6 sampled images\n" in capsys.readouterr().err
    assert (summary.draft, summary.images, summary.certified) == (checked, 6, True)
    assert settings(tmp_path / "out")["measured"] == {"draft": checked.model_dump(mode="json")}
