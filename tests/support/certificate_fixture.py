"""A certificate for tests that read one: what is not of interest has any value."""

from typing import Any

from vitx.core.certificate import Certificate


def certificate(**changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        "verdict": "pass",
        "reasons": ("the bound is below the limit",),
        "subject": {"manifest.json": "a" * 64},
        "reference": "run",
        "reference_sha256": "b" * 64,
        "candidate": "tiny",
        "runtime": {"runtime": "numpy"},
        "data": "digits",
        "data_sha256": "c" * 64,
        "images": 300,
        "batch_sizes": (1, 8),
        "accuracy_reference": 0.75,
        "accuracy_candidate": 0.5,
        "flips": (),
        "flip_rate_bound": 0.01,
        "max_flip_rate": 0.02,
        "mcnemar_p": 1.0,
        "max_logit_error": 1e-5,
        "mean_logit_error": 1e-6,
        "max_logit_error_by_batch_size": {1: 1e-5, 8: 2e-6},
        "max_logit_error_allowed": 1e-4,
        "max_neighbour_error": 0.0,
        "created": "2026-01-02T03:04:05+00:00",
    }
    return Certificate(**fields | changes)
