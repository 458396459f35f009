"""How far logits may differ, by precision. Semantics: docs/parity.md."""

from vitx.core.bundle import Precision

# The largest logit error allowed below float32, in standard deviations of the reference's logits (docs/parity.md).
SHARE_OF_STD: dict[Precision, float] = {"fp16": 0.02, "bf16": 0.15, "int8": 0.5, "fp8": 0.5}
# The largest change of a layer's CosSim that passes: rounding moves it by about the square of a tensor's relative
# error, so 8 bits (some 0.1 to 0.2 a tensor) may move it by 0.05 and float32 not at all.
SIMILARITY_ALLOWED: dict[Precision, float] = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.02, "int8": 0.05, "fp8": 0.05}

MAX_LOGIT_ERROR = 1e-4
# The cosine distance of a vector that is off by 4.5e-5 of its length, of which rounding in float32 is a small part.
MAX_DISTANCE = 1e-9


def allowed_logit_error(precision: Precision, logit_std: float) -> float:
    """The largest logit error a precision may have: 1e-4 in float32, else a share of the reference logits' spread.

    The shares are set by the format, not by what was observed: a few units in the last place of a half (2⁻¹¹) and of a
    bfloat16 (2⁻⁸) per layer, and for 8 bits half a standard deviation, beyond which a classifier ranks other classes.
    """
    return MAX_LOGIT_ERROR if precision == "fp32" else SHARE_OF_STD[precision] * logit_std


def allowed_distance(precision: Precision, spread: float) -> float:
    """The largest cosine distance that a further output of an image may have from the checkpoint's.

    1e-9 in float32. Below, as for logits, a share s of what tells images apart. spread: the mean distance of two
    images' outputs of the checkpoint. Half the square of a small angle is its distance, so s of it is s²·spread.
    """
    return MAX_DISTANCE if precision == "fp32" else max(SHARE_OF_STD[precision] ** 2 * spread, MAX_DISTANCE)


def coarser(first: Precision, second: Precision) -> Precision:
    """The one of two precisions whose logits may differ more."""
    return max(first, second, key=lambda precision: SHARE_OF_STD.get(precision, 0.0))
