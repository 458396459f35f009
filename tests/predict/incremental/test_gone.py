"""`--incremental`: rows of images and files that are gone stay, also of those that were to be read again."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from increments import IMAGES, LABEL, Counting, counts, rows, run, table, tar, ten_images, write
from vitx.core.bundle import Bundle
from vitx.predict import PREDICTIONS
from vitx.predict.ledger import Ledger
from vitx.predict.outputs.parts import Part, part_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ten_images(tmp_path / "in")


def test_rows_of_images_that_are_gone_outlive_a_kill_after_a_file_was_replaced(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was there has them, and so has the new one; the images are in none."""
    out = tmp_path / "out"
    run(tiny_bundle, folder, out)
    before = rows(out)
    write(folder / "00.png", IMAGES[1])
    (folder / "01.png").unlink()
    publish = Part.publish

    def killed(part: Part) -> None:
        publish(part)
        raise KeyboardInterrupt

    monkeypatch.setattr(Part, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, out)
    monkeypatch.undo()
    run(tiny_bundle, folder, out)
    assert rows(out) == before | {"00.png": before["01.png"]}


def removed_after_the_listing(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    extend = Ledger.extend

    def removing(*given: Any, **changes: Any) -> None:
        for path in paths:
            path.unlink()
        extend(*given, **changes)

    monkeypatch.setattr(Ledger, "extend", removing)


@pytest.mark.parametrize("stopped", [False, True])
def test_rows_of_images_stay_that_changed_and_were_gone_before_they_were_read(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """stopped: before anything was read; gone since then."""
    out, last = tmp_path / "out", folder / "03.png"
    write(folder / "bad.png", b"no image")
    run(tiny_bundle, folder, out, batch_size=1)
    before = rows(out)
    for index in (0, 1, 2, 3, 5):
        write(folder / f"{index:02d}.png", IMAGES[index + 1])
    write(folder / "bad.png", b"")
    gone = [folder / "00.png", folder / "01.png", last, folder / "05.png", folder / "bad.png"]
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            run(tiny_bundle, folder, out, Counting(0), batch_size=1)
        for path in gone:
            path.unlink()
    else:
        removed_after_the_listing(monkeypatch, *gone)
    summary, predicted = run(tiny_bundle, folder, out, batch_size=1)
    assert (summary.complete, predicted, summary.images) == (True, 1, 11)
    now = rows(out)
    assert now.pop("bad.png") in (before.pop("bad.png"), "cannot open the image: No such file or directory")
    assert now == before | {"02.png": LABEL[3]}
    monkeypatch.undo()
    write(last, IMAGES[5])
    summary, predicted = run(tiny_bundle, folder, out)
    assert (counts(summary), predicted, rows(out)["03.png"]) == ((0, 1, 6, 4), 1, LABEL[5])


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("key", [None, "id"])
def test_rows_of_files_stay_that_changed_and_were_gone_before_they_were_read(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, key: str | None
) -> None:
    out, given = tmp_path / "out", dict[str, Any](key=key)
    kept = [tmp_path / "many.parquet", tmp_path / "one.parquet", *([] if key else [tmp_path / "a.tar"])]
    source = tmp_path / ("*.parquet" if key else "*.*")

    def begin(first: int) -> None:
        """Two row groups of the same rows, and one of more than before; with --key the first may move to the second."""
        if not key:
            tar(tmp_path / "a.tar", {"0.png": IMAGES[first], "1.png": IMAGES[1], "no": b""})
        table(tmp_path / "many.parquet", IMAGES[first : first + 4], 2, id=["a", "b", "c", "d"])
        table(tmp_path / "one.parquet", IMAGES[first : first + 2 + first], 9, id=["e", "f", "g", "h"][: 2 + first])
        table(tmp_path / "stays.parquet", IMAGES[first : first + 1], 9, id=["i"])

    begin(0)
    run(tiny_bundle, source, out, **given)
    before = rows(out)
    begin(1)
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            run(tiny_bundle, source, out, Counting(0), **given)
        for path in kept:
            path.unlink()
    else:
        removed_after_the_listing(monkeypatch, *kept)
    summary, predicted = run(tiny_bundle, source, out, **given)
    assert (summary.complete, predicted) == (True, 1)
    changed = {"i" if key else f"{tmp_path}/stays.parquet/0000000": LABEL[1]}
    now = rows(out)
    if key:  # a key that moved to another row group could be there twice
        assert [name for name in before if name not in now] == ["a", "b", "c", "d"]
        changed |= {name: now[name] for name in now if "many.parquet/" in name}
        assert len(changed) == 5
        before = {name: value for name, value in before.items() if name in now}
    assert now == before | changed
    monkeypatch.undo()
    begin(1)
    assert run(tiny_bundle, source, out, **given)[0].errors == 0
    run(tiny_bundle, source, tmp_path / "whole", **given)
    assert rows(out) == rows(tmp_path / "whole")


def test_a_key_is_there_once_after_a_file_that_was_cut_otherwise_is_gone(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source, out = tmp_path / "?.parquet", tmp_path / "out"
    table(tmp_path / "a.parquet", IMAGES[:4], 2)
    table(tmp_path / "b.parquet", IMAGES[:1], 2)
    run(tiny_bundle, source, out)
    table(tmp_path / "a.parquet", IMAGES[:4], 1)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, source, out, Counting(0))
    (tmp_path / "a.parquet").unlink()
    summary, _ = run(tiny_bundle, source, out)
    assert (summary.complete, summary.images, summary.errors) == (True, 5, 4)
    assert len(rows(out)) == 5


def test_a_line_of_a_list_whose_image_is_gone_keeps_its_row(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    listing, out = folder / "list.txt", tmp_path / "out"
    listing.write_text("03.png\n01.png\nabsent.png\n")
    run(tiny_bundle, listing, out)
    before = rows(out)
    (folder / "03.png").unlink()
    summary, predicted = run(tiny_bundle, listing, out)
    assert (counts(summary), predicted, rows(out)) == ((0, 0, 2, 1), 0, before)


@pytest.mark.parametrize("kind", ["images", "tar"])
@pytest.mark.parametrize("damage", [b"", b"PAR1", None], ids=["empty", "cut", "of another"])
def test_a_file_that_was_damaged_before_its_rows_were_kept_is_made_again(
    tiny_bundle: Bundle, tmp_path: Path, kind: str, damage: bytes | None
) -> None:
    """Between a stop and the next run. None of its rows can be kept, nor be counted."""
    source, out = tmp_path / ("in" if kind == "images" else "*.tar"), tmp_path / "out"
    ten_images(tmp_path / "in")
    for name in "ab":
        tar(tmp_path / f"{name}.tar", {"0.png": IMAGES[0], "1.png": IMAGES[1]})
    run(tiny_bundle, source, out)
    write(tmp_path / "in" / "00.png", IMAGES[1])
    tar(tmp_path / "a.tar", {"0.png": IMAGES[1]})
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, source, out, Counting(0))
    pq.write_table(pa.concat_tables([pq.read_table(out / PREDICTIONS)] * 2), tmp_path / "more")
    part_path(out, 1).write_bytes((tmp_path / "more").read_bytes() if damage is None else damage)
    run(tiny_bundle, source, out)
    run(tiny_bundle, source, tmp_path / "whole")
    assert rows(out) == rows(tmp_path / "whole")
    assert run(tiny_bundle, source, out)[1] == 0
