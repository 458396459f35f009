"""How far logits may differ: exact values by precision."""

import pytest

from vitx.core.bundle import Precision
from vitx.core.tolerance import allowed_distance, allowed_logit_error, coarser


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", 1e-4), ("fp16", 0.08), ("bf16", 0.6), ("int8", 2.0), ("fp8", 2.0)]
)
def test_the_limit_is_a_share_of_the_spread_but_in_float32(precision: Precision, allowed: float) -> None:
    assert allowed_logit_error(precision, 4.0) == pytest.approx(allowed, rel=1e-12)


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", 1e-9), ("fp16", 8e-5), ("bf16", 4.5e-3), ("int8", 0.05), ("fp8", 0.05)]
)
def test_a_distance_is_a_share_of_the_angle_between_images(precision: Precision, allowed: float) -> None:
    assert allowed_distance(precision, 0.2) == pytest.approx(allowed, rel=1e-12)
    assert allowed_distance(precision, 0.0) == 1e-9


def test_the_coarser_of_two_precisions_decides() -> None:
    order: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
    for index, fine in enumerate(order):
        for coarse in order[index:]:
            assert coarser(fine, coarse) == coarser(coarse, fine) == coarse
