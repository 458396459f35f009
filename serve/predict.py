"""A folder of images through a bundle into one Parquet file. Decoding and inference overlap; memory is bounded.

Never imports torch.
"""

import importlib.util
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitx.core.bundle import MANIFEST, Bundle, timestamp
from vitx.core.calibration import softmax
from vitx.core.console import progress
from vitx.core.errors import CheckFailed, InputError, missing_package
from vitx.core.files import Record, sha256_file, sync, write_json
from vitx.core.images import EXTENSIONS, list_images
from vitx.core.machine import installed_versions
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array, decode
from vitx.serve.runtimes import Session

PREDICTIONS = "predictions.parquet"
SUMMARY = "summary.json"
BATCH_SIZE = 32
TOP_K = 5
# Batches that are decoded, or being decoded, ahead of the one in the model.
BATCHES_AHEAD = 3
# Rows held until they are written as one row group.
ROW_GROUP = 8192


class PredictionSummary(Record):
    """`summary.json`: what one run of `vitx predict` did."""

    format_version: int = 1
    bundle: str
    bundle_sha256: str
    certified: bool
    folder: str
    images: int
    errors: int
    seconds: float
    images_per_second: float
    classes: dict[str, int]
    runtime: dict[str, Any]
    versions: dict[str, str]
    created: str


@dataclass(frozen=True)
class Row:
    """One image of the output: its prediction, or why there is none."""

    path: str
    indices: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    error: str | None = None


def predict(
    bundle: Bundle,
    session: Session,
    folder: Path,
    out: Path,
    *,
    batch_size: int = BATCH_SIZE,
    top_k: int = TOP_K,
    strict: bool = False,
    allow_uncertified: bool = False,
    quiet: bool = False,
) -> PredictionSummary:
    """Classify every image under `folder`; write `out`/predictions.parquet and `out`/summary.json, each whole.

    Columns: path (relative to `folder`, in sorted order), class, class_index, score (softmax), top_k_classes,
    top_k_scores (at most the model's number of classes), error. An unreadable image is a row whose error says why;
    with `strict` it raises InputError naming it, and nothing is written. Raises CheckFailed when the bundle has no
    passing certificate, unless `allow_uncertified`; InputError when `folder` is missing or holds no image, or `out`
    cannot be written; EnvironmentMissing without pyarrow.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise missing_package("pyarrow", "serve")
    if batch_size < 1 or top_k < 1:
        raise InputError(f"batch {batch_size}, top-k {top_k}: expected at least 1 of each")
    certified = _is_certified(bundle, allow_uncertified)
    paths = _images_of(folder)
    started = time.perf_counter()
    labels = bundle.manifest.labels
    histogram = dict.fromkeys(labels, 0)
    errors = 0
    batches = _predicted(session, bundle.manifest.preprocessing, folder, paths, batch_size, top_k, strict=strict)
    with _output(out) as sink, closing(batches), progress("predict", len(paths), quiet=quiet) as bar:
        done = 0
        for rows in batches:
            sink.add(rows, labels)
            for label, count in Counter(labels[row.indices[0]] for row in rows if row.indices).items():
                histogram[label] += count
            errors += sum(row.error is not None for row in rows)
            done += len(rows)
            bar.update(done, f"{done / (time.perf_counter() - started):.0f} images/s")
    seconds = time.perf_counter() - started
    summary = PredictionSummary(
        bundle=bundle.manifest.name,
        bundle_sha256=sha256_file(bundle.path / MANIFEST),
        certified=certified,
        folder=_readable(str(folder)),
        images=len(paths),
        errors=errors,
        seconds=seconds,
        images_per_second=len(paths) / seconds,
        classes=histogram,
        runtime=session.describe(),
        versions=installed_versions(),
        created=timestamp(),
    )
    write_json(out / SUMMARY, summary)
    return summary


def _is_certified(bundle: Bundle, allow_uncertified: bool) -> bool:
    try:
        bundle.require_certificate()
    except CheckFailed:
        if not allow_uncertified:
            raise
        return False
    return True


def _images_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"no folder at '{folder}': expected a folder of images")
    paths = list_images(folder)
    if not paths:
        raise InputError(f"'{folder}' holds no image: looked for {', '.join(sorted(EXTENSIONS))}, in subfolders too")
    return paths


def _predicted(
    session: Session,
    preprocessing: Preprocessing,
    folder: Path,
    paths: Sequence[Path],
    batch_size: int,
    top_k: int,
    *,
    strict: bool,
) -> Generator[list[Row], None, None]:
    """Yield the rows of one batch after the other, in order."""
    with closing(_decoded(preprocessing, folder, paths, batch_size)) as batches:
        for names, decoded in batches:
            if strict:
                _refuse_unreadable(folder, names, decoded)
            ranked = _ranked(session, [item for item in decoded if not isinstance(item, ImageError)], top_k)
            yield [
                Row(name, error=str(item)) if isinstance(item, ImageError) else Row(name, *next(ranked))
                for name, item in zip(names, decoded, strict=True)
            ]


def _refuse_unreadable(folder: Path, names: Sequence[str], decoded: Sequence[UInt8Array | ImageError]) -> None:
    for name, item in zip(names, decoded, strict=True):
        if isinstance(item, ImageError):
            raise InputError(f"unreadable image {folder / name}: {item}; without --strict it becomes a row")


def _decoded(
    preprocessing: Preprocessing, folder: Path, paths: Sequence[Path], batch_size: int
) -> Generator[tuple[list[str], list[UInt8Array | ImageError]], None, None]:
    """Yield (relative paths, pixels or the error) by batch, while a pool of threads decodes the next ones."""

    def prepare(path: Path) -> UInt8Array | ImageError:
        try:
            return preprocessing.apply(decode(path))
        except ImageError as error:
            return error

    starts = iter(range(0, len(paths), batch_size))
    ahead: deque[tuple[int, list[Future[UInt8Array | ImageError]]]] = deque()
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
    try:
        while True:
            while len(ahead) <= BATCHES_AHEAD and (start := next(starts, None)) is not None:
                ahead.append((start, [pool.submit(prepare, path) for path in paths[start : start + batch_size]]))
            if not ahead:
                return
            start, futures = ahead.popleft()
            names = [_readable(path.relative_to(folder).as_posix()) for path in paths[start : start + batch_size]]
            yield names, [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ranked(
    session: Session, pixels: Sequence[UInt8Array], top_k: int
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Yield the class indices and softmax scores of each image, best first; equal scores in the order of the labels."""
    if not pixels:
        return
    scores = softmax(session.infer(np.stack(pixels)))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    for indices, row in zip(order, scores, strict=True):
        yield tuple(map(int, indices)), tuple(map(float, row[indices]))


def _readable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become \\xNN, because Parquet strings are UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class _Sink:
    """Rows on their way to a Parquet file, one row group at a time."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = pa.schema(
            {
                "path": pa.string(),
                "class": pa.string(),
                "class_index": pa.int32(),
                "score": pa.float32(),
                "top_k_classes": pa.list_(pa.string()),
                "top_k_scores": pa.list_(pa.float32()),
                "error": pa.string(),
            }
        )
        self._table = pa.Table
        self._rows: list[dict[str, Any]] = []
        self._writer = pq.ParquetWriter(path, self._schema)

    def add(self, rows: Sequence[Row], labels: Sequence[str]) -> None:
        self._rows += [_record(row, labels) for row in rows]
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()


def _record(row: Row, labels: Sequence[str]) -> dict[str, Any]:
    if row.error is not None:
        return {"path": row.path, "error": row.error}
    return {
        "path": row.path,
        "class": labels[row.indices[0]],
        "class_index": row.indices[0],
        "score": row.scores[0],
        "top_k_classes": [labels[index] for index in row.indices],
        "top_k_scores": row.scores,
    }


@contextmanager
def _output(out: Path) -> Iterator[_Sink]:
    """Yield a sink whose file becomes `out`/predictions.parquet when the block ends, and vanishes if the block raises.

    An earlier summary is removed before the new predictions take their place: it is never beside other predictions.
    """
    made_here = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{PREDICTIONS}.", dir=out)
    except OSError as error:
        raise InputError(f"cannot write to the folder '{out}': {error.strerror}") from None
    os.close(descriptor)
    temporary = Path(name)
    sink = _Sink(temporary)
    try:
        yield sink
        sink.finish()
        temporary.chmod(0o644)
        sync(temporary)
        (out / SUMMARY).unlink(missing_ok=True)
        os.replace(temporary, out / PREDICTIONS)
        sync(out)
    except BaseException:
        with suppress(OSError):
            sink.abandon()
        temporary.unlink(missing_ok=True)
        if made_here:
            with suppress(OSError):
                out.rmdir()
        raise
