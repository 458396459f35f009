"""What benchmarks/export/triton_reads.py takes for a repository that Triton reads."""

from typing import Any

import pytest
from triton_reads import holds

SERVED = {"loaded": True, "labels_hold": True, "largest_error": 0.0, "refused": []}
REFUSED = {"loaded": False, "refused": ["unable to find backend library for backend 'tensorrt'"]}


@pytest.mark.parametrize(
    ("found", "may_be_refused", "expected"),
    [
        (SERVED, False, True),
        (REFUSED, True, True),
        (REFUSED, False, False),
        ({**SERVED, "labels_hold": False}, True, False),
        ({"loaded": False, "refused": []}, True, False),
        ({"loaded": False, "refused": ["the configuration is invalid"]}, True, False),
    ],
    ids=[
        "served",
        "no backend",
        "no backend for the stand-in",
        "other labels",
        "ended without a word",
        "another error",
    ],
)
def test_only_what_is_served_or_lacks_a_backend_holds(
    found: dict[str, Any], may_be_refused: bool, expected: bool
) -> None:
    assert holds(found, may_be_refused=may_be_refused) is expected
