"""GPU architectures: the names that `--arch` takes."""

import re
from collections.abc import Collection, Sequence

from vitx.core.errors import InputError

# Data-centre GPUs: TensorRT for RTX does not compile for them.
_DATA_CENTRE = {"sm70", "sm90", "sm100", "sm103", "sm107", "sm110"}


def parse_architectures(text: str | Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Parse "sm86,sm89" (or a sequence of such names) to sorted names without repetitions.

    Raises InputError for a name that is not among `known`, listing those.
    """
    given = text.split(",") if isinstance(text, str) else list(text)
    names = [name.strip().lower() for name in given if name.strip()]
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


def _number(name: str) -> int:
    return int(name.removeprefix("sm"))
