"""Parity: is the candidate the same classifier as the reference, on real images? Semantics: docs/parity.md."""

from vitx.core.tolerance import allowed_logit_error
from vitx.parity.certification import (
    bundle_batch_sizes,
    certify,
    certify_sides,
    check_engines,
    check_provider,
    warn_of_other_weights,
)
from vitx.parity.comparison import BATCH_SIZES, WORST, Comparison, compare
from vitx.parity.verdict import MAX_FLIP_RATE, check_image_count, check_labels, judge

__all__ = [
    "BATCH_SIZES",
    "MAX_FLIP_RATE",
    "WORST",
    "Comparison",
    "allowed_logit_error",
    "bundle_batch_sizes",
    "certify",
    "certify_sides",
    "check_engines",
    "check_image_count",
    "check_labels",
    "check_provider",
    "compare",
    "judge",
    "warn_of_other_weights",
]
