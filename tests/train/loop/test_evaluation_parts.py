"""Several processes that evaluate parts of a set: what each looks at, and the metrics of the whole."""

from contextlib import suppress
from dataclasses import FrozenInstanceError
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch

import vitx.models  # noqa: F401  # registers deit_digits
from reference import randomize_like_trained
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.evaluation import EvaluationStopped, _images_of_process, _weighted_means, evaluate

PREPROCESSING = Preprocessing(image_size=32)
IMAGES = open_images("digits", "val").first(7)


class Recorded(Processes):
    """Process `rank` of two; `gather` keeps what this one has, and gives what both had."""

    def __init__(self, rank: int, kept: list[Any]) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "kept", kept)

    def gather(self, value: Any) -> list[Any]:
        kept: list[Any] = self.kept  # type: ignore[attr-defined]
        kept[self.rank] = value
        return [value if each is None else each for each in kept]  # the first knows its own part alone


def test_parts_of_a_set_have_the_metrics_of_the_whole() -> None:
    model: Any = randomize_like_trained(timm.create_model("deit_digits", depth=2)).train()
    whole = evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"))
    kept: list[Any] = [None, None]
    with pytest.raises(ValueError, match="broadcast"):  # twice its own four logits are more than there are labels
        evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"), processes=Recorded(0, kept))
    model.train()
    found = evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"), processes=Recorded(1, kept))
    assert [len(part[0]) for part in kept] == [4, 3]
    assert kept[0][0].dtype == np.float32
    for name in ("top1", "nll", "ece", "brier"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    assert found.cos_sim == pytest.approx(whole.cos_sim, rel=1e-5)
    assert found.attention_std == pytest.approx(whole.attention_std, rel=1e-5)
    assert model.training
    model.eval()
    evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"))
    assert not model.training
    with pytest.raises(FrozenInstanceError):
        whole.top1 = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("count", "asked"), [(1, 2), (2, 1), (3, 0)])  # of parts of 7; 4 and 3; 3, 2 and 2 images
def test_every_process_is_asked_to_stop_as_often(count: int, asked: int) -> None:
    """Each asks the others, and waits for them."""
    model = timm.create_model("resnet10t", num_classes=10)
    for rank in range(count):
        stop_asked = Mock(return_value=0)
        with suppress(RuntimeError):  # what it gathers then
            processes = Mock(spec=Processes(rank, count), rank=rank, count=count, gather=Mock(side_effect=RuntimeError))
            processes.indices = Processes(rank, count).indices
            evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"), processes, stop_asked)
        assert stop_asked.call_count == asked
    if asked:
        with pytest.raises(EvaluationStopped):
            evaluate(model, IMAGES, PREPROCESSING, 3, torch.device("cpu"), stop_asked=lambda: 15)


def test_each_process_reads_its_own_images() -> None:
    assert _images_of_process(IMAGES, ALONE) is IMAGES
    parts = [_images_of_process(IMAGES, Processes(rank, 3)) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert sum((part.keys for part in parts), ()) == IMAGES.keys
    assert np.array_equal(np.concatenate([part.labels for part in parts]), IMAGES.labels)
    assert [part.read(index) for part in parts for index in range(len(part))] == [IMAGES.read(i) for i in range(7)]
    assert [len(_images_of_process(IMAGES, Processes(rank, 7))) for rank in range(7)] == [1] * 7
    with pytest.raises(InputError) as refused:
        _images_of_process(IMAGES, Processes(0, 8))
    assert str(refused.value) == "7 images to evaluate, fewer than the 8 processes: start fewer"


def test_means_count_as_many_images_as_they_are_of() -> None:
    assert _weighted_means([{"a": 1.0, "b": 5.0}], [3]) == [1.0, 5.0]
    assert _weighted_means([{"a": 1.0, "b": 5.0}, {"a": 4.0, "b": -1.0}], [2, 1]) == [2.0, 3.0]
    assert _weighted_means([{}, {}], [2, 1]) == []
    assert all(type(each) is float for each in _weighted_means([{"a": 1.0}, {"a": 2.0}], [1, 1]))
