"""GPU architectures: the names that `--arch` takes."""

import re
from collections.abc import Collection, Sequence

from vitx.core.errors import InputError

# Data-centre GPUs: TensorRT for RTX does not compile for them.
_DATA_CENTRE = {"sm70", "sm90", "sm100", "sm103", "sm107", "sm110"}
# The first with products of 8-bit floats: Ada.
FP8_SINCE = 89


def parse_architectures(text: str | Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Parse "sm86,sm89" (or a sequence of such names) to sorted names without repetitions.

    Raises InputError for a name that is not among `known`, listing those.
    """
    names = [name.strip().lower() for name in (text.split(",") if isinstance(text, str) else text)]
    for name in names:
        if name in known:
            continue
        message = f"TensorRT for RTX cannot build for '{name}': it knows {', '.join(sorted(known, key=_number))}"
        if name in _DATA_CENTRE:
            message += "; that one is a data-centre GPU: build with --trt on a machine that has it"
        elif not re.fullmatch(r"sm\d+", name):
            message += " (the compute capability without its point: 8.9 is sm89)"
        raise InputError(message)
    return tuple(sorted(set(names), key=_number))


def with_precision(architectures: Sequence[str], precision: str, *, asked: bool) -> tuple[str, ...]:
    """Those of the architectures that have kernels for weights of these types ("fp8, fp16").

    Raises InputError if one that was `asked` for, or all, have none.
    """
    able = tuple(name for name in architectures if "fp8" not in precision or _number(name) >= FP8_SINCE)
    if not able or (asked and len(able) < len(architectures)):
        lacking = ", ".join(name for name in architectures if name not in able)
        raise InputError(
            f"fp8 needs compute capability 8.9 or newer, and {lacking} has none: leave it out of --arch, or take int8"
        )
    return able


def _number(name: str) -> int:
    return int(name.removeprefix("sm"))
