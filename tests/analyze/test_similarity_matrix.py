"""Similarity of layers: what is read from a matrix, and how sure its entries are."""

import numpy as np
import pytest
import torch

from reference import seq
from vitx.analyze.intervals import resample_weights
from vitx.analyze.metrics.cka import MinibatchCKA, grams_of, hsic_1
from vitx.analyze.similarity_matrix import MeanCosine, SimilarityMatrix, matrix_line


def matrix(*rows: tuple[float | None, ...], widest: float | None = None) -> SimilarityMatrix:
    return SimilarityMatrix(layers=("a", "b", "c"), columns=("a", "b", "c"), matrix=rows, widest=widest)


def test_the_neighbour_of_a_layer_is_the_one_before_it() -> None:
    found = matrix((1.0, 0.25, 0.5), (0.3, 1.0, None), (0.6, None, 1.0))
    assert found.neighbours() == {"b": 0.25}
    assert matrix((1.0, 0.25, 0.5), (0.3, 1.0, 0.75), (0.6, 0.8, 1.0)).neighbours() == {"b": 0.25, "c": 0.75}


@pytest.mark.parametrize(
    ("corner", "widest", "said"),
    [
        (0.12345, None, "a to c: 0.123"),
        (None, None, "a to c: not comparable"),
        (0.5, 0.0234, "a to c: 0.5; every entry ± 0.023 or less"),
        (0.5, 1e-7, "a to c: 0.5; no entry varies"),
    ],
)
def test_the_line_of_a_matrix_compares_its_ends(corner: float | None, widest: float | None, said: str) -> None:
    assert matrix_line(matrix((1.0, 0.2, corner), (0.2, 1.0, 0.3), (corner, 0.3, 1.0), widest=widest)) == said


@pytest.mark.parametrize("images", [9, 10])
def test_fewer_than_ten_images_have_no_widest_interval(images: int) -> None:
    similarity = MeanCosine(axis=-1)
    similarity.add({name: seq(k, images, 4, 3) for k, name in enumerate("ab")}, images)
    found = similarity.result(SimilarityMatrix)
    assert (found.widest is not None) == (images == 10)
    vectors = [torch.nn.functional.normalize(seq(k, images, 4, 3), dim=-1) for k in range(2)]
    cosines = (vectors[0] * vectors[1]).sum(dim=-1).mean(dim=1).numpy()
    assert found.matrix[0][1] == pytest.approx(cosines.mean(), rel=1e-9)
    if found.widest is not None:  # that of a with b: those of a layer with itself do not vary
        (drawn,) = resample_weights(images)
        low, high = np.quantile(drawn @ cosines / images, (0.025, 0.975))
        assert found.widest == pytest.approx((high - low) / 2, rel=1e-9)


def test_without_a_layer_there_is_no_widest_interval() -> None:
    assert MeanCosine(axis=-1).result(SimilarityMatrix).widest is None


def test_unit_vectors_are_written_where_those_of_the_last_batch_were() -> None:
    """New memory for each batch would cost more than the arithmetic; another shape has memory of its own."""
    similarity = MeanCosine(axis=-1)
    first = similarity.add({"a": seq(0, 10, 4, 3)}, 10)["a"]
    second = similarity.add({"a": seq(1, 10, 4, 3)}, 10)["a"]
    assert second.data_ptr() == first.data_ptr()
    torch.testing.assert_close(second, torch.nn.functional.normalize(seq(1, 10, 4, 3), dim=-1))
    assert similarity.add({"a": seq(2, 7, 4, 3)}, 7)["a"].data_ptr() != first.data_ptr()


def test_the_widest_interval_of_cka_is_that_of_resampled_batches() -> None:
    """Each resample is a sum over the drawn batches, layer by layer; the quantiles are of each entry by itself."""
    cka, parts = MinibatchCKA(), []
    for batch in range(12):
        size = 6 if batch < 11 else 5
        layers = [seq(k + 0.37 * batch, size, 4).square() for k in (0.0, 1.3, 2.1)]
        cka.add(layers)
        grams = grams_of(layers)
        parts.append((size * (size - 3) * hsic_1(grams, grams)).numpy())
    widths = []
    (drawn,) = resample_weights(12)
    for i in range(3):
        for j in range(3):
            sums = [sum(count * part for count, part in zip(counts, parts, strict=True)) for counts in drawn]
            cosines = [total[i, j] / np.sqrt(total[i, i] * total[j, j]) for total in sums]
            widths.append(np.subtract(*np.quantile(cosines, (0.975, 0.025))))
    assert cka.widest() == pytest.approx(max(widths) / 2, rel=1e-9)
    assert torch.equal(cka.result().diagonal(), torch.ones(3, dtype=torch.float64))
