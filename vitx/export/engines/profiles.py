"""Writing a TensorRT plan: the batch sizes it is made for, and the file with its sidecar (vitx.core.tensorrt_plan)."""

import errno
import os
from itertools import pairwise
from pathlib import Path

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes, write_bytes
from vitx.core.tensorrt_plan import PlanInfo, Profile, sidecar_path

# TensorRT counts a tensor's elements in a signed 32-bit number in many of its kernels.
MAX_ELEMENTS = 2**31 - 1
DEFAULT_BATCHES = (1, 8, 32, 128)


def profiles_for(batches: tuple[int, ...] = DEFAULT_BATCHES) -> tuple[Profile, ...]:
    """One profile for each batch size, best there, from one above the previous: 1..1, 2..8, 9..32, 33..128.

    Raises InputError unless the sizes are positive and ascend.
    """
    if not batches or batches[0] < 1 or any(b <= a for a, b in pairwise(batches)):
        given = ", ".join(map(str, batches)) or "none"
        raise InputError(f"batch sizes {given}: expected positive numbers, each larger than the one before")
    starts = (1, *(size + 1 for size in batches[:-1]))
    return tuple(
        Profile(minimum=start, optimum=size, maximum=size) for start, size in zip(starts, batches, strict=True)
    )


DEFAULT_PROFILES = profiles_for()


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


def write_plan(plan: Path, data: bytes, info: PlanInfo) -> None:
    """Write a plan and its sidecar, both or neither. Raises EnvironmentMissing when the disk is full."""
    sidecar = sidecar_path(plan)
    waiting = sidecar.with_name(f".{sidecar.name}.new")
    try:
        write_bytes(waiting, (info.model_dump_json(indent=2) + "\n").encode())
        write_bytes(plan, data)
        os.replace(waiting, sidecar)  # takes no space: what could fail has been done
    except OSError as error:
        waiting.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        kept = "the plan that was there is as it was" if plan.exists() else "nothing was written"
        raise EnvironmentMissing(
            f"cannot write '{plan}' ({len(data):,} bytes): {os.strerror(error.errno or 0)}; {kept}"
        ) from None


def digest_of(data: bytes | None) -> str | None:
    return None if data is None else sha256_bytes(data)
