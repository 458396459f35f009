"""The stand-ins of benchmarks/predict/speed.py, in the prediction as it is."""

from pathlib import Path

import pytest
import speed

IMAGES = 300


def test_bookkeeping_predicts_images_that_are_neither_read_nor_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "TINY", IMAGES)
    found = speed.bookkeeping(tmp_path)
    assert found["images"] == IMAGES
    assert len(found["seconds"]) == len(found["processor_seconds"]) == 3
    assert found["share"] == sorted(found["seconds"])[1] / 60
    assert found["holds"] is (found["share"] <= found["target"])
