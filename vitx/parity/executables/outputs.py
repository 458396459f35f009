"""How far an executable's embedding, attention or rollout is from the checkpoint's (docs/maths.md §7).

Shape letters: N images, D the width of the vectors.
"""

from collections.abc import Callable, Mapping

import numpy as np

from vitx.core.bundle import Precision
from vitx.core.certificate import OutputVerdict
from vitx.core.probabilities import Float64Array
from vitx.core.tolerance import allowed_distance
from vitx.parity.comparison import NOT_FINITE_ERROR
from vitx.runtimes.session import Float32Array

# The cosine distance of vectors that point in opposite directions, and of one that is not finite.
LARGEST_DISTANCE = 2.0


def judge_output(
    reference: Float32Array,
    found: Float32Array,
    alone: Float32Array,
    precision: Precision,
    bound: Callable[[np.ndarray], float],
) -> OutputVerdict:
    """Compare vectors (N, D) with the checkpoint's; `alone` are the first images once more, one at a time.

    bound: from which images exceed a limit, (N,), the 95 % bound on the share of such images. No image may.
    """
    if found.shape != reference.shape or alone.shape != reference[: len(alone)].shape:
        found = alone = np.full_like(reference, np.nan)
    distances, lengths = errors(reference, found)
    again = errors(reference[: len(alone)], alone)
    for all_rows, first_rows in zip((distances, lengths), again, strict=True):
        all_rows[: len(first_rows)] = np.maximum(all_rows[: len(first_rows)], first_rows)
    allowed = allowed_distance(precision, spread(reference))
    allowed_length = float(np.sqrt(2 * allowed))  # the sine of the angle whose cosine distance is allowed, nearly
    exceeding = (distances > allowed) | (lengths > allowed_length)
    return OutputVerdict(
        verdict="fail" if exceeding.any() else "pass",
        images=len(reference),
        worst_distance=float(distances.max()),
        mean_distance=float(distances.mean()),
        allowed_distance=allowed,
        worst_length_error=float(lengths.max()),
        allowed_length_error=allowed_length,
        exceeding=int(exceeding.sum()),
        exceeding_bound=bound(exceeding),
    )


def errors(reference: Float32Array, found: Float32Array) -> tuple[Float64Array, Float64Array]:
    """Cosine distance and length error of each row of `found` to that of `reference`, (N,) each.

    Two zero vectors are equal; a zero vector is at distance 1 from any other, and what is not finite is at 2.
    """
    wanted, seen = reference.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(seen).all(axis=1)
    seen[~finite] = 0
    norm_wanted, norm_seen = np.linalg.norm(wanted, axis=1), np.linalg.norm(seen, axis=1)
    difference = _unit(wanted, norm_wanted) - _unit(seen, norm_seen)
    # ½‖a − b‖² of unit vectors is 1 − cos, and is exact where 1 − cos would cancel.
    distances = 0.5 * np.square(difference).sum(axis=1)
    one_zero = (norm_wanted == 0) != (norm_seen == 0)
    scale = np.where(norm_wanted > 0, norm_wanted, 1)
    lengths = np.abs(norm_seen - norm_wanted) / scale
    return (
        np.where(finite, np.where(one_zero, 1.0, distances), LARGEST_DISTANCE),
        np.where(finite, lengths, NOT_FINITE_ERROR),
    )


def spread(vectors: Float32Array) -> float:
    """The mean cosine distance of two of these vectors (N, D); 0 of fewer than two."""
    count = len(vectors)
    if count < 2:
        return 0.0
    wide = vectors.astype(np.float64)
    total = float(np.linalg.norm(_unit(wide, np.linalg.norm(wide, axis=1)).sum(axis=0))) ** 2
    return max(0.0, 1 - (total - count) / (count * (count - 1)))


def reasons_of(outputs: Mapping[str, OutputVerdict]) -> dict[str, str]:
    """One clause for each output, with the numbers and their limits."""
    return {
        name: f"{name}: {each.exceeding} of {each.images} witness images too far from the checkpoint's, at most "
        f"{each.exceeding_bound:.6f} of all (95 %); largest cosine distance {each.worst_distance:.3g}, allowed "
        f"{each.allowed_distance:.3g}; largest length error {each.worst_length_error:.3g}, allowed "
        f"{each.allowed_length_error:.3g}"
        for name, each in outputs.items()
    }


def _unit(vectors: Float64Array, norms: Float64Array) -> Float64Array:
    return np.asarray(vectors / np.where(norms > 0, norms, 1)[:, None])
