"""`--out` at the URL of an object store: it is looked at once more before the summary says that all parts are there."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bundle_fixture import NumpySession, colour_image, png
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS, SUMMARY, predict
from vitx.predict.options import PredictOptions

STORE = fsspec.filesystem("memory")
Work = Callable[[Callable[[str], None]], None]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def work(tiny_bundle: Bundle, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Predict three shards into a store in which something happens to the parts before the last of them is put."""
    (tmp_path / "in").mkdir()
    for index in range(3):
        image = png(colour_image(index, np.random.default_rng(index)))
        (tmp_path / "in" / f"{index}.png").write_bytes(image)

    def run(happens: Callable[[str], None]) -> None:
        put, puts = MemoryFileSystem.put_file, itertools.count()

        def behind(self: Any, path: str, name: str, **more: Any) -> None:
            if next(puts) == 2:
                happens(f"{url}/{PREDICTIONS}")
            put(self, path, name, **more)

        monkeypatch.setattr(MemoryFileSystem, "put_file", behind)
        given = PredictOptions(shard_size=1, decode_threads=1, state=tmp_path / "state")
        predict(tiny_bundle, NumpySession(), tmp_path / "in", url, given, quiet=True)

    return run


def in_store(url: str) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in STORE.find(url.removeprefix("memory:/")))


def test_a_part_that_is_taken_away_meanwhile_is_put_again(work: Work, url: str) -> None:
    work(lambda parts: STORE.rm_file(f"{parts}/part-00000001.parquet"))
    assert in_store(url) == [".vitx.json", *(f"part-0000000{number}.parquet" for number in (1, 2, 3)), SUMMARY]


def test_beside_a_part_of_others_that_comes_meanwhile_there_is_no_summary(work: Work, url: str) -> None:
    with pytest.raises(InputError, match=r"holds part-00000007\.parquet, which is not of this run"):
        work(lambda parts: STORE.pipe_file(f"{parts}/part-00000007.parquet", b"rows"))
    assert SUMMARY not in in_store(url)
