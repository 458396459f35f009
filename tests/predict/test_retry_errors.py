"""`--retry-errors`: what was unreadable is read again, and every other row stays as it is, unpredicted."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, png, tar_of
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.files import sha256_file
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import KeptRows, part_path

IMAGES = [png(colour_image(index % 4, np.random.default_rng(index))) for index in range(12)]


class Counting(NumpySession):
    """Counts the images that it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.images = 0

    def _infer(self, images: Any) -> Any:
        self.images += len(images)
        return super()._infer(images)


def run(bundle: Bundle, source: Path, out: Path, **options: Any) -> tuple[PredictionSummary, int]:
    """The summary, and how many images were predicted."""
    session = Counting()
    given = PredictOptions(**{"shard_size": 4, "decode_threads": 1, "logits": True} | options)
    return predict(bundle, session, str(source), out, given, quiet=True), session.images


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / PREDICTIONS).to_pylist()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve images in three shards; three are unreadable, in two of them."""
    (tmp_path / "in").mkdir()
    for index, data in enumerate(IMAGES):
        (tmp_path / "in" / f"{index:02d}.png").write_bytes(b"" if index in (1, 3, 11) else data)
    return tmp_path / "in"


def test_only_what_failed_is_predicted_again(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, predicted = run(tiny_bundle, folder, out)
    assert (first.errors, predicted) == (3, 9)
    untouched = part_path(out, 2).stat().st_mtime_ns
    for index in (1, 11):
        (folder / f"{index:02d}.png").write_bytes(IMAGES[index])
    mended, predicted = run(tiny_bundle, folder, out, retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (12, 1, 2)
    assert mended.complete
    assert part_path(out, 2).stat().st_mtime_ns == untouched
    (folder / "03.png").write_bytes(IMAGES[3])
    mended, predicted = run(tiny_bundle, folder, out, retry_errors=True)
    assert (mended.errors, predicted) == (0, 1)
    whole, _ = run(tiny_bundle, folder, tmp_path / "whole")
    assert mended.classes == whole.classes
    for row, expected in zip(rows(out), rows(tmp_path / "whole"), strict=True):
        # A batch of other images may change the last bits.
        for name in ("logits", "top_k_scores", "score"):
            np.testing.assert_allclose(row.pop(name), expected.pop(name), rtol=1e-5)
        assert row == expected
    assert run(tiny_bundle, folder, out, retry_errors=True)[1] == 0


def test_what_still_fails_stays_a_row(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    run(tiny_bundle, folder, tmp_path / "out")
    before = rows(tmp_path / "out")
    again, predicted = run(tiny_bundle, folder, tmp_path / "out", retry_errors=True)
    assert (again.images, again.errors, predicted) == (12, 3, 0)
    assert rows(tmp_path / "out") == before


def test_a_mended_tar_gives_the_images_behind_the_damage(tiny_bundle: Bundle, tmp_path: Path) -> None:
    whole = tar_of({f"{index:02d}.png": data for index, data in enumerate(IMAGES)})
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        fifth = archive.getmembers()[5].offset
    (tmp_path / "a.tar").write_bytes(whole[:fifth] + b"\xff" * 100 + whole[fifth + 100 :])
    first, _ = run(tiny_bundle, tmp_path / "a.tar", tmp_path / "out")
    assert (first.images, first.errors) == (6, 1)
    (tmp_path / "a.tar").write_bytes(whole)
    mended, predicted = run(tiny_bundle, tmp_path / "a.tar", tmp_path / "out", retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (12, 0, 7)
    assert [row["path"] for row in rows(tmp_path / "out")] == [f"a.tar/{index:02d}.png" for index in range(12)]


def test_a_row_whose_place_has_another_image_is_not_kept(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """A tar file was written anew, with its members in another order."""

    def write(order: list[int]) -> None:
        members = {f"{index}.png": IMAGES[index] if order[0] or index else b"" for index in order}
        (tmp_path / "a.tar").write_bytes(tar_of(members))

    write([0, 1, 2, 3])
    run(tiny_bundle, tmp_path / "a.tar", tmp_path / "out")
    write([1, 0, 2, 4])
    mended, predicted = run(tiny_bundle, tmp_path / "a.tar", tmp_path / "out", retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (4, 0, 3)
    write([1, 0, 2, 4])
    run(tiny_bundle, tmp_path / "a.tar", tmp_path / "new")
    paired = zip(rows(tmp_path / "out"), rows(tmp_path / "new"), strict=True)
    assert all((row["path"], row["class"]) == (new["path"], new["class"]) for row, new in paired)


def test_equal_lines_of_a_list_are_told_apart_by_their_place(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png\nb.png\na.png\n")
    (tmp_path / "a.png").write_bytes(IMAGES[0])
    run(tiny_bundle, tmp_path / "list.txt", tmp_path / "out")
    (tmp_path / "b.png").write_bytes(IMAGES[1])
    mended, predicted = run(tiny_bundle, tmp_path / "list.txt", tmp_path / "out", retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (3, 0, 1)


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_rows_of_a_file_that_was_changed_are_not_kept(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    before, part = rows(out), part_path(out, 1)
    if damage == "removed":
        part.unlink()
    else:
        table = pq.ParquetFile(part).read()
        pq.write_table(table.set_column(1, "class", table["class"].combine_chunks().take([2, 2, 0, 0])), part)
    again, predicted = run(tiny_bundle, folder, out, retry_errors=True)
    assert (again.images, again.errors, predicted) == (12, 3, 2)
    assert rows(out) == before


def test_a_retry_that_is_stopped_is_gone_on_with_by_any_run(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """The summary of before is gone, the old files are there until the new ones replace them."""
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    for index in (1, 3, 11):
        (folder / f"{index:02d}.png").write_bytes(IMAGES[index])

    class Stopped(NumpySession):
        def _infer(self, images: Any) -> Any:
            raise KeyboardInterrupt

    options = PredictOptions(shard_size=4, decode_threads=1, logits=True, retry_errors=True)
    with pytest.raises(KeyboardInterrupt):
        predict(tiny_bundle, Stopped(), str(folder), out, options, quiet=True)
    assert not (out / SUMMARY).exists()
    assert len(rows(out)) == 12
    mended, predicted = run(tiny_bundle, folder, out)
    assert (mended.images, mended.errors, predicted) == (12, 0, 3)


def test_the_command_says_what_it_tries_again(tiny_bundle: Bundle, folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    arguments = ("predict", tiny_bundle.path, folder, "--out", tmp_path / "out", "--device", "cpu", "--shard-size", 4)
    assert vitx(*arguments)[0] == 1
    for index in (1, 3, 11):
        (folder / f"{index:02d}.png").write_bytes(IMAGES[index])
    assert vitx(*arguments)[0] == 1
    code, _, err = vitx(*arguments, "--retry-errors")
    assert code == 0, err
    assert "trying 3 unreadable images in 2 files again\n" in err


@pytest.mark.parametrize("block", [1, 2, 5, 12])
def test_rows_are_merged_by_blocks(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """One file of twelve rows, in row groups of a few; what is made anew lies within and across them."""
    monkeypatch.setattr("vitx.predict.outputs.parts.ROW_GROUP", block)
    out = tmp_path / "out"
    run(tiny_bundle, folder, out, shard_size=12, batch_size=1)
    before = rows(out)
    for index in (1, 11):
        (folder / f"{index:02d}.png").write_bytes(IMAGES[index])
    mended, predicted = run(tiny_bundle, folder, out, shard_size=12, batch_size=1, retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (12, 1, 2)
    after = rows(out)
    assert [row["path"] for row in after] == [row["path"] for row in before]
    assert [row["error"] is None for row in after] == [index != 3 for index in range(12)]
    assert [index for index in range(12) if after[index] != before[index]] == [1, 11]
    groups = pq.read_metadata(part_path(out, 1))
    assert groups.row_group(0).num_rows == block
    assert not list((out / PREDICTIONS).glob(".*"))


def test_rows_stay_when_another_worker_has_finished_the_shard_first(tmp_path: Path) -> None:
    """Ray may give a shard to two actors: the kept rows are the same in the file of the first."""
    old, new = tmp_path / "old", tmp_path / "new"
    for path, keys in ((old, ["a", "b"]), (new, ["b"])):
        pq.write_table(pa.table({"path": keys, "error": pa.nulls(len(keys), pa.string())}), path)
    kept = KeptRows.of(old, sha256_file(old), frozenset({1}))
    assert kept is not None
    assert [kept.keep("a"), kept.keep("b")] == [True, False]
    pq.write_table(pa.table({"path": ["a", "b", "c"], "error": pa.nulls(3, pa.string())}), old)
    kept.merge_into(new)
    assert pq.read_table(new)["path"].to_pylist() == ["a", "b"]


def parquet_of(path: Path, ids: range, **columns: list[Any]) -> bytes:
    """Written to `path`, and what was written."""
    table = pa.table({"image": IMAGES[: len(ids)], "id": [f"k{number}" for number in ids], **columns})
    pq.write_table(table, path)
    return path.read_bytes()


def test_keys_of_a_mended_parquet_file_are_compared_with_the_others(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    parquet_of(tmp_path / "in" / "a.parquet", range(4))
    whole = parquet_of(tmp_path / "in" / "b.parquet", range(3, 7))
    (tmp_path / "in" / "b.parquet").write_bytes(whole[:-100])
    assert run(tiny_bundle, tmp_path / "in", tmp_path / "out", key="id")[0].errors == 1
    (tmp_path / "in" / "b.parquet").write_bytes(whole)
    before = rows(tmp_path / "out")
    with pytest.raises(InputError, match=r'--key id: "k3" is in row 0 of b\.parquet and in row 3 of a\.parquet'):
        run(tiny_bundle, tmp_path / "in", tmp_path / "out", key="id", retry_errors=True)
    assert rows(tmp_path / "out") == before
    parquet_of(tmp_path / "in" / "b.parquet", range(4, 8))
    assert run(tiny_bundle, tmp_path / "in", tmp_path / "out", key="id", retry_errors=True)[0].errors == 0
    assert sorted(row["path"] for row in rows(tmp_path / "out")) == [f"k{number}" for number in range(8)]


def test_a_mended_parquet_file_says_which_columns_the_output_lacks(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    parquet_of(tmp_path / "in" / "a.parquet", range(4))
    whole = parquet_of(tmp_path / "in" / "b.parquet", range(4, 8), weight=[1.0] * 4)
    (tmp_path / "in" / "b.parquet").write_bytes(whole[:-100])
    run(tiny_bundle, tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "b.parquet").write_bytes(whole)
    assert run(tiny_bundle, tmp_path / "in", tmp_path / "out", retry_errors=True)[0].errors == 1
    (error,) = {row["error"] for row in rows(tmp_path / "out")} - {None}
    assert error.startswith("b.parquet has a column 'weight', which the output does not have: choose another folder")


def test_the_table_of_a_run_is_no_folder_for_another(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    run(tiny_bundle, folder, tmp_path / "out")
    with pytest.raises(InputError, match=r"predictions\.parquet' is the table of a run: pass its folder, '.*out'$"):
        run(tiny_bundle, folder, tmp_path / "out" / PREDICTIONS)
    assert len(rows(tmp_path / "out")) == 12


def test_a_bundle_is_no_folder_for_predictions(tiny_bundle: Bundle, folder: Path) -> None:
    for out in (tiny_bundle.path, tiny_bundle.path / "out"):
        with pytest.raises(InputError, match="would add to the bundle"):
            run(tiny_bundle, folder, out)
    Bundle.open(tiny_bundle.path)


def test_a_parquet_file_that_was_mended_is_the_same_input(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """It has row groups now, and could not be read when it was listed; of two jobs one has nothing of it."""
    source, out, jobs = tmp_path / "in", tmp_path / "out", ("1/2", "2/2")
    source.mkdir()
    pq.write_table(pa.table({"image": IMAGES[:4]}), source / "a.parquet")
    (source / "b.parquet").write_bytes(b"")
    assert run(tiny_bundle, source, out)[0].errors == 1
    assert [run(tiny_bundle, source, tmp_path / "jobs", shard=job)[0].errors for job in jobs] == [0, 1]
    pq.write_table(pa.table({"image": IMAGES[4:]}), source / "b.parquet", row_group_size=5)
    assert [run(tiny_bundle, source, tmp_path / "jobs", shard=job)[0].images for job in jobs] == [4, 1]
    mended, predicted = run(tiny_bundle, source, out, retry_errors=True)
    assert (mended.images, mended.errors, predicted) == (12, 0, 8)
    again, predicted = run(tiny_bundle, source, out)
    assert (again.images, again.errors, predicted) == (12, 0, 0)
    pq.write_table(pa.table({"image": IMAGES}), source / "c.parquet")
    with pytest.raises(InputError, match="images were added"):
        run(tiny_bundle, source, out)
