"""Row by row: what a row says is its own image's, wherever unreadable images and outputs that are not finite lie."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import IMAGE_SIZE, LABELS, Float32Array, png
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.predict import PREDICTIONS, predict
from vitx.predict.options import PredictOptions
from vitx.runtimes.session import Session

COUNT = 23
# At the edges of the input, side by side, and far apart; a shard of 5 from 15 on has no prediction at all.
UNREADABLE = {0, 4, 5, 11, 15, 16, 18, 22}
NOT_FINITE = {1, 6, 10, 17, 19, 21}


def logits_of(index: int) -> list[float]:
    return [float(index % 4), float(index % 3), 2.5 if index % 5 == 0 else 0.25, index / 8]


def features_of(index: int) -> list[float]:
    return [index, -index / 2, 100 - index]


def attention_of(index: int) -> list[float]:
    return [float(np.float32(index / 3)), float(np.float32(1e-6))]


class ByIndex(Session):
    """A model that knows an image by its red value: 10 times its index."""

    outputs = ("embedding", "attention")

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def _indices(self, images: UInt8Array) -> list[int]:
        indices = [int(red) // 10 for red in images[:, 0, 0, 0]]
        self.batches.append(indices)
        return indices

    def _infer(self, images: UInt8Array) -> Float32Array:
        logits = np.array([logits_of(index) for index in self._indices(images)], dtype=np.float32)
        for row, index in enumerate(self.batches[-1]):
            if index in NOT_FINITE:
                logits[row, index % 4] = (math.nan, math.inf, -math.inf)[index % 3]
        return logits

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        logits = self._infer(images)
        found = {"embedding": features_of, "attention": attention_of}
        return {"logits": logits} | {
            name: np.array([of(index) for index in self.batches[-1]], dtype=np.float32) for name, of in found.items()
        }

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    for index in range(COUNT):
        pixels = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), (10 * index, 7, 3), dtype=np.uint8)
        (made / f"{index:02d}.png").write_bytes(b"" if index in UNREADABLE else png(pixels))
    return made


def expected_row(index: int, top_k: int) -> dict[str, Any]:
    """The row of one image, in plain Python."""
    path = f"{index:02d}.png"
    if index in UNREADABLE | NOT_FINITE:
        why = "not an image: empty" if index in UNREADABLE else "the model's output is not finite"
        names = ("class", "class_index", "score", "top_k_classes", "top_k_scores", "logits")
        return {"path": path, "error": why} | dict.fromkeys((*names, "embeddings", "attention"))
    logits = logits_of(index)
    total = sum(math.exp(logit) for logit in logits)
    best = sorted(range(4), key=lambda one: (-logits[one], one))[:top_k]
    scores = [pytest.approx(math.exp(logits[one]) / total, rel=1e-6) for one in best]
    return {
        "path": path,
        "error": None,
        "class": LABELS[best[0]],
        "class_index": best[0],
        "score": scores[0],
        "top_k_classes": [LABELS[one] for one in best],
        "top_k_scores": scores,
        "logits": logits,
        "embeddings": features_of(index),
        "attention": attention_of(index),
    }


@pytest.mark.parametrize("row_group", [3, 8192])
@pytest.mark.parametrize(("batch_size", "shard_size"), [(1, 5), (2, 5), (3, 23), (4, 5), (5, 3), (7, 11), (64, 23)])
def test_every_row_is_its_own_images(
    tiny_bundle: Bundle,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    shard_size: int,
    row_group: int,
) -> None:
    monkeypatch.setattr("vitx.predict.outputs.parts.ROW_GROUP", row_group)
    session, out = ByIndex(), tmp_path / "out"
    options = PredictOptions(
        allow_uncertified=True,
        batch_size=batch_size,
        shard_size=shard_size,
        decode_threads=2,
        read_threads=2,
        top_k=3,
        logits=True,
        embeddings=True,
        attention=True,
    )
    summary = predict(tiny_bundle, session, folder, out, options, quiet=True)
    assert pq.read_table(out / PREDICTIONS).to_pylist() == [expected_row(index, 3) for index in range(COUNT)]
    good = [index for index in range(COUNT) if index not in UNREADABLE | NOT_FINITE]
    best = [max(range(4), key=logits_of(index).__getitem__) for index in good]
    assert summary.classes == {label: best.count(index) for index, label in enumerate(LABELS)}
    assert (summary.images, summary.errors, summary.images_here) == (COUNT, COUNT - len(good), COUNT)
    # A batch has images of one shard only, in order, and is full except at the end of the shard.
    cuts = [
        range(start, min(start + batch_size, first + shard_size, COUNT))
        for first in range(0, COUNT, shard_size)
        for start in range(first, min(first + shard_size, COUNT), batch_size)
    ]
    readable = [[index for index in cut if index not in UNREADABLE] for cut in cuts]
    assert session.batches == [batch for batch in readable if batch]


def test_an_embedding_that_is_not_finite_is_an_error(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    class Broken(ByIndex):
        def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
            found = super()._infer_outputs(images)
            for row, index in enumerate(self.batches[-1]):
                if index == 3:
                    found["embedding"][row, 1] = math.nan
            return found

    options = PredictOptions(allow_uncertified=True, embeddings=True)
    predict(tiny_bundle, Broken(), folder, tmp_path / "out", options, quiet=True)
    rows = pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()
    assert [rows[3][name] for name in ("error", "class", "embeddings")] == [
        "the model's output is not finite",
        None,
        None,
    ]
    assert rows[2]["embeddings"] == features_of(2)


def test_a_run_with_another_column_is_another_run(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    def again(**asked: Any) -> None:
        predict(tiny_bundle, ByIndex(), folder, tmp_path, PredictOptions(allow_uncertified=True, **asked), quiet=True)

    again(attention=True)
    with pytest.raises(InputError, match="attention was True, is False now"):
        again()
    with pytest.raises(InputError, match="embeddings was False, is True now"):
        again(attention=True, embeddings=True)
    again(attention=True)


def test_columns_that_were_not_asked_for_are_not_there(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    columns = ["path", "class", "class_index", "score", "top_k_classes", "top_k_scores", "error"]
    for asked in ([], ["logits"], ["embeddings"], ["attention"], ["embeddings", "attention"]):
        out = tmp_path / "-".join(["out", *asked])
        wanted: Any = dict.fromkeys(asked, True)
        options = PredictOptions(allow_uncertified=True, **wanted)
        predict(tiny_bundle, ByIndex(), folder, out, options, quiet=True)
        rows = pq.read_table(out / PREDICTIONS).to_pylist()
        expected = [expected_row(index, 5) for index in range(COUNT)]
        assert rows == [{name: row[name] for name in [*columns, *asked]} for row in expected]
