"""How far an embedding may be from the checkpoint's: distances, lengths and limits by hand."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vitx.core.certificate import OutputVerdict
from vitx.parity.executables.outputs import errors, judge_output, spread


def turned(by: float, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Ten vectors, all at this angle to (1, 0)."""
    return np.tile(np.array([scale * math.cos(by), scale * math.sin(by)], np.float32), (10, 1))


def judged(reference: Any, found: Any, alone: Any = None, precision: Any = "bf16") -> OutputVerdict:
    alone = found[:2] if alone is None else alone
    return judge_output(reference, found, alone, precision, lambda exceeding: float(exceeding.mean()))


def test_distance_and_length_error_by_hand() -> None:
    distances, lengths = errors(turned(0), turned(0.1, 1.02))
    np.testing.assert_allclose(distances, 1 - math.cos(0.1), rtol=1e-5)
    np.testing.assert_allclose(lengths, 0.02, rtol=1e-4)
    zero = np.zeros((1, 2), np.float32)
    bad = np.array([[np.nan, 1], [np.inf, 1]], np.float32)
    assert [float(values[0]) for values in errors(zero, zero)] == [0, 0]
    assert [float(values[0]) for values in errors(turned(0)[:1], zero)] == [1, 1]
    assert float(errors(zero, turned(0)[:1])[0][0]) == 1
    assert errors(turned(0)[:2], bad)[0].tolist() == [2, 2]
    assert errors(turned(0)[:2], bad)[1].tolist() == [float(np.finfo(np.float32).max)] * 2
    assert float(errors(turned(0), -turned(0))[0][0]) == pytest.approx(2)


def test_the_spread_is_the_mean_over_pairs() -> None:
    vectors = np.random.default_rng(0).normal(1, 1, (7, 4)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [1 - float(a @ b) for a, b in itertools.combinations(unit, 2)]
    assert spread(vectors) == pytest.approx(np.mean(pairs), rel=1e-5)
    assert spread(vectors[:1]) == 0


def test_the_limit_is_a_share_of_the_spread() -> None:
    """References at ±0.2: two of them are 0.4 apart with a chance of 5/9; bfloat16 may be off by 0.15 of that."""
    reference = np.concatenate([turned(0.2)[:5], turned(-0.2)[:5]])
    limit = 0.15**2 * (1 - math.cos(0.4)) * 5 / 9
    angle = math.acos(1 - limit)
    for factor, verdict, exceeding in ((0.98, "pass", 0), (1.02, "fail", 10)):
        found = judged(reference, np.concatenate([turned(0.2 + factor * angle)[:5], turned(-0.2 + factor * angle)[:5]]))
        assert (found.verdict, found.exceeding, found.exceeding_bound) == (verdict, exceeding, exceeding / 10)
        assert found.allowed_distance == pytest.approx(limit, rel=1e-5)
    for factor, verdict in ((0.98, "pass"), (1.02, "fail")):  # of a length of 1, the same share
        assert judged(reference, reference * np.float32(1 + factor * math.sqrt(2 * limit))).verdict == verdict
    assert judged(reference, reference + np.float32(1e-4), precision="fp32").verdict == "fail"


def test_one_image_and_one_that_comes_alone_are_enough_to_fail() -> None:
    reference = np.concatenate([turned(0.2)[:5], turned(-0.2)[:5]])
    found = reference.copy()
    found[7] = turned(0.3)[0]
    assert (judged(reference, found).verdict, judged(reference, found).exceeding) == ("fail", 1)
    alone = judged(reference, reference, alone=turned(0.3)[:2])
    assert (alone.verdict, alone.exceeding) == ("fail", 2)
    nan = reference.copy()
    nan[3, 1] = np.nan
    assert judged(reference, nan).worst_distance == 2
    other = judged(reference, reference[:, :1])
    assert (other.verdict, other.exceeding) == ("fail", 10)
