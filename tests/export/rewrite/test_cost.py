"""The measured cost that each rewrite removes: it adds up from row to row and agrees with arithmetic."""

from itertools import pairwise

import pytest
import timm

from reference import randomize
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite.cost import EXPORT_FORM, ExplainedRewrite, explain

PREPROCESSING = Preprocessing(image_size=32)
TOKENS, WIDTH, HEADS, HIDDEN = 65, 64, 4, 192
REWRITES = ["fold-head-norm", "fold-attention-scale", "compute-class-token-only"]


@pytest.fixture(scope="module")
def rows() -> dict[str, ExplainedRewrite]:
    model = randomize(timm.create_model("deepvit_digits", depth=2, attention="re-attention")).eval()
    return {row.name: row for row in explain(model, PREPROCESSING, REWRITES)}


def test_each_row_begins_where_the_one_before_ended(rows: dict[str, ExplainedRewrite]) -> None:
    assert list(rows) == [EXPORT_FORM, *REWRITES]
    in_order = list(rows.values())
    for row, following in pairwise(in_order):
        assert row.after == following.before
    assert all(row.places for row in in_order)
    assert in_order[-1].identity.startswith("7. With class-token pooling")


def test_a_fold_removes_its_nodes(rows: dict[str, ExplainedRewrite]) -> None:
    """Two BatchNorms over heads; one multiplication of the queries by 1/√d in each of two blocks."""
    norms, scales = rows["fold-head-norm"].removed, rows["fold-attention-scale"].removed
    assert norms.parameters == 2 * 2 * HEADS
    assert norms.flops == scales.flops == 0
    assert norms.nodes > 0
    assert scales.nodes == 4  # each Mul, and a Reshape that it kept from merging with the next
    assert scales.activation_bytes == 2 * 4 * TOKENS * WIDTH


def test_fused_attention_counts_as_its_products() -> None:
    """Embedding, two blocks of N·(8D² + 4·D·hidden) + 4·N²·D, head: the same before and after the canonical form."""
    (row,) = explain(timm.create_model("deit_digits", depth=2), PREPROCESSING, [])
    block = TOKENS * (8 * WIDTH**2 + 4 * WIDTH * HIDDEN) + 4 * TOKENS**2 * WIDTH
    assert row.before.flops == 2 * 64 * 48 * WIDTH + 2 * block + 2 * WIDTH * 10
    assert row.removed.flops == 0


def test_the_class_token_tail_removes_the_last_block(rows: dict[str, ExplainedRewrite]) -> None:
    """2·N·(4D² + 2·D·hidden) + 4·N²·D + the mix, less the same for one token without keys and values."""
    removed = rows["compute-class-token-only"].removed
    whole = TOKENS * (8 * WIDTH**2 + 4 * WIDTH * HIDDEN) + 4 * TOKENS**2 * WIDTH + 2 * HEADS**2 * TOKENS**2
    one = 8 * WIDTH**2 + 4 * WIDTH * HIDDEN + 4 * HEADS * TOKENS * WIDTH + 2 * HEADS**2 * TOKENS
    assert removed.flops == whole - one
    assert removed.activation_bytes > 0


def test_unknown_rewrite() -> None:
    with pytest.raises(InputError, match="unknown rewrite 'fold-everything'"):
        explain(timm.create_model("deit_digits"), PREPROCESSING, ["fold-everything"])
