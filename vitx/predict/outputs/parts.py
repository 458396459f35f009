"""Predictions as Parquet: the columns, the ranking of the classes, and files that appear whole or not at all.

Columns: path (string), class (string), class_index (int32), score (float32, softmax), top_k_classes (list of string),
top_k_scores (list of float32), error (string), and where asked for logits and embeddings (lists of float16).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.files import sha256_file, sync
from vitx.core.probabilities import softmax
from vitx.predict.ledger.ledger import Done
from vitx.runtimes.session import FeatureArray

PREDICTIONS = "predictions.parquet"
# Rows held until they are written as one row group.
ROW_GROUP = 8192

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


def part_path(out: Path, shard: int) -> Path:
    return out / PREDICTIONS / f"part-{shard:08d}.parquet"


def readable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become \\xNN, because Parquet strings are UTF-8."""
    if name.isascii():
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Rows:
    """N images, of which M have a prediction: those whose error is None, in order.

    indices and scores: (M, K), best first; logits (M, C) and embeddings (M, D), or None where nobody asked.
    """

    keys: Sequence[str]
    errors: Sequence[str | None]
    indices: Int32Array
    scores: Float32Array
    logits: Float32Array | None = None
    embeddings: FeatureArray | None = None


def rank(logits: Float32Array, top_k: int) -> tuple[Int32Array, Float32Array]:
    """Class indices and softmax scores (N, K) of logits (N, C), best first; equal scores in the classes' order."""
    scores = softmax(logits)
    count = min(top_k, scores.shape[1])
    # Of many classes only the best are sorted, unless one of them ties with one that is not among them.
    best = scores >= np.partition(scores, -count, axis=1)[:, -count, None]
    rows = np.arange(len(scores))[:, None]
    if np.count_nonzero(best) == best.shape[0] * count:
        columns = np.nonzero(best)[1].reshape(-1, count)
        indices = columns[rows, np.argsort(-scores[rows, columns], axis=1, kind="stable")]
    else:
        indices = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return indices.astype(np.int32), scores[rows, indices].astype(np.float32)


@dataclass(frozen=True)
class Part:
    """A shard's complete file under its temporary name."""

    path: Path
    temporary: Path
    done: Done

    def publish(self) -> None:
        """Put the file in its place; a second call does nothing. Raises FileNotFoundError if it is in neither place."""
        try:
            os.replace(self.temporary, self.path)
        except FileNotFoundError:
            if not self.path.exists():
                raise
        sync(self.path.parent)

    def abandon(self) -> None:
        self.temporary.unlink(missing_ok=True)


class PartWriter:
    """Writes one shard's rows under a temporary name."""

    def __init__(
        self,
        out: Path,
        shard: int,
        worker: str,
        labels: Sequence[str],
        *,
        logits: bool = False,
        embeddings: bool = False,
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = part_path(out, shard)
        # pyarrow and Spark leave out names that begin with a dot.
        self._temporary = self.path.with_name(f".{self.path.name}.{worker}")
        self._labels = pa.array(labels, pa.string())
        columns = {
            "path": pa.string(),
            "class": pa.string(),
            "class_index": pa.int32(),
            "score": pa.float32(),
            "top_k_classes": pa.list_(pa.string()),
            "top_k_scores": pa.list_(pa.float32()),
            "error": pa.string(),
        }
        asked = [name for name, wanted in (("logits", logits), ("embeddings", embeddings)) if wanted]
        self._schema = pa.schema(columns | dict.fromkeys(asked, pa.list_(pa.float16())))
        self._waiting: list[Rows] = []
        self._row_count = 0
        self.images = self.errors = 0
        self.classes: dict[int, int] = {}
        self._writer = pq.ParquetWriter(self._temporary, self._schema)

    def add(self, rows: Rows) -> None:
        self._waiting.append(rows)
        self._row_count += len(rows.keys)
        if self._row_count >= ROW_GROUP:
            self._flush()

    def finish(self) -> Part:
        """Flush to the disk."""
        self._flush()
        self._writer.close()
        self._temporary.chmod(0o644)
        sync(self._temporary)
        done = Done(sha256_file(self._temporary), self.images, self.errors, self.classes)
        return Part(self.path, self._temporary, done)

    def abandon(self) -> None:
        with suppress(OSError):  # closing writes a footer, for which there may be no room
            self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = _joined(self._waiting)
        self._waiting.clear()
        self._row_count = 0
        self.images += len(rows.keys)
        self.errors += len(rows.keys) - len(rows.indices)
        for index, count in zip(*np.unique(rows.indices[:, 0], return_counts=True), strict=True):
            self.classes[int(index)] = self.classes.get(int(index), 0) + int(count)
        self._writer.write_batch(_record_batch(rows, self._labels, self._schema), row_group_size=len(rows.keys))


def warm_up() -> None:
    """Import pyarrow, and what its first conversion imports (pandas, half a second): neither is the writing's time."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.array(np.zeros(1))


def remove_leftovers(out: Path, worker: str = "*") -> None:
    """Remove the temporary files of workers that died, or of one worker."""
    for path in (out / PREDICTIONS).glob(f".part-*.parquet.{worker}"):
        path.unlink(missing_ok=True)


def _joined(several: Sequence[Rows]) -> Rows:
    logits = [rows.logits for rows in several if rows.logits is not None]
    embeddings = [rows.embeddings for rows in several if rows.embeddings is not None]
    return Rows(
        keys=[key for rows in several for key in rows.keys],
        errors=[error for rows in several for error in rows.errors],
        indices=np.concatenate([rows.indices for rows in several]),
        scores=np.concatenate([rows.scores for rows in several]),
        logits=np.concatenate(logits) if logits else None,
        embeddings=np.concatenate(embeddings) if embeddings else None,
    )


def _record_batch(rows: Rows, labels: Any, schema: Any) -> Any:
    import pyarrow as pa

    missing = np.array([error is not None for error in rows.errors], dtype=bool)
    best = np.zeros(len(missing), dtype=np.int32)
    score = np.zeros(len(missing), dtype=np.float32)
    best[~missing], score[~missing] = rows.indices[:, 0], rows.scores[:, 0]
    class_index = pa.array(best, mask=missing)

    def lists(values: Any, width: int) -> Any:
        offsets = np.concatenate([[0], np.cumsum(~missing * width)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing))

    width = rows.indices.shape[1]
    columns = [
        pa.array([readable(key) for key in rows.keys], pa.string()),
        labels.take(class_index),
        class_index,
        pa.array(score, mask=missing),
        lists(labels.take(pa.array(rows.indices.reshape(-1))), width),
        lists(pa.array(rows.scores.reshape(-1)), width),
        pa.array([None if error is None else readable(error) for error in rows.errors], pa.string()),
    ]
    for name, values in (("logits", rows.logits), ("embeddings", rows.embeddings)):
        if name in schema.names:
            found = np.zeros((0, 1)) if values is None else values
            # Beyond ±65504 float16 has no number.
            halves = np.clip(found, -65504, 65504).astype(np.float16)
            columns.append(lists(pa.array(halves.reshape(-1), pa.float16()), found.shape[1]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
