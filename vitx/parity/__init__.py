"""Parity: is the candidate the same classifier as the reference, on real images? Semantics: docs/parity.md."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.core.tolerance import allowed_logit_error
    from vitx.parity.certification import (
        AcceptanceCriteria,
        bundle_batch_sizes,
        certify,
        certify_models,
        check_engines,
        check_provider,
        warn_of_other_weights,
    )
    from vitx.parity.comparison import BATCH_SIZES, NOT_FINITE_ERROR, Comparison, compare
    from vitx.parity.evaluate import evaluate_path
    from vitx.parity.exported import export_certified
    from vitx.parity.options import ParityOptions
    from vitx.parity.verdict import MAX_FLIP_RATE, check_image_count, check_labels, judge

__all__ = [
    "BATCH_SIZES",
    "MAX_FLIP_RATE",
    "NOT_FINITE_ERROR",
    "AcceptanceCriteria",
    "Comparison",
    "ParityOptions",
    "allowed_logit_error",
    "bundle_batch_sizes",
    "certify",
    "certify_models",
    "check_engines",
    "check_image_count",
    "check_labels",
    "check_provider",
    "compare",
    "evaluate_path",
    "export_certified",
    "judge",
    "warn_of_other_weights",
]

__getattr__ = lazy_names(
    __name__,
    {
        "vitx.core.tolerance": ("allowed_logit_error",),
        "vitx.parity.certification": (
            "AcceptanceCriteria",
            "bundle_batch_sizes",
            "certify",
            "certify_models",
            "check_engines",
            "check_provider",
            "warn_of_other_weights",
        ),
        "vitx.parity.comparison": ("BATCH_SIZES", "NOT_FINITE_ERROR", "Comparison", "compare"),
        "vitx.parity.evaluate": ("evaluate_path",),
        "vitx.parity.exported": ("export_certified",),
        "vitx.parity.options": ("ParityOptions",),
        "vitx.parity.verdict": ("MAX_FLIP_RATE", "check_image_count", "check_labels", "judge"),
    },
)
