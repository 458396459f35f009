"""Inputs that change between runs with --incremental, and what a run did then."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bundle_fixture import LABELS, NumpySession, colour_image, png, tar_of
from vitx.core.bundle import Bundle
from vitx.predict import PREDICTIONS, PredictionSummary, predict
from vitx.predict.options import PredictOptions

PIXELS = [colour_image(index % 4, np.random.default_rng(index)) for index in range(16)]
IMAGES = [png(pixels) for pixels in PIXELS]
LABEL = [LABELS[index] for index in NumpySession().infer(np.stack(PIXELS)).argmax(axis=1)]


class Counting(NumpySession):
    """Counts the images that it predicts; `most`: and is stopped at this one."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.images, self.most = 0, most

    def _infer(self, images: Any) -> Any:
        if self.most is not None and self.images >= self.most:
            raise KeyboardInterrupt
        self.images += len(images)
        return super()._infer(images)


def run(
    bundle: Bundle, source: Path | str, out: Path, session: Counting | None = None, **options: Any
) -> tuple[PredictionSummary, int]:
    """The summary, and how many images were predicted."""
    session = session or Counting()
    given = PredictOptions(**{"shard_size": 4, "batch_size": 2, "decode_threads": 1, "incremental": True} | options)
    return predict(bundle, session, str(source), out, given, quiet=True), session.images


def counts(summary: PredictionSummary) -> tuple[int, ...]:
    assert summary.increment is not None
    return tuple(summary.increment.model_dump().values())


def rows(out: Path) -> dict[str, Any]:
    """By key, each of which is there once; a row without a prediction as its error."""
    table = pq.read_table(out / PREDICTIONS).to_pylist()
    assert len({row["path"] for row in table}) == len(table)
    return {row["path"]: row["class"] or row["error"] for row in table}


def write(path: Path, data: bytes) -> None:
    """Never with the time that the file had before, however coarse the clock of the file system is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(data)
    os.utime(path, ns=(before + 1, max(before + 1_000_000, path.stat().st_mtime_ns)))


def tar(path: Path, members: dict[str, bytes]) -> None:
    write(path, tar_of(members))


def table(path: Path, images: Sequence[bytes], row_group_size: int, **columns: Any) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": list(images)} | columns), file, row_group_size=row_group_size)
    write(path, file.getvalue())


def ten_images(folder: Path) -> Path:
    """A new folder of them: with `run`, three shards."""
    folder.mkdir()
    for index in range(10):
        write(folder / f"{index:02d}.png", IMAGES[index])
    return folder
