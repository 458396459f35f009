"""Parts of a batch: together they are the whole batch, and each has whole CutMix pairs."""

import numpy as np
import pytest

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.train.loop.distributed.batch_part import WHOLE_BATCH, BatchPart
from vitx.train.loop.inputs.training_data import TrainingData
from vitx.train.recipes.image_and_loss_settings import Augmentation


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_disjoint_complete_and_mirrored(count: int) -> None:
    batch = np.random.default_rng(0).permutation(32)
    parts = [BatchPart(index, count).of(batch) for index in range(count)]
    assert sorted(np.concatenate(parts)) == list(range(32))
    partner = dict(zip(batch, batch[::-1], strict=True))
    for part in parts:
        assert len(part) == 32 // count
        assert dict(zip(part, part[::-1], strict=True)).items() <= partner.items()


def test_parts_of_parts_stay_mirrored() -> None:
    batch = np.arange(24)
    inner = BatchPart(1, 3).of(BatchPart(0, 2).of(batch))
    np.testing.assert_array_equal(inner + inner[::-1], 23)


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"a batch of 18 images cannot be cut into 2 parts .* a multiple of 4, and of no more images"
    ):
        BatchPart(0, 2).of(np.arange(18))
    assert len(WHOLE_BATCH.of(np.arange(7))) == 7
    assert WHOLE_BATCH.slices(7) == [slice(0, 7)]
    assert {WHOLE_BATCH, BatchPart(0, 1)} == {BatchPart()}  # values, which can be keys


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumed_late_and_in_parts_gives_the_same_images(workers: int) -> None:
    images = open_images("digits", "train").first(80)
    augmentation = Augmentation(rotation=10)
    data = TrainingData(images, Preprocessing(image_size=32), augmentation, batch_size=16, seed=3)
    late = list(data.batches(2, workers, first=2))
    whole = list(data.batches(2))
    halves = [list(data.batches(2, workers, first=2, part=BatchPart(index, 2))) for index in range(2)]
    assert [batch.number for batch in late] == [2, 3, 4]
    for number, batch in enumerate(late):
        np.testing.assert_array_equal(batch.images, whole[number + 2].images)
        first, second = (half[number].images for half in halves)
        np.testing.assert_array_equal(np.concatenate([first[:4], second, first[4:]]), batch.images)
