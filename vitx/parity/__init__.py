"""Parity: is the candidate the same classifier as the reference, on real images? Semantics: docs/parity.md."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.parity.certification import AcceptanceCriteria, certify, certify_models
    from vitx.parity.comparison import Comparison, compare
    from vitx.parity.evaluate import evaluate_path
    from vitx.parity.exported import export_certified
    from vitx.parity.options import ParityOptions
    from vitx.parity.verdict import judge

__all__ = [
    "AcceptanceCriteria",
    "Comparison",
    "ParityOptions",
    "certify",
    "certify_models",
    "compare",
    "evaluate_path",
    "export_certified",
    "judge",
]

__getattr__ = lazy_names(
    __name__,
    {
        "vitx.parity.certification": ("AcceptanceCriteria", "certify", "certify_models"),
        "vitx.parity.comparison": ("Comparison", "compare"),
        "vitx.parity.evaluate": ("evaluate_path",),
        "vitx.parity.exported": ("export_certified",),
        "vitx.parity.options": ("ParityOptions",),
        "vitx.parity.verdict": ("judge",),
    },
)
