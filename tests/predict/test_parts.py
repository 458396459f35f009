"""A part of the output: its rows, what is recorded of it, and the order of the steps that make it appear."""

import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitx.core.files import sync
from vitx.predict import PREDICTIONS
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.ledger import ShardRecord
from vitx.predict.options import Share
from vitx.predict.outputs import parts
from vitx.predict.outputs.parts import (
    KeptRows,
    Part,
    PartWriter,
    Rows,
    output_schema,
    part_path,
    rank,
    remove_leftovers,
)

LABELS = ("cat", "dog", "emu")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / PREDICTIONS).mkdir()
    return tmp_path


def rows(keys: str, errors: Sequence[str | None], outputs: Sequence[Sequence[float]], **more: Any) -> Rows:
    values = np.array(outputs, dtype=np.float32).reshape(-1, 3)
    indices, scores = rank(values, 2)
    return Rows(list(keys), errors, indices, scores, **more)


def test_a_record_counts_its_rows_and_names_its_bytes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts over several groups: a group is written when it has ROW_GROUP rows, and the rest at the end."""
    monkeypatch.setattr(parts, "ROW_GROUP", 4)
    writer = PartWriter(out, 7, LABELS)
    writer.add(rows("ab", ["bad", None], [[0, 9, 0]]))
    writer.add(rows("cd", [None, None], [[9, 0, 0], [0, 9, 1]]))
    writer.add(rows("e", ["bad"], []))
    writer.add(rows("fgh", [None, "bad", None], [[0, 9, 2], [0, 0, 9]]))
    writer.add(rows("i", [None], [[9, 0, 0]]))
    part = writer.finish()
    assert part.temporary.parent == out / PREDICTIONS
    assert re.fullmatch(r"\.part-00000007\.parquet\.[0-9a-f]{32}", part.temporary.name)
    assert part.temporary != PartWriter(out, 7, LABELS).finish().temporary
    assert part.path == part_path(out, 7) == out / PREDICTIONS / "part-00000007.parquet"
    digest = hashlib.sha256(part.temporary.read_bytes()).hexdigest()
    assert part.record == ShardRecord(digest, images=9, errors=3, classes={1: 3, 0: 2, 2: 1})
    file = pq.ParquetFile(part.temporary)
    assert [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)] == [4, 4, 1]
    assert file.read()["path"].to_pylist() == list("abcdefghi")
    assert file.read()["class"].to_pylist() == [None, "dog", "cat", "dog", None, "dog", None, "emu", "cat"]


def test_scores_are_float32_and_indices_int32(out: Path) -> None:
    indices, scores = rank(np.array([[1, 3, 2], [0, 0, 0]], dtype=np.float32), 2)
    assert (indices.dtype.name, scores.dtype.name) == ("int32", "float32")
    assert indices.tolist() == [[1, 2], [0, 1]]
    total = math.e + math.e**2 + math.e**3
    np.testing.assert_allclose(scores, [[math.e**3 / total, math.e**2 / total], [1 / 3, 1 / 3]], rtol=1e-6)
    schema = output_schema(("logits", "embedding"))
    assert {field.name: str(field.type) for field in schema} == {
        "path": "string",
        "class": "string",
        "class_index": "int32",
        "score": "float",
        "top_k_classes": "list<item: string>",
        "top_k_scores": "list<item: float>",
        "error": "string",
        "logits": "list<item: float>",
        "embeddings": "list<item: float>",
    }


def test_values_of_float32_stay_what_they_are(out: Path) -> None:
    values = np.array([[1e6, -1e6, 1e-9], [65505, 0.5, -2]], dtype=np.float32)
    writer = PartWriter(out, 1, LABELS, output_schema(("logits", "embedding")))
    writer.add(rows("ab", [None, None], [[1, 0, 0]] * 2, lists={"logits": values, "embedding": -values[:, :2]}))
    table = pq.read_table(writer.finish().temporary)
    assert table["logits"].to_pylist() == values.tolist()
    assert table["embeddings"].to_pylist() == (-values[:, :2]).tolist()


def test_a_name_that_is_not_utf8_is_escaped_in_an_error(out: Path) -> None:
    writer = PartWriter(out, 1, LABELS)
    writer.add(Rows(["a\\xff"], ["no \udce9"], np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)))
    (row,) = pq.read_table(writer.finish().temporary).to_pylist()
    assert (row["path"], row["error"]) == ("a\\xff", "no \\xe9")


class Steps:
    """Records the calls that make a file durable, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[str, str]] = []
        replace, close = os.replace, pq.ParquetWriter.close

        def replaced(source: Path, target: Path) -> None:
            replace(source, target)
            self.taken.append(("rename", Path(target).name))

        def synced(path: Path) -> None:
            sync(path)
            self.taken.append(("sync", Path(path).name))

        def closed(writer: Any) -> None:
            close(writer)
            self.taken.append(("close", ""))

        monkeypatch.setattr(os, "replace", replaced)
        monkeypatch.setattr(parts, "sync", synced)
        monkeypatch.setattr(pq.ParquetWriter, "close", closed)


def test_abandoned_files_are_removed(out: Path) -> None:
    writer = PartWriter(out, 1, LABELS)
    writer.add(rows("a", [None], [[1, 0, 0]]))
    writer.abandon()
    assert not any((out / PREDICTIONS).iterdir())


def test_a_footer_that_finds_no_room_does_not_hide_the_error(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PartWriter(out, 1, LABELS)
    close = writer._writer.close

    def full() -> None:
        close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._writer, "close", full)
    writer.abandon()
    assert not any((out / PREDICTIONS).iterdir())


def test_leftovers_are_temporary_files_alone(out: Path) -> None:
    predictions = out / PREDICTIONS
    kept = ["part-00000001.parquet", ".hidden", ".part-00000001.txt.a"]
    for name in (*kept, ".part-00000001.parquet.ray.1", ".part-00000002.parquet.other"):
        (predictions / name).touch()
    remove_leftovers(out)
    assert {path.name for path in predictions.iterdir()} == set(kept)


def test_a_label_may_appear_twice(out: Path) -> None:
    writer = PartWriter(out, 1, ("same", "same", "else"))
    writer.add(rows("ab", [None, None], [[0, 9, 0], [9, 0, 0]]))
    part = writer.finish()
    assert part.record.classes == {0: 1, 1: 1}
    table = pq.read_table(part.temporary)
    assert table["class"].to_pylist() == ["same", "same"]
    assert table["class_index"].to_pylist() == [1, 0]
    assert table.schema.field("path").type == pa.string()


def test_a_record_has_what_was_listed_and_skipped_and_the_file_its_footer(out: Path) -> None:
    writer = PartWriter(out, 1, LABELS, output_schema(footer={"vitx.bundle": "b"}))
    writer.add(rows("a", [None], [[1, 0, 0]]))
    part = writer.finish(5, SkippedNames({".txt": 4}, ["a.txt"]))
    assert (part.record.listed, part.record.skipped.count) == (5, 4)
    assert pq.read_metadata(part.temporary).metadata[b"vitx.bundle"] == b"b"
    assert PartWriter(out, 2, LABELS).finish().record.listed == 0


def finished(out: Path, *groups: Rows, kept: KeptRows | None = None, footer: str = "") -> Part:
    """Shard 3, published."""
    writer = PartWriter(out, 3, LABELS, output_schema(("logits",), footer={"made": footer}))
    for group in groups:
        writer.add(group)
    part = writer.finish(kept=kept)
    part.publish()
    return part


def with_logits(keys: str, errors: Sequence[str | None], outputs: Sequence[Sequence[float]]) -> Rows:
    values = np.array(outputs, dtype=np.float32).reshape(-1, 3)
    return rows(keys, errors, outputs, lists={"logits": values})


def test_kept_rows_stay_as_they_were_among_the_new_ones(out: Path) -> None:
    first = with_logits("abcdef", [None, "bad", None, "bad", None, None], [[9, 0, 0], [0, 9, 0], [0, 0, 9], [9, 1, 0]])
    part = finished(out, first, footer="first")
    kept = KeptRows.of(part.path, part.record.digest)
    assert kept is not None
    # The fifth place has another image now, and there is a seventh.
    assert [kept.keep(key) for key in "abcdXfg"] == [True, False, True, False, False, True, False]
    new = with_logits("bdXg", [None, "still bad", None, None], [[0, 9, 2], [0, 1, 9], [9, 0, 3]])
    again = finished(out, new, kept=kept, footer="second")
    table = pq.read_table(again.path)
    assert table["path"].to_pylist() == list("abcdXfg")
    assert table["error"].to_pylist() == [None, None, None, "still bad", None, None, None]
    assert table["class_index"].to_pylist() == [0, 1, 1, None, 2, 0, 0]
    assert table["logits"].to_pylist() == [[9, 0, 0], [0, 9, 2], [0, 9, 0], None, [0, 1, 9], [9, 1, 0], [9, 0, 3]]
    assert (again.record.images, again.record.errors, again.record.classes) == (7, 1, {0: 3, 1: 2, 2: 1})
    assert again.record.digest == hashlib.sha256(again.path.read_bytes()).hexdigest()
    assert pq.read_metadata(again.path).metadata[b"made"] == b"second"


def test_only_the_file_that_was_recorded_is_kept(out: Path) -> None:
    part = finished(out, with_logits("a", [None], [[9, 0, 0]]))
    assert KeptRows.of(part.path, part.record.digest) is not None
    for path, digest in ((part.path, "other"), (part.path, None), (out / "gone", part.record.digest)):
        assert KeptRows.of(path, digest) is None


def test_a_group_without_a_readable_image_has_null_lists(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP", 1)
    unread = rows("a", ["bad"], [])
    part = finished(out, unread, with_logits("b", [None], [[0, 9, 0]]), unread)
    assert pq.read_table(part.path)["logits"].to_pylist() == [None, [0, 9, 0], None]


def test_leftovers_of_other_jobs_are_theirs(out: Path) -> None:
    names = {number: f".{part_path(out, number).name}.w" for number in range(1, 7)}
    for name in (*names.values(), ".part-x.parquet.w"):
        (out / PREDICTIONS / name).touch()
    remove_leftovers(out, share=Share(3, 3))
    left = {path.name for path in (out / PREDICTIONS).iterdir()}
    assert left == {".part-x.parquet.w", *(names[number] for number in (1, 2, 4, 5))}
    remove_leftovers(out, share=Share(2, 3))
    assert names[2] not in {path.name for path in (out / PREDICTIONS).iterdir()}
    assert (out / PREDICTIONS / names[4]).exists()


def test_a_file_is_whole_on_the_disk_before_it_has_its_name(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    part = PartWriter(out, 1, LABELS).finish()
    assert steps.taken == [("close", ""), ("sync", part.temporary.name)]
    part.publish()
    assert steps.taken[2:] == [("rename", "part-00000001.parquet")]
    assert [path.name for path in (out / PREDICTIONS).iterdir()] == ["part-00000001.parquet"]


def test_an_abandoned_file_is_closed(out: Path) -> None:
    writer = PartWriter(out, 1, LABELS)
    writer.abandon()
    assert not writer._writer.is_open


def test_names_of_files_and_columns_are_as_documented(out: Path) -> None:
    assert part_path(out, 12) == out / "predictions.parquet" / "part-00000012.parquet"
    schema = output_schema(("logits", "embedding", "attention"))
    assert schema.names[7:] == ["logits", "embeddings", "attention"]
    assert schema.types[7:] == [pa.list_(pa.float32())] * 3
