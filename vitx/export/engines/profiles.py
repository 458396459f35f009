"""The optimisation profiles of a TensorRT plan (its batch sizes), and writing a plan with its sidecar.

The sidecar's format, and reading it, are in vitx/core/tensorrt_plan.py.
"""

from itertools import pairwise
from pathlib import Path

from vitx.core.errors import InputError
from vitx.core.files import rename, write_bytes
from vitx.core.tensorrt_plan import PlanInfo, Profile, layers_path, sidecar_path
from vitx.export.options import EngineOptions

# TensorRT counts a tensor's elements in a signed 32-bit number in many of its kernels.
MAX_ELEMENTS = 2**31 - 1


def profiles_for(batches: tuple[int, ...]) -> tuple[Profile, ...]:
    """One profile for each batch size, optimised for it, from one above the previous size: 1..1, 2..8, 9..32, 33..128.

    TensorRT chooses kernels for a profile's optimum, so a single wide profile would be slow at other sizes. Raises
    InputError unless the sizes are positive and ascend.
    """
    if not batches or batches[0] < 1 or any(b <= a for a, b in pairwise(batches)):
        given = ", ".join(map(str, batches)) or "none"
        raise InputError(f"batch sizes {given}: expected positive numbers, each larger than the one before")
    starts = (1, *(size + 1 for size in batches[:-1]))
    return tuple(
        Profile(minimum=start, optimum=size, maximum=size) for start, size in zip(starts, batches, strict=True)
    )


DEFAULT_PROFILES = profiles_for(EngineOptions().batches)


def check_profiles(profiles: tuple[Profile, ...], image_elements: int) -> None:
    """Raise InputError for a range that is empty, below 1, or too large for images of `image_elements` numbers."""
    if not profiles:
        raise InputError("no optimisation profile was given: expected at least one range of batch sizes")
    most = MAX_ELEMENTS // image_elements
    for profile in profiles:
        low, best, high = profile.minimum, profile.optimum, profile.maximum
        if not 1 <= low <= best <= high:
            raise InputError(
                f"profile {low}:{best}:{high} is no range of batch sizes: expected 1 <= minimum <= optimum <= maximum"
            )
        if high > most:
            raise InputError(
                f"profile {low}:{best}:{high} goes beyond {most}, the most images of {image_elements:,} numbers that "
                f"fit TensorRT's 32-bit tensor size"
            )


def write_plan(plan: Path, data: bytes, info: PlanInfo, layers: bytes = b"") -> None:
    """Write a plan, its sidecar and the table of its `layers`, if there is one: all or none.

    A table of an older plan does not stay beside a plan that has none.
    """
    beside = {sidecar_path(plan): (info.model_dump_json(indent=2) + "\n").encode()}
    beside |= {layers_path(plan): layers} if layers else {}
    waiting = {path: path.with_name(f".{path.name}.new") for path in beside}
    path = plan
    try:
        for path, new in waiting.items():
            write_bytes(new, beside[path])
        path = plan
        write_bytes(plan, data)
        for path, new in waiting.items():
            rename(new, path)  # needs no space, so a full disk has failed before this line
    except OSError as error:
        for new in waiting.values():
            new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not layers:
        layers_path(plan).unlink(missing_ok=True)
