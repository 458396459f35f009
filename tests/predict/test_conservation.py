"""What is listed is predicted, unreadable or skipped: `summary.json` counts all, and says when they do not add up."""

import io
import json
import re
import sqlite3
import tarfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, listed, png, tar_of
from cli_fixture import Vitx
from faulty_disk import unlistable
from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle
from vitx.core.errors import CheckFailed
from vitx.core.files import sha256_file
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, job, predict
from vitx.predict.inputs import inventory
from vitx.predict.inputs.skipped import MAX_SUFFIXES, SkippedNames
from vitx.predict.ledger import Ledger
from vitx.predict.options import PredictOptions

DENIED = PermissionError(13, "Permission denied")
IMAGES = [png(colour_image(index % 4, np.random.default_rng(index))) for index in range(4)]


def run(bundle: Bundle, source: Path | str, out: Path, **options: Any) -> PredictionSummary:
    given = PredictOptions(**{"shard_size": 2, "decode_threads": 1} | options)
    return predict(bundle, NumpySession(), str(source), out, given, quiet=True)


def counts(summary: PredictionSummary) -> dict[str, tuple[int, ...]]:
    return {kind: tuple(found.model_dump().values()) for kind, found in summary.sources.items()}


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(IMAGES[0])


def test_a_folder_counts_what_it_passes_over(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """A tar file beside images is not read: it is named."""
    folder = tmp_path / "in"
    write(folder, "a.png", "b/c.PNG", "b/notes.TXT", "more.txt", ".hidden.png", ".cache/d.png", "x.tar", "README")
    (folder / "bad.png").write_bytes(b"")
    summary = run(tiny_bundle, folder, tmp_path / "out")
    assert counts(summary) == {"folder": (9, 2, 1, 6)}
    found = summary.skipped_names
    assert found.by_suffix == {".txt": 2, "(hidden)": 2, ".tar": 1, "(no suffix)": 1}
    assert len(found.first) == 5
    assert set(found.first) < {"b/notes.TXT", "more.txt", ".hidden.png", ".cache", "x.tar", "README"}
    assert summary.complete
    summary.check_errors(0.5)
    assert json.loads((tmp_path / "out" / SUMMARY).read_text())["sources"] == {
        "folder": {"listed": 9, "predicted": 2, "unreadable": 1, "skipped": 6}
    }


def test_a_remote_folder_counts_the_same(tiny_bundle: Bundle, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.png", "b/c.PNG", "b/notes.TXT", ".hidden.png", ".cache/d.png", "x.tar"):
        memory.pipe(f"/{tmp_path.name}/{name}", IMAGES[0])
    summary = run(tiny_bundle, f"memory://{tmp_path.name}", tmp_path / "out")
    assert counts(summary) == {"folder": (6, 2, 0, 4)}
    assert summary.skipped_names.by_suffix == {".txt": 1, "(hidden)": 2, ".tar": 1}


def test_a_pattern_counts_images_containers_and_the_rest(tiny_bundle: Bundle, tmp_path: Path) -> None:
    write(tmp_path / "in", "a.png", "b.png", "c.txt")
    members = dict.fromkeys(("1.png", "1.json", "2.png", ".3.png"), IMAGES[1])
    (tmp_path / "in" / "d.tar").write_bytes(tar_of(members))
    pq.write_table(pa.table({"image": [*IMAGES, b"no image"]}), tmp_path / "in" / "e.parquet", row_group_size=3)
    summary = run(tiny_bundle, tmp_path / "in" / "*", tmp_path / "out")
    assert counts(summary) == {"pattern": (3, 2, 0, 1), "parquet": (5, 4, 1, 0), "tar": (4, 2, 0, 2)}
    assert summary.skipped_names.by_suffix == {".txt": 1, ".json": 1, "(hidden)": 1}
    assert (summary.images, summary.errors, summary.complete) == (9, 1, True)


def test_a_folder_of_containers_skips_the_others(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder, "notes.txt", "deep/x.tar")
    tarfile.open(folder / "a.tar", "w").close()
    summary = run(tiny_bundle, folder, tmp_path / "out")
    assert counts(summary) == {"tar": (0, 0, 0, 0), "folder": (2, 0, 0, 2)}
    assert summary.skipped_names.by_suffix == {".txt": 1, ".tar": 1}
    assert sorted(summary.skipped_names.first) == ["deep/x.tar", "notes.txt"]


def test_jobs_count_skipped_names_once(tiny_bundle: Bundle, tmp_path: Path) -> None:
    write(tmp_path / "in", "a.png", "b.png", "c.png", "d.txt")
    found = [run(tiny_bundle, tmp_path / "in", tmp_path / "out", shard=(number, 2)) for number in (1, 2)]
    assert [counts(summary) for summary in found] == [{"folder": (3, 2, 0, 1)}, {"folder": (1, 1, 0, 0)}]


def test_a_list_counts_its_lines(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Whatever their suffix: who writes a name into a list means it. Equal lines are two rows."""
    write(tmp_path, "a.png", "b.dat")
    (tmp_path / "list.txt").write_text("a.png\nb.dat\n\nabsent.png\na.png\n")
    assert counts(run(tiny_bundle, tmp_path / "list.txt", tmp_path / "out")) == {"list": (4, 3, 1, 0)}
    assert counts(run(tiny_bundle, tmp_path / "a.png", tmp_path / "one")) == {"image": (1, 1, 0, 0)}


def test_a_list_of_images_that_is_damaged_meanwhile_is_not_complete(
    tiny_bundle: Bundle, tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger loses a name after it was checked and before a shard is done again, as on a disk that lies."""
    write(tmp_path / "in", *(f"{index}.png" for index in range(6)))
    monkeypatch.setattr(Ledger, "_check", lambda ledger: None)
    run(tiny_bundle, tmp_path / "in", tmp_path / "out", shard_size=3)
    (tmp_path / "out" / PREDICTIONS / "part-00000002.parquet").unlink()
    with closing(sqlite3.connect(tmp_path / "out" / ".vitx" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("DELETE FROM image WHERE id = 6")
    summary = run(tiny_bundle, tmp_path / "in", tmp_path / "out", shard_size=3)
    assert counts(summary) == {"folder": (6, 5, 0, 0)}
    assert not summary.complete
    message = r"^not complete: of 6 names listed \(folder\) 5 were predicted, 0 are unreadable and 0 were skipped\. The"
    with pytest.raises(CheckFailed, match=message):
        summary.check_errors(1.0)
    arguments = ("predict", tiny_bundle.path, tmp_path / "in", "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = vitx(*arguments, "--shard-size", "3", "--quiet")
    assert (code, err.count("error: ")) == (1, 1)
    assert "not complete: of 6 names listed" in err


@pytest.mark.parametrize("change", ["removed", "shorter", "other groups", "no column"])
def test_a_table_that_changes_after_it_was_listed_loses_no_row(
    tiny_bundle: Bundle, tmp_path: Path, change: str
) -> None:
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": IMAGES}), table, row_group_size=2)

    taken = listed(str(table), tmp_path / "list", 9)
    if change == "removed":
        table.unlink()
    elif change == "shorter":
        pq.write_table(pa.table({"image": IMAGES[:2]}), table)
    elif change == "other groups":
        pq.write_table(pa.table({"image": IMAGES}), table, row_group_size=3)
    else:
        pq.write_table(pa.table({"label": [1, 2, 3, 4]}), table, row_group_size=2)
    items = [item for shard in taken.shards for item in inventory.read_shard(shard, taken.base, tmp_path / "list")]
    assert [item.key for item in items] == [f"a.parquet/{row:07d}" for row in range(4)]
    good = sum(isinstance(item.source, bytes) for item in items)
    assert good == (2 if change == "shorter" else 0)


def test_a_table_that_can_be_read_again_gives_all_its_rows(tmp_path: Path) -> None:
    """It could not be listed; when its shard is read it is whole, with several row groups."""
    (tmp_path / "a.parquet").write_bytes(b"not yet")
    taken = listed(str(tmp_path / "a.parquet"), tmp_path / "list", 9)
    pq.write_table(pa.table({"image": IMAGES}), tmp_path / "a.parquet", row_group_size=1)
    (shard,) = taken.shards
    items = list(inventory.read_shard(shard, taken.base, tmp_path / "list"))
    assert [item.source for item in items] == IMAGES


def test_a_part_names_the_bundle_and_the_certificate(tiny_bundle: Bundle, tmp_path: Path) -> None:
    write(tmp_path / "in", "a.png")
    run(tiny_bundle, tmp_path / "in", tmp_path / "out")
    (part,) = (tmp_path / "out" / PREDICTIONS).iterdir()
    footer = pq.read_metadata(part).metadata
    assert footer[b"vitx.bundle"] == tiny_bundle.manifest.name.encode()
    assert footer[b"vitx.bundle_sha256"] == sha256_file(tiny_bundle.path / MANIFEST).encode()
    assert footer[b"vitx.certificate_sha256"] == sha256_file(tiny_bundle.path / CERTIFICATE).encode()


def test_many_suffixes_are_bounded() -> None:
    skipped = SkippedNames()
    for index in range(1000):
        skipped.add(f"a.{index}")
    assert skipped.count == 1000
    assert len(skipped.by_suffix) == MAX_SUFFIXES + 1
    assert skipped.by_suffix["(other)"] == 1000 - MAX_SUFFIXES


NOT_LISTED = r"^not complete: files and folders that could not be read to their end: {}\. How many images are missing"


@pytest.mark.parametrize("shard", [None, "1/1", "1/2"], ids=["local", "the only job", "a job"])
@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_a_file_that_breaks_off_is_no_success_however_many_images_are_read(
    tiny_bundle: Bundle, tmp_path: Path, shard: str | None, suffix: str
) -> None:
    """One row stands for all that it hides: no rate says how many images have none."""
    whole = io.BytesIO()
    pq.write_table(pa.table({"image": IMAGES * 30}), whole)
    data = tar_of({f"{i}.png": IMAGES[i % 4] for i in range(120)}) if suffix == "tar" else whole.getvalue()
    for name in "abcd":
        (tmp_path / f"{name}.{suffix}").write_bytes(data)
    end = data.rindex(b"119.png") + 100 if suffix == "tar" else -9  # within a header, or the footer
    (tmp_path / f"a.{suffix}").write_bytes(data[:end])
    given: dict[str, Any] = {"shard": shard}
    summary = run(tiny_bundle, tmp_path / f"*.{suffix}", tmp_path / "out", **given)
    assert summary.errors / summary.images < PredictOptions().max_error_rate
    assert (summary.errors, summary.uncounted, summary.complete) == (1, 1, False)
    with pytest.raises(CheckFailed, match=NOT_LISTED.format(1)):
        summary.check_errors(0.99)
    summary.check_errors(1)
    assert run(tiny_bundle, tmp_path / f"*.{suffix}", tmp_path / "out", **given) == summary
    (tmp_path / f"a.{suffix}").write_bytes(data)
    mended = run(tiny_bundle, tmp_path / f"*.{suffix}", tmp_path / "out", **given, retry_errors=True)
    assert (mended.errors, mended.uncounted, mended.complete) == (0, 0, True)
    assert mended.images == (240 if shard == "1/2" else 480)
    mended.check_errors(0)


def test_a_file_that_broke_off_and_is_gone_is_still_no_success(tiny_bundle: Bundle, tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(tar_of(dict.fromkeys(("0.png", "1.png"), IMAGES[0]))[:1000])
    run(tiny_bundle, tmp_path / "*.tar", tmp_path / "out")
    (tmp_path / "a.tar").unlink()
    kept = run(tiny_bundle, tmp_path / "*.tar", tmp_path / "out", retry_errors=True)
    assert (kept.uncounted, kept.complete) == (2, False)


@pytest.mark.parametrize("pattern", ["", "**/*.png"])
def test_a_folder_that_cannot_be_listed_is_no_success(
    tiny_bundle: Bundle, tmp_path: Path, vitx: Vitx, pattern: str
) -> None:
    """A link to a parent folder hides nothing: its images are rows already."""
    write(tmp_path / "in", "a.png", "b.png", "locked/c.png")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    command = ("predict", tiny_bundle.path, tmp_path / "in" / pattern, "--out", tmp_path / "out", "--max-error-rate")
    with unlistable("locked", DENIED):
        code, printed, error = vitx(*command, "0.9")
        any_rate, _, _ = vitx(*command, "1")
    assert (code, printed.count("not read to the end")) == (1, 1)
    assert re.search(NOT_LISTED.format(1).replace("^", "error: "), error)
    assert any_rate == 0
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert (summary["errors"], summary["uncounted"], summary["complete"]) == (2, 1, False)


def test_a_folder_that_an_increment_can_list_hides_nothing_any_more(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Without increments its images are not in the run, and it is uncounted also when it can be listed."""
    write(tmp_path / "in", "a.png", "locked/c.png")
    for incremental in (False, True):
        out, given = tmp_path / f"out-{incremental}", {"incremental": incremental}
        with unlistable("locked", DENIED):
            first = run(tiny_bundle, tmp_path / "in", out, **given)
            again = run(tiny_bundle, tmp_path / "in", out, **given, retry_errors=True)
        assert (first.images, first.uncounted, again.uncounted) == (2, 1, 1)
        listed_now = run(tiny_bundle, tmp_path / "in", out, **given, retry_errors=True)
        assert (listed_now.images, listed_now.errors) == (2 + incremental, 1)
        assert (listed_now.uncounted, listed_now.complete) == (int(not incremental), incremental)


@pytest.mark.parametrize(("before", "overwrite"), [(False, False), (True, False), (True, True)])
def test_a_folder_that_can_be_listed_only_after_the_listing_is_no_success(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, overwrite: bool
) -> None:
    """Of an increment too: its images are not in the output until the next one."""
    write(tmp_path / "in", "a.png", "shut/c.png")
    given: dict[str, Any] = {"incremental": True, "retry_errors": True}
    with ExitStack() as shut:
        shut.enter_context(unlistable("shut", DENIED))
        if before:
            run(tiny_bundle, tmp_path / "in", tmp_path / "out", **given)
        monkeypatch.setattr(job, "warm_up", shut.close)  # between the listing and the reading
        early = run(tiny_bundle, tmp_path / "in", tmp_path / "out", **given, overwrite=overwrite)
    assert (early.images, early.errors, early.uncounted, early.complete) == (2, 1, 1, False)
    listed_now = run(tiny_bundle, tmp_path / "in", tmp_path / "out", **given)
    assert (listed_now.images, listed_now.errors, listed_now.uncounted, listed_now.complete) == (3, 1, 0, True)
