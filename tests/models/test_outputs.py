"""Attention and rollout: the reference numbers of docs/maths.md §7, and the whole product of matrices in numpy."""

import numpy as np
import pytest
import torch

from reference import seq
from vitx.core.errors import InputError
from vitx.models.outputs import PooledTokens, _attention, attention_rollout

CLASS = PooledTokens(start=0, stop=1, prefix=1, grid=(1, 3), blocks=2)
TWO_CLASS = PooledTokens(start=0, stop=2, prefix=2, grid=(1, 2), blocks=2)
PATCHES = PooledTokens(start=1, stop=4, prefix=1, grid=(1, 3), blocks=2)
NUMBERS = [
    (CLASS, [0.265297, 0.288037, 0.253083], [0.172559, 0.205778, 0.229262]),
    (TWO_CLASS, [0.229694, 0.236121], [0.176091, 0.191284]),
    (PATCHES, [0.235582, 0.212375, 0.236326], [0.263295, 0.251027, 0.267313]),
]


@pytest.mark.parametrize(("pooled", "attention", "rollout"), NUMBERS)
def test_reference_numbers(pooled: PooledTokens, attention: list[float], rollout: list[float]) -> None:
    maps = [seq(k, 1, 2, 4, 4).softmax(dim=-1) for k in (0, 1)]
    torch.testing.assert_close(_attention(maps[-1], pooled)[0], torch.tensor(attention).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(attention_rollout(maps, pooled)[0], torch.tensor(rollout).double(), atol=1e-6, rtol=0)
    first, last = (0.5 * (layer[0].mean(dim=0).numpy() + np.eye(4)) for layer in maps)
    rows = (last @ first)[pooled.start : pooled.stop].mean(axis=0)
    np.testing.assert_allclose(rows[pooled.prefix :], rollout, atol=1e-6)
    assert rows.sum() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 2, 3, 4), (1, 2, 3, 3)])
def test_maps_that_are_not_of_all_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match="one attention over all 4 tokens, which attention is made of; leave --output at"
    ):
        _attention(torch.ones(shape), CLASS)
    with pytest.raises(
        InputError, match="one attention over all 4 tokens, which rollout is made of; leave --output ro"
    ):
        attention_rollout([torch.ones(1, 2, 4, 4), torch.ones(shape)], CLASS)


@pytest.mark.parametrize(
    ("pooled", "said"),
    [
        (CLASS, "the class token"),
        (TWO_CLASS, "the mean of 2 class tokens"),
        (PATCHES, "the mean of the patches"),
        (PooledTokens(0, 4, 1, (1, 3), 2), "the mean of all tokens"),
    ],
)
def test_what_is_said_of_them(pooled: PooledTokens, said: str) -> None:
    assert str(pooled) == said
    assert pooled.patches == pooled.grid[0] * pooled.grid[1]
