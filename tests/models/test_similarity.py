"""Similarities of tokens and of attention maps, each by loops over single numbers."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import seq
from vitx.core.errors import InputError
from vitx.models.similarity import (
    attention_similarity,
    attention_std,
    dc_shares,
    longest_tokens,
    map_similarity,
    token_similarity,
)

TOKENS = seq(1, 2, 5, 3)
FIRST, SECOND = seq(2, 2, 3, 4, 4), seq(3, 2, 3, 4, 4)


def cosine(a: Tensor, b: Tensor) -> float:
    dot = sum(float(x * y) for x, y in zip(a, b, strict=True))
    norms = [math.sqrt(sum(float(x * x) for x in values)) for values in (a, b)]
    return dot / (norms[0] * norms[1])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("absolute", [False, True])
def test_tokens_are_compared_pair_by_pair(absolute: bool) -> None:
    pairs = [cosine(image[i], image[j]) for image in TOKENS for i, j in itertools.permutations(range(5), 2)]
    expected = mean([abs(value) if absolute else value for value in pairs])
    assert min(pairs) < 0
    found = token_similarity(TOKENS, absolute=absolute)
    assert found.shape == ()
    assert float(found) == pytest.approx(expected, abs=1e-12)
    assert float(token_similarity(torch.ones(1, 4, 2), absolute=absolute)) == pytest.approx(1)


def test_a_token_of_zeros_is_similar_to_none() -> None:
    """Of six pairs two have a cosine of 1; the zeros' own cosine, which is 0, is not taken off as 1."""
    tokens = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]], dtype=torch.float64)
    for absolute in (False, True):
        assert float(token_similarity(tokens, absolute=absolute)) == pytest.approx(2 / 6)


def test_the_energy_of_the_mean_and_the_longest_token() -> None:
    """The numbers of docs/maths.md §1.5; direct current is frequency 0 of a Fourier transform over tokens."""
    tokens = seq(1.5, 2, 5, 4) + 0.3
    amplitudes = torch.fft.fft(tokens, dim=1).abs().square()
    shares = dc_shares(tokens)
    assert shares.tolist() == pytest.approx((amplitudes[:, 0].sum(-1) / amplitudes.sum((1, 2))).tolist(), abs=1e-12)
    assert float(shares.mean()) == pytest.approx(0.195836, abs=5e-7)
    lengths = [sorted(math.sqrt(sum(float(x * x) for x in token)) for token in image) for image in tokens]
    assert longest_tokens(tokens).tolist() == pytest.approx([image[4] / image[2] for image in lengths])
    assert float(longest_tokens(tokens).mean()) == pytest.approx(1.220725, abs=5e-7)


def test_of_equally_long_tokens_the_two_measures_are_one() -> None:
    unit = torch.nn.functional.normalize(seq(3, 2, 6, 4) + 0.5, dim=-1)
    assert float(dc_shares(unit).mean()) == pytest.approx((1 + 5 * float(token_similarity(unit))) / 6, abs=1e-12)
    register = torch.cat((100 * unit[:, :1], unit[:, 1:]), dim=1)
    assert token_similarity(register) == pytest.approx(float(token_similarity(unit)))
    assert dc_shares(register).tolist() == pytest.approx([1 / 6, 1 / 6], rel=0.05)
    assert longest_tokens(register).tolist() == pytest.approx([100, 100])
    half = (1e3 * unit).half()  # its squares are beyond what halves hold
    assert dc_shares(half).tolist() == pytest.approx(dc_shares(unit).tolist(), rel=1e-2)
    assert longest_tokens(half).tolist() == pytest.approx([1, 1], rel=1e-2)
    zeros = torch.zeros(1, 3, 2)
    assert (float(dc_shares(zeros)), float(longest_tokens(zeros))) == (0, 0)


def test_the_median_length_is_that_of_tokens_that_have_one() -> None:
    """Where half of the patches are zeros the median of all is 0, and the ratio would be 1e12."""
    tokens = torch.zeros(3, 8, 2)
    tokens[0, :4, 0] = torch.tensor([1.0, 2.0, 4.0, 10.0])
    tokens[1, 3, 1] = 5
    tokens[2, :, 0] = torch.tensor([1e-13] * 5 + [2.0, 3.0, 6.0])
    assert longest_tokens(tokens).tolist() == pytest.approx([10 / 3, 1, 2])
    tokens[1, 0, 0] = math.nan
    assert longest_tokens(tokens)[1].isnan()


def test_the_spread_of_a_row_is_unbiased() -> None:
    rows = [[float(value) for value in row] for image in FIRST for head in image for row in head]
    expected = mean([math.sqrt(sum((value - mean(row)) ** 2 for value in row) / 3) for row in rows])
    assert float(attention_std(FIRST)) == pytest.approx(expected, abs=1e-12)
    assert float(attention_std(torch.full((1, 1, 2, 4), 0.25))) == 0


def test_maps_are_compared_column_by_column_or_entry_by_entry() -> None:
    B, H, N, _ = FIRST.shape
    columns = [cosine(FIRST[b, h, :, k], SECOND[b, h, :, k]) for b in range(B) for h in range(H) for k in range(N)]
    entries = [cosine(FIRST[b, :, q, k], SECOND[b, :, q, k]) for b in range(B) for q in range(N) for k in range(N)]
    assert float(map_similarity(FIRST, SECOND)) == pytest.approx(mean(columns), abs=1e-12)
    assert float(map_similarity(FIRST, SECOND, "rows")) == pytest.approx(mean(columns), abs=1e-12)
    assert float(map_similarity(FIRST, SECOND, over="heads")) == pytest.approx(mean(entries), abs=1e-12)
    assert attention_similarity is map_similarity
    # Where a map is zero there is no direction, and no division by zero.
    assert float(map_similarity(FIRST, torch.zeros_like(FIRST))) == 0
    tiny = torch.full((1, 1, 2, 2), 1e-13, dtype=torch.float64)
    assert float(map_similarity(tiny, tiny)) == 0  # nor up to a length of 1e-12
    assert float(map_similarity(10 * tiny, 10 * tiny)) == pytest.approx(1)


def test_another_axis_is_refused() -> None:
    with pytest.raises(InputError, match="unknown axis of the attention similarity 'row': did you mean rows"):
        map_similarity(FIRST, SECOND, "row")  # type: ignore[arg-type]


@pytest.mark.parametrize("over", ["rows", "heads"])
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-13])
def test_a_part_of_a_map_without_direction_is_similar_to_none(over: Any, length: float) -> None:
    """Columns of zeros, and entries that are 0 in all heads; a gradient of 1/length would reach every weight."""
    first = FIRST.clone()
    first[:, :, :, 1] *= length
    first.requires_grad_()
    found = map_similarity(first, SECOND, over)
    rest = [0, 2, 3]
    without = map_similarity(FIRST[..., rest], SECOND[..., rest], over).item()
    assert found.item() == pytest.approx(without * 3 / 4, abs=1e-12)
    (gradient,) = torch.autograd.grad(found, first, create_graph=True)
    assert gradient[..., 1].abs().max() == 0
    (second,) = torch.autograd.grad(gradient.square().sum(), first)
    assert second.isfinite().all()
    assert torch.autograd.gradgradcheck(
        lambda a, b: map_similarity(a, b, over), (FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_())
    )


@pytest.mark.parametrize("length", [1e-4, 1.0, 300.0])
def test_tokens_in_half_precision_have_lengths_beyond_their_squares(length: float) -> None:
    """float16 ends at 65504 and begins at 6e-8."""
    tokens = (length * TOKENS).half()
    expected = token_similarity(tokens.double()).item()
    assert token_similarity(tokens).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("over", ["rows", "heads"])
@pytest.mark.parametrize("keys", [16, 1000])
def test_maps_in_half_precision_have_products_below_its_smallest(keys: int, over: Any) -> None:
    """Of an entry of 1/1000 the square is 1e-6: float16 keeps four bits of it."""
    maps = [seq(k, 1, 2, 4, keys).softmax(dim=-1).half() for k in (0, 1)]
    expected = map_similarity(maps[0].double(), maps[1].double(), over).item()
    assert map_similarity(maps[0], maps[1], over).item() == pytest.approx(expected, abs=1e-6)
