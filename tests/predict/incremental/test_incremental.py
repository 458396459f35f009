"""`--incremental`: what is new or changed is predicted, nothing else is, and every key keeps exactly one row."""

import json
import os
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, listed_names
from cli_fixture import Vitx
from increments import IMAGES, LABEL, Counting, counts, rows, run, table, tar, ten_images, write
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS, SUMMARY, increment
from vitx.predict.inputs.inventory import list_input
from vitx.predict.inputs.stores import version_of
from vitx.predict.ledger import EVERY_ROW, Claim, Ledger, Shard, ShardRecord
from vitx.predict.outputs.parts import part_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ten_images(tmp_path / "in")


def test_an_input_that_did_not_change_is_left_alone(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, predicted = run(tiny_bundle, folder, out)
    assert (counts(first), predicted) == ((10, 0, 0, 0), 10)
    before = {path: path.stat().st_mtime_ns for path in (out / PREDICTIONS).iterdir()}
    again, predicted = run(tiny_bundle, folder, out)
    assert (counts(again), predicted) == ((0, 0, 10, 0), 0)
    assert again == first.model_copy(update={"increment": again.increment})
    assert json.loads((out / SUMMARY).read_text())["increment"] == {"new": 0, "changed": 0, "unchanged": 10, "gone": 0}
    assert {path: path.stat().st_mtime_ns for path in (out / PREDICTIONS).iterdir()} == before
    assert not [path for path in (out / ".vitx").iterdir() if path.name.startswith(".")]


def test_an_image_beside_tar_files_is_no_reason_to_leave_them_out(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    tar(folder / "a.tar", {"0.png": IMAGES[0], "1.png": IMAGES[1]})
    run(tiny_bundle, folder, tmp_path / "out")
    tar(folder / "b.tar", {"2.png": IMAGES[2]})
    write(folder / "preview.png", IMAGES[3])
    with pytest.raises(InputError, match="had tar or Parquet files alone, and now has images beside them"):
        run(tiny_bundle, folder, tmp_path / "out")
    (folder / "preview.png").unlink()
    summary, predicted = run(tiny_bundle, folder, tmp_path / "out")
    assert (summary.images, predicted) == (3, 1)


def test_the_first_run_lists_its_input_once(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour each, of an object store."""
    listed: list[str] = []

    def noted(*given: Any, **how: Any) -> Any:
        listed.append("again")
        return list_input(*given, **how)

    monkeypatch.setattr(increment, "list_input", noted)
    summary, _ = run(tiny_bundle, folder, tmp_path / "out")
    assert (counts(summary), listed) == ((10, 0, 0, 0), [])
    run(tiny_bundle, folder, tmp_path / "out")
    assert listed == ["again"]


def test_what_is_new_or_changed_is_predicted_and_nothing_is_removed(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    before = rows(out)
    untouched = part_path(out, 3).stat().st_mtime_ns
    for name, index in (("00", 1), ("06", 7), ("055", 2), ("99", 3), ("a", 0)):
        write(folder / f"{name}.png", IMAGES[index])
    write(folder / "sub.txt", b"no image")
    (folder / "02.png").unlink()
    summary, predicted = run(tiny_bundle, folder, out)
    assert (counts(summary), predicted) == ((3, 2, 7, 1), 5)
    assert (summary.images, summary.complete) == (13, True)
    assert summary.skipped_names.by_suffix == {".txt": 1}
    changed = {"00.png": LABEL[1], "06.png": LABEL[7], "055.png": LABEL[2], "99.png": LABEL[3], "a.png": LABEL[0]}
    assert rows(out) == before | changed
    assert summary.classes == {label: list(rows(out).values()).count(label) for label in LABELS}
    assert part_path(out, 3).stat().st_mtime_ns == untouched
    again, predicted = run(tiny_bundle, folder, out)
    assert (counts(again), predicted) == ((0, 0, 12, 1), 0)


def test_pandas_reads_one_row_for_each_image_with_what_was_read(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path
) -> None:
    run(tiny_bundle, folder, tmp_path / "out")
    for index in range(3):
        write(folder / "05.png", IMAGES[index])
        write(folder / f"x{index}.png", IMAGES[index])
        run(tiny_bundle, folder, tmp_path / "out")
    frame = pandas.read_parquet(tmp_path / "out" / PREDICTIONS)
    assert sorted(frame["path"]) == sorted(path.name for path in folder.iterdir())
    for path, version in zip(frame["path"], frame["source_version"], strict=True):
        found = (folder / path).stat()
        assert version == version_of(str(folder / path)) == f"{found.st_size}-{found.st_mtime_ns}"


def test_each_of_size_and_time_tells_a_change(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    run(tiny_bundle, folder, tmp_path / "out")
    found = (folder / "00.png").stat()
    with (folder / "00.png").open("ab") as file:
        file.write(b"\0")
    os.utime(folder / "00.png", ns=(found.st_atime_ns, found.st_mtime_ns))
    os.utime(folder / "01.png", ns=(found.st_atime_ns, (folder / "01.png").stat().st_mtime_ns - 1))
    assert counts(run(tiny_bundle, folder, tmp_path / "out")[0]) == (0, 2, 8, 0)


def test_what_could_not_be_read_is_tried_again(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """A file that is no image is read once; one that cannot be opened may be, the next time."""
    write(folder / "bad.png", b"no image")
    (folder / "link.png").symlink_to(tmp_path / "later.png")
    out = tmp_path / "out"
    assert run(tiny_bundle, folder, out)[0].errors == 2
    assert counts(run(tiny_bundle, folder, out)[0]) == (0, 0, 12, 0)
    write(tmp_path / "later.png", IMAGES[3])
    summary, predicted = run(tiny_bundle, folder, out)
    assert (counts(summary), summary.errors, predicted) == ((0, 1, 11, 0), 1, 1)
    assert rows(out)["link.png"] == LABEL[3]


def test_odd_names_are_told_apart(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    names = [b"a\x01b.png", b"a.png", b"a\x01.png", b"\xff.png", b"\\xff.png", b"a\nb.png"]
    for index, name in enumerate(names):
        write(folder / os.fsdecode(name), IMAGES[index])
    run(tiny_bundle, folder, tmp_path / "out")
    before = rows(tmp_path / "out")
    write(folder / os.fsdecode(names[2]), IMAGES[7])
    write(folder / os.fsdecode(names[3]), IMAGES[8])
    summary, predicted = run(tiny_bundle, folder, tmp_path / "out")
    assert (counts(summary), predicted) == ((0, 2, 4, 0), 2)
    assert rows(tmp_path / "out") == before | {"a\x01.png": LABEL[7], "\\xff.png": LABEL[8]}


def test_tars_are_done_anew_as_a_whole(tiny_bundle: Bundle, tmp_path: Path) -> None:
    for name in "abc":
        tar(tmp_path / f"{name}.tar", {"0.png": IMAGES[0], "1.png": IMAGES[1]})
    pattern, out = tmp_path / "*.tar", tmp_path / "out"
    assert counts(run(tiny_bundle, pattern, out)[0]) == (3, 0, 0, 0)
    tar(tmp_path / "a.tar", {"1.png": IMAGES[2], "2.png": IMAGES[3], "3.png": b""})
    tar(tmp_path / "d.tar", {"0.png": IMAGES[0]})
    (tmp_path / "c.tar").unlink()
    summary, predicted = run(tiny_bundle, pattern, out)
    assert (counts(summary), predicted, summary.images, summary.errors) == ((1, 1, 1, 1), 3, 8, 1)
    assert summary.complete
    found = {key.removeprefix(f"{tmp_path}/"): value for key, value in rows(out).items()}
    assert found == {
        "a.tar/1.png": LABEL[2],
        "a.tar/2.png": LABEL[3],
        "a.tar/3.png": "not an image: empty",
        **{f"{name}.tar/{index}.png": LABEL[index] for name in "bc" for index in (0, 1)},
        "d.tar/0.png": LABEL[0],
    }
    assert counts(run(tiny_bundle, pattern, out)[0]) == (0, 0, 3, 1)


def test_a_tar_that_had_no_image_is_read_again(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """No row tells which version of it was read."""
    tar(tmp_path / "a.tar", {})
    tar(tmp_path / "b.tar", {"0.png": IMAGES[0]})
    assert run(tiny_bundle, tmp_path / "*.tar", tmp_path / "out")[0].images == 1
    tar(tmp_path / "a.tar", {"1.png": IMAGES[1]})
    summary, predicted = run(tiny_bundle, tmp_path / "*.tar", tmp_path / "out")
    assert (counts(summary), predicted, summary.images) == ((0, 1, 1, 0), 1, 2)


@pytest.mark.parametrize(
    ("before", "after"), [((6, 2), (10, 2)), ((10, 2), (3, 2)), ((8, 2), (8, 8)), ((8, 8), (8, 2))]
)
def test_a_parquet_file_is_done_anew_with_more_row_groups_or_fewer(
    tiny_bundle: Bundle, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    source, out = tmp_path / "?.parquet", tmp_path / "out"
    table(tmp_path / "b.parquet", IMAGES[:3], 2)
    table(tmp_path / "a.parquet", IMAGES[: before[0]], before[1], id=list(range(before[0])))
    run(tiny_bundle, source, out)
    table(tmp_path / "a.parquet", IMAGES[1 : 1 + after[0]], after[1], id=list(range(after[0])))
    summary, predicted = run(tiny_bundle, source, out)
    assert (counts(summary), predicted, summary.images) == ((0, 1, 1, 0), after[0], after[0] + 3)
    assert summary.complete
    run(tiny_bundle, source, tmp_path / "whole")
    assert rows(out) == rows(tmp_path / "whole")
    assert counts(run(tiny_bundle, source, out)[0]) == (0, 0, 2, 0)


@pytest.mark.parametrize("row_groups", [0, 1])
def test_a_parquet_file_that_loses_all_its_rows_is_changed_and_not_gone(
    tiny_bundle: Bundle, tmp_path: Path, row_groups: int
) -> None:
    source, out = tmp_path / "?.parquet", tmp_path / "out"
    table(tmp_path / "a.parquet", IMAGES[:4], 2)
    table(tmp_path / "b.parquet", IMAGES[:2], 2)
    run(tiny_bundle, source, out)

    def empty(path: Path) -> None:
        file = pa.BufferOutputStream()
        with pq.ParquetWriter(file, pq.read_schema(path)) as writer:
            for _ in range(row_groups):
                writer.write_table(pq.read_table(path)[:0])
        write(path, file.getvalue().to_pybytes())

    empty(tmp_path / "a.parquet")
    for counted in ((0, 1, 1, 0), (0, 0, 2, 0)):
        assert counts(run(tiny_bundle, source, out)[0]) == counted
        assert list(rows(out)) == [f"{tmp_path}/b.parquet/{row:07d}" for row in (0, 1)]
    empty(tmp_path / "b.parquet")
    with pytest.raises(
        InputError, match=r"has no images: none of its Parquet files, such as .*/[ab]\.parquet, has a row$"
    ):
        run(tiny_bundle, source, out)
    table(tmp_path / "a.parquet", IMAGES[:1], 2)
    assert counts(run(tiny_bundle, source, out)[0]) == (0, 2, 0, 0)
    assert list(rows(out)) == [f"{tmp_path}/a.parquet/0000000"]


def test_rows_that_name_an_image_have_the_version_of_their_file_or_none(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """An archive tells no time: with those of the images the file would be another one each time."""
    write(tmp_path / "0.png", IMAGES[0])
    named = pa.array([{"path": f"{tmp_path}/0.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"image": named}), tmp_path / "a.parquet")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.parquet", "in/a.parquet")
    for new in ((1, 0, 0, 0), (0, 0, 1, 0)):
        summary, _ = run(tiny_bundle, f"zip://in::file://{tmp_path}/a.zip", tmp_path / "out")
        assert counts(summary) == new
    assert rows(tmp_path / "out") == {"a.parquet/0000000": LABEL[0]}


def test_a_file_that_becomes_unreadable_and_readable_again(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    table(source / "a.parquet", IMAGES[:6], 2)
    table(source / "b.parquet", IMAGES[:2], 2)
    run(tiny_bundle, source, out)
    write(source / "a.parquet", b"torn")
    summary, _ = run(tiny_bundle, source, out)
    assert (counts(summary), summary.images, summary.errors) == ((0, 1, 1, 0), 3, 1)
    table(source / "a.parquet", IMAGES[:5], 2)
    summary, predicted = run(tiny_bundle, source, out)
    assert (counts(summary), summary.images, summary.errors, predicted) == ((0, 1, 1, 0), 7, 0, 5)
    rows(out)


def test_lists_name_what_is_new_in_their_order(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    listing, out = folder / "list.txt", tmp_path / "out"
    listing.write_text("03.png\n01.png\n03.png\nabsent.png\n")
    first, _ = run(tiny_bundle, listing, out)
    assert (first.images, counts(first)) == (4, (4, 0, 0, 0))
    write(folder / "03.png", IMAGES[0])
    listing.write_text("09.png\n03.png\n00.png\n01.png\n03.png\n09.png\n")
    summary, predicted = run(tiny_bundle, listing, out)
    assert (counts(summary), predicted) == ((2, 2, 1, 1), 4)
    found = pq.read_table(out / PREDICTIONS).to_pylist()
    assert [row["path"] for row in found] == ["03.png", "01.png", "03.png", "absent.png", "09.png", "00.png"]
    assert [row["class"] for row in found] == [LABEL[0], LABEL[1], LABEL[0], None, LABEL[9], LABEL[0]]


def test_objects_of_a_store(tiny_bundle: Bundle, tmp_path: Path) -> None:
    store, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    for index in range(5):
        store.pipe(f"/{tmp_path.name}/{index}.png", IMAGES[index])
    run(tiny_bundle, url, tmp_path / "out")
    assert counts(run(tiny_bundle, url, tmp_path / "out")[0]) == (0, 0, 5, 0)
    store.pipe(f"/{tmp_path.name}/1.png", IMAGES[2])
    store.pipe(f"/{tmp_path.name}/sub/1.png", IMAGES[3])
    store.rm(f"/{tmp_path.name}/0.png")
    summary, predicted = run(tiny_bundle, url, tmp_path / "out")
    assert (counts(summary), predicted) == ((1, 1, 3, 1), 2)
    found = rows(tmp_path / "out")
    assert (found["1.png"], found["sub/1.png"], len(found)) == (LABEL[2], LABEL[3], 6)


@pytest.mark.parametrize("most", range(6))
def test_a_run_that_is_stopped_anywhere_is_gone_on_with(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, most: int
) -> None:
    """Also while the input changes further: nothing is lost, nothing is there twice, and old rows stay until then."""
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    for index in (0, 5, 9):
        write(folder / f"{index:02d}.png", IMAGES[index + 1])
    for index in range(10, 14):
        write(folder / f"{index}.png", IMAGES[index])
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, out, Counting(most))
    assert not (out / SUMMARY).exists()
    assert {f"{index:02d}.png" for index in range(10)} <= set(rows(out))
    write(folder / "06.png", IMAGES[7])
    write(folder / "10.png", IMAGES[11])
    write(folder / "14.png", IMAGES[14])
    summary, _ = run(tiny_bundle, folder, out)
    assert (summary.images, summary.complete) == (15, True)
    run(tiny_bundle, folder, tmp_path / "whole")
    assert rows(out) == rows(tmp_path / "whole")
    assert counts(run(tiny_bundle, folder, out)[0]) == (0, 0, 15, 0)


def test_a_first_run_that_was_stopped_says_what_was_left(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, tmp_path / "out", Counting(4), batch_size=4)
    write(folder / "10.png", IMAGES[10])
    summary, predicted = run(tiny_bundle, folder, tmp_path / "out")
    done = 11 - predicted
    assert done in (0, 4)
    assert counts(summary) == (predicted, 0, done, 0)


def test_parts_that_were_damaged_are_new(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    run(tiny_bundle, folder, tmp_path / "out")
    part_path(tmp_path / "out", 2).write_bytes(b"damaged")
    summary, predicted = run(tiny_bundle, folder, tmp_path / "out")
    assert (counts(summary), predicted, len(rows(tmp_path / "out"))) == ((4, 0, 6, 0), 4, 10)


def test_nobody_else_adds_anything_meanwhile(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    write(folder / "10.png", IMAGES[10])
    write(folder / "00.png", IMAGES[1])
    extend = Ledger.extend

    def slow(*given: Any, **changes: Any) -> None:
        with pytest.raises(InputError, match=rf"^process {os.getpid()} on .* is writing to '{out}': wait until it"):
            run(tiny_bundle, folder, out)
        extend(*given, **changes)

    monkeypatch.setattr(Ledger, "extend", slow)
    summary, _ = run(tiny_bundle, folder, out)
    assert (counts(summary), len(rows(out))) == ((1, 1, 9, 0), 11)


def test_errors_are_tried_again_at_the_same_time(tiny_bundle: Bundle, tmp_path: Path) -> None:
    paths = [{"bytes": None, "path": f"{index}.png"} for index in range(4)]
    table(tmp_path / "a.parquet", paths, 2)  # type: ignore[arg-type]
    write(tmp_path / "0.png", IMAGES[0])
    out = tmp_path / "out"
    assert run(tiny_bundle, tmp_path / "a.parquet", out)[0].errors == 3
    for index in (1, 2, 3):
        write(tmp_path / f"{index}.png", IMAGES[index])
    assert counts(run(tiny_bundle, tmp_path / "a.parquet", out)[0]) == (0, 0, 1, 0)
    summary, predicted = run(tiny_bundle, tmp_path / "a.parquet", out, retry_errors=True)
    assert (summary.errors, predicted) == (0, 3)


def test_columns_and_keys_of_further_files(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source, out = tmp_path / "?.parquet", tmp_path / "out"
    table(tmp_path / "a.parquet", IMAGES[:2], 2, id=["a", "b"], label=[0, 1])
    run(tiny_bundle, source, out, key="id")
    table(tmp_path / "b.parquet", IMAGES[:2], 2, id=["c", "d"])
    run(tiny_bundle, source, out, key="id")
    assert pq.read_table(out / PREDICTIONS)["label"].to_pylist() == [0, 1, None, None]
    table(tmp_path / "c.parquet", IMAGES[:1], 2, id=["e"], further=[0])
    with pytest.raises(InputError, match=r"c\.parquet has a column 'further', which the output does not have: choose"):
        run(tiny_bundle, source, out, key="id")
    table(tmp_path / "c.parquet", IMAGES[:1], 2, id=["e"], label=["x"])
    with pytest.raises(InputError, match=r"'label' is string in .*c\.parquet and int64 in the output: expected one t"):
        run(tiny_bundle, source, out, key="id")
    table(tmp_path / "c.parquet", IMAGES[:1], 2, id=["d"])
    with pytest.raises(InputError, match=r'^--key id: "d" is in row 0 of .*c\.parquet and in row 1 of .*b\.parquet: '):
        run(tiny_bundle, source, out, key="id")
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(InputError, match=r"row 1 of part-00000002\.parquet in the output, whose .*b\.parquet is gone"):
        run(tiny_bundle, source, out, key="id")
    table(tmp_path / "c.parquet", IMAGES[:1], 2, id=["e"])
    assert counts(run(tiny_bundle, source, out, key="id")[0]) == (1, 0, 1, 1)
    assert list(rows(out)) == ["a", "b", "c", "d", "e"]


def test_an_input_that_is_empty_now_is_refused(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """Rather a store that is not there than images that are all gone."""
    run(tiny_bundle, folder, tmp_path / "out")
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"' holds no image: looked for"):
        run(tiny_bundle, folder, tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 10
    assert not [path for path in (tmp_path / "out" / ".vitx").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": (1, 2)}, "^--incremental with --shard: what is new would change which job has which image; leave o"),
        ({"draft": True}, "^--incremental with --draft: only the first input would be sampled; leave out one of the t"),
    ],
)
def test_options_that_do_not_go_with_it(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(tiny_bundle, folder, tmp_path / "out", **options)


def test_a_run_is_incremental_from_the_first_time_on(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """Or nothing would be known of what it has read."""
    run(tiny_bundle, folder, tmp_path / "out", incremental=False)
    with pytest.raises(InputError, match="incremental was False, is True now"):
        run(tiny_bundle, folder, tmp_path / "out")


def test_the_command_says_what_it_did(tiny_bundle: Bundle, folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    given = ("predict", tiny_bundle.path, folder, "--out", tmp_path / "out", "--device", "cpu", "--incremental")
    assert vitx(*given)[0] == 0
    write(folder / "00.png", IMAGES[1])
    write(folder / "10.png", IMAGES[10])
    (folder / "09.png").unlink()
    code, out, err = vitx(*given)
    assert (code, "1 new, 1 changed, 8 unchanged, 1 gone" in out) == (0, True)
    assert "predict: 1 new, 1 changed, 8 unchanged, 1 gone\n" in err
    code, out, _ = vitx(*given, "--json", "--quiet")
    assert json.loads(out)["increment"] == {"new": 0, "changed": 0, "unchanged": 10, "gone": 1}


def test_an_extension_keeps_the_rows_of_a_finished_shard(tmp_path: Path) -> None:
    shard, other = Shard("images", "", 0, 3), Shard("tar", "", 0, None)
    (tmp_path / "ledger").unlink(missing_ok=True)
    listed_names(tmp_path / "ledger", "abc")
    with closing(Ledger(tmp_path / "ledger")) as ledger:

        def extend(number: int, now: dict[str, str], **changes: Any) -> tuple[int, ...]:
            ledger.find(now.items(), once=True)
            counts = ledger.compare((place + 1, "old", 1, place) for place in range(3))
            ledger.extend({"number": number}, 9, **changes)
            return counts

        ledger.create({}, [shard])
        ledger.commit(Claim(1, shard), ShardRecord("old", 3, 0, {}), lambda: None)
        assert extend(1, {"d": "new", "c": "new", "b": "old", "a": "new"}) == (1, 0, 2, 1, 0)
        assert list(ledger.unfinished()) == [
            Claim(1, shard, "old", frozenset({0, 2})),
            Claim(2, Shard("images", "", 3, 1)),
        ]
        # Before it was done: it still keeps the rows of the last finished file.
        assert extend(2, {"b": "new", "a": "old"}, replaced=[(2, other, True)], added=[other]) == (0, 0, 1, 1, 2)
        assert [claim.again for claim in ledger.unfinished()] == [{1}, {EVERY_ROW}, frozenset()]
        assert ledger.totals().expected is None
        ledger.commit(next(ledger.unfinished()), ShardRecord("new", 3, 0, {}), lambda: None)
        assert (ledger.description(), [claim.id for claim in ledger.unfinished()]) == ({"number": 2}, [2, 3])


@pytest.mark.parametrize("most", [0, 2, 4])
def test_a_parquet_file_that_changes_before_it_was_read(tiny_bundle: Bundle, tmp_path: Path, most: int) -> None:
    """Its shards are of row groups that it no longer has."""
    source, out = tmp_path / "?.parquet", tmp_path / "out"
    table(tmp_path / "a.parquet", IMAGES[:2], 2)
    table(tmp_path / "b.parquet", IMAGES[:8], 2)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, source, out, Counting(most))
    table(tmp_path / "b.parquet", IMAGES[:9], 3)
    summary, _ = run(tiny_bundle, source, out)
    assert (summary.images, summary.errors, summary.complete) == (11, 0, True)
    run(tiny_bundle, source, tmp_path / "whole")
    assert rows(out) == rows(tmp_path / "whole")
