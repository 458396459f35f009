"""Predictions as Parquet, one file a shard: its columns, the ranking of the classes, and how a file appears whole.

A part is written under a temporary name, flushed to the disk, hashed, and renamed only when the ledger records it.
Shape letters: N images, M of them with a prediction, C classes, K best classes.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as types

from vitx.core.files import escape_invalid_utf8, rename, sha256_file, sync
from vitx.core.probabilities import softmax, top_k
from vitx.predict.inputs.skipped import NONE_SKIPPED, SkippedNames
from vitx.predict.ledger import EVERY_ROW, ShardRecord
from vitx.predict.options import WHOLE, Share
from vitx.runtimes.session import Float32Array

PREDICTIONS = "predictions.parquet"
# Rows that are collected before they are written as one row group; fewer, where copied columns are larger than this.
ROW_GROUP, COPIED_BYTES = 8192, 64 << 20
# The columns of lists, by the output of a session that they hold.
LIST_COLUMNS = {"logits": "logits", "embedding": "embeddings", "attention": "attention"}
# The column of what was read, see `version_of`.
VERSION = "source_version"

Int32Array = npt.NDArray[np.int32]


def part_path(out: Path, shard: int) -> Path:
    """Sorted by name, the files have the order of the shards, and so of the input."""
    return out / PREDICTIONS / f"part-{shard:08d}.parquet"


def read_column(out: Path, shard: int, name: str) -> Iterator[str | None]:
    with part_path(out, shard).open("rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=[name]):
            yield from batch.column(0).to_pylist()


@dataclass(frozen=True)
class Rows:
    """The rows of N images; the M of them whose error is None have a prediction, in the same order.

    indices and scores: (M, K), best first. lists: of LIST_COLUMNS, (M, width) each. copied and versions: of N, see
    `Item`; what the file has no column for may be left out.
    """

    keys: Sequence[str]
    errors: Sequence[str | None]
    indices: Int32Array
    scores: Float32Array
    lists: Mapping[str, Float32Array] = field(default_factory=dict)
    copied: Sequence[Any] = ()
    versions: Sequence[str | None] = ()


def rank(logits: Float32Array, count: int) -> tuple[Int32Array, Float32Array]:
    """Class indices and softmax scores (N, K) of logits (N, C), best first; equal scores in the classes' order."""
    scores = softmax(logits)
    indices = top_k(scores, count)
    return indices.astype(np.int32), np.take_along_axis(scores, indices, axis=1).astype(np.float32)


class Part(NamedTuple):
    """A shard's complete file, still under its temporary name, and what the ledger is to record of it."""

    path: Path
    temporary: Path
    record: ShardRecord

    def publish(self) -> None:
        rename(self.temporary, self.path)


class KeptRows:
    """The rows of a finished file that stay when others are made again: those without an error that are not `again`.

    Also those `again` whose images are gone.
    """

    def __init__(self, path: Path, again: frozenset[int]) -> None:
        with path.open("rb") as file:
            table = pq.ParquetFile(file).read(columns=["path", "error"])
        self._path, self.keys = path, table["path"].to_pylist()
        errors = frozenset(np.flatnonzero(table["error"].is_valid().to_numpy()).tolist())
        self._again, self._predicted = again | errors, again - errors
        # Whether the row at each place of the new file is that of the old one.
        self._kept: list[bool] = []

    @classmethod
    def of(cls, path: Path, digest: str | None, again: frozenset[int] = frozenset()) -> "KeptRows | None":
        """None unless the file at `path` is the one with this sha256."""
        return cls(path, again) if path.is_file() and sha256_file(path) == digest else None

    def keep(self, key: str) -> bool:
        """Called for each image of the shard in turn: whether its row is kept, so that it is not predicted again."""
        row = len(self._kept)
        again = row in self._again or EVERY_ROW in self._again
        kept = row < len(self.keys) and not again and self.keys[row] == key
        self._kept.append(kept)
        return kept

    def keep_gone(self, place: int) -> bool:
        """Called for a single image that is gone: whether the row of its prediction is kept."""
        self._kept[place] = place in self._predicted
        return self._kept[place]

    def keep_all(self) -> int:
        """Called if the file that the rows are of is gone: all are kept; return how many."""
        self._kept = [True] * len(self.keys)
        return len(self._kept)

    def merge_into(self, path: Path) -> None:
        """Put the kept rows among the new ones of the file at `path`."""
        merged = path.with_name(f"{path.name}.merged")
        with self._path.open("rb") as old_file, path.open("rb") as new_file:
            parquet, schema = pq.ParquetFile(old_file), pq.read_schema(new_file)
            # As large as the old file's groups: they are small where there are images in the columns.
            groups = (parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups))
            block = max(groups, default=ROW_GROUP)
            take_old, take_new = _rows_of(parquet, block), _rows_of(pq.ParquetFile(new_file), block)
            with pq.ParquetWriter(merged, schema) as writer:
                for start in range(0, len(self._kept), block):
                    pieces = []
                    for stays, run in itertools.groupby(self._kept[start : start + block]):
                        count = len(list(run))
                        before = take_old(count)
                        pieces.append(before if stays else take_new(count))
                    writer.write_table(pa.concat_tables(pieces).replace_schema_metadata(schema.metadata))
        rename(merged, path)


def _rows_of(file: Any, block: int) -> Callable[[int], Any]:
    """A function that gives the next so many rows of a Parquet file, or what is left; it is read by blocks."""
    # `empty_table` knows no column of tensors.
    batches, rest = file.iter_batches(block), pa.Table.from_batches([], file.schema_arrow.remove_metadata())

    def take(count: int) -> Any:
        nonlocal rest
        while len(rest) < count and (more := next(batches, None)) is not None:
            rest = pa.concat_tables([rest, pa.Table.from_batches([more]).replace_schema_metadata()])
        taken, rest = rest.slice(0, count), rest.slice(count)
        return taken

    return take


def output_schema(lists: Sequence[str] = (), *, versions: bool = False, footer: Mapping[str, str] | None = None) -> Any:
    """Our own columns; of LIST_COLUMNS `lists`, as float32: Spark 3.5 opens no file with a column of float16."""
    columns = {
        "path": pa.string(),
        "class": pa.string(),
        "class_index": pa.int32(),
        "score": pa.float32(),
        "top_k_classes": pa.list_(pa.string()),
        "top_k_scores": pa.list_(pa.float32()),
        "error": pa.string(),
    }
    columns |= {LIST_COLUMNS[name]: pa.list_(pa.float32()) for name in lists}
    return pa.schema(columns | ({VERSION: pa.string()} if versions else {}), footer)


class PartWriter:
    """Writes one shard's rows to a temporary file, whose name no other writer has: actors of Ray may do a shard twice.

    schema: see `output_schema`. copied: of the columns of the input that the file gets beside those.
    """

    def __init__(self, out: Path, shard: int, labels: Sequence[str], schema: Any = None, copied: Any = None) -> None:
        self.path = part_path(out, shard)
        # Readers of the folder such as pyarrow and Spark skip names that begin with a dot.
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        self._labels, ours = pa.array(labels, pa.string()), schema or output_schema()
        self._schema, self._copied = pa.schema([*ours, *(copied or ())], ours.metadata), copied or pa.schema([])
        self._waiting: list[Rows] = []
        self._row_count = self._copied_bytes = 0
        self._writer = pq.ParquetWriter(self._temporary, self._schema)

    def add(self, rows: Rows) -> None:
        self._waiting.append(rows)
        self._row_count += len(rows.keys)
        # Of a slice of an array with a dictionary, pyarrow counts all of the dictionary.
        columns = (column for one in rows.copied if one is not None for column in one.columns)
        self._copied_bytes += sum(column.nbytes for column in columns if not types.is_dictionary(column.type))
        if self._row_count >= ROW_GROUP or self._copied_bytes >= COPIED_BYTES:
            self._write_group()

    def finish(
        self,
        listed: int = 0,
        skipped: SkippedNames = NONE_SKIPPED,
        uncounted: int = 0,
        kept: KeptRows | None = None,
    ) -> Part:
        """Write what remains, the `kept` rows among it, and flush to the disk. The others: see `ShardRecord`."""
        self._write_group()
        self._writer.close()
        if kept is not None:
            kept.merge_into(self._temporary)
        sync(self._temporary)
        with pq.ParquetFile(self._temporary) as file:
            best = file.read(columns=["class_index"])["class_index"]
        classes = {one["values"]: one["counts"] for one in best.drop_null().value_counts().to_pylist()}
        counts = (len(best), best.null_count, classes, listed, skipped, uncounted)
        return Part(self.path, self._temporary, ShardRecord(sha256_file(self._temporary), *counts))

    def abandon(self) -> None:
        with suppress(OSError):  # closing writes a footer, and the disk may be full
            self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if not self._waiting:
            return
        table = _table(self._waiting, self._labels, self._schema, self._copied)
        self._waiting.clear()
        self._row_count = self._copied_bytes = 0
        self._writer.write_table(table, row_group_size=len(table))


def warm_up() -> None:
    """Import pyarrow, and pandas, which its first conversion imports (half a second): not to be counted as writing."""
    pa.array(np.zeros(1))


def remove_leftovers(out: Path, share: Share = WHOLE) -> None:
    """Remove the temporary files of a run, or of one job of it. Nobody may be writing them now."""
    for path in (out / PREDICTIONS).glob(".part-*.parquet.*"):
        number = path.name.split(".")[1].removeprefix("part-")
        if number.isdecimal() and int(number) % share.jobs == share.number % share.jobs:  # others are of other jobs
            path.unlink(missing_ok=True)


def _table(batches: Sequence[Rows], labels: Any, schema: Any, copied: Any) -> Any:
    keys = [key for rows in batches for key in rows.keys]
    errors = [None if error is None else escape_invalid_utf8(error) for rows in batches for error in rows.errors]
    indices = np.concatenate([rows.indices for rows in batches])
    scores = np.concatenate([rows.scores for rows in batches])
    missing = np.array([error is not None for error in errors], dtype=bool)
    # (N,): the place of each image among the M; null where there is no prediction, and so is what is taken from there.
    places = pa.array(np.cumsum(~missing) - 1, mask=missing)
    class_index = pa.array(indices[:, 0]).take(places)

    def lists(values: Any, width: int) -> Any:
        """A column of N lists from M·width values: a list has `width` of them, or is null."""
        offsets = np.concatenate([[0], np.cumsum(~missing * width)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing))

    width = indices.shape[1]
    columns = {
        "path": pa.array(keys, pa.string()),
        "class": labels.take(class_index),
        "class_index": class_index,
        "score": pa.array(scores[:, 0]).take(places),
        "top_k_classes": lists(labels.take(pa.array(indices.reshape(-1))), width),
        "top_k_scores": lists(pa.array(scores.reshape(-1)), width),
        "error": pa.array(errors, pa.string()),
        VERSION: pa.array([one for rows in batches for one in rows.versions], pa.string()),
    }
    for name, column in LIST_COLUMNS.items():
        given = [rows.lists[name] for rows in batches if name in rows.lists]
        found = np.concatenate(given) if given else np.zeros((0, 1), np.float32)  # a group without a readable image
        if len(found) == len(indices):
            columns[column] = lists(pa.array(found.reshape(-1), pa.float32()), found.shape[1])
    ours = [columns[name] for name in schema.names[: len(schema) - len(copied)]]
    if copied:  # null in rows that have none, such as images that are not of a Parquet file
        nulls = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in copied], schema=copied)
        copies = [nulls if one is None else one for rows in batches for one in rows.copied]
        ours += pa.Table.from_batches(copies, copied).combine_chunks().columns
    return pa.table(ours, schema=schema)
