"""A TensorRT plan on disk: the file, its sidecar `NAME.plan.json`, and whether it may be loaded here.

Nothing here imports TensorRT: a plan is checked before any library sees it.
"""

import errno
import os
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import Record, read_record, sha256_bytes, sha256_file, write_bytes

Flavor = Literal["tensorrt", "tensorrt-rtx"]
FLAVORS: tuple[Flavor, ...] = ("tensorrt", "tensorrt-rtx")
# Distributions of each, the full ones first. The lean runtime loads version-compatible plans only.
DISTRIBUTIONS: dict[Flavor, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx",),
}
LEAN_DISTRIBUTIONS = ("tensorrt-lean", "tensorrt-lean-cu13", "tensorrt-lean-cu12")
# TensorRT counts a tensor's elements in a signed 32-bit number in many of its kernels.
MAX_ELEMENTS = 2**31 - 1


class Profile(Record):
    """The batch sizes a part of the plan is made for: `minimum` to `maximum`, fastest at `optimum`."""

    minimum: int
    optimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}..{self.maximum} (best at {self.optimum})"


class PlanOptions(Record):
    """What the builder was asked for."""

    builder_level: int
    version_compatible: bool
    hardware_compatible: bool
    weight_stripped: bool


class PlanInfo(Record):
    """`NAME.plan.json`: what a plan is made of and where it runs."""

    format_version: Literal[1] = 1
    flavor: Flavor
    version: str = Field(description="of TensorRT, all four numbers")
    architectures: tuple[str, ...] = Field(description="GPUs it runs on: sm89, …")
    profiles: tuple[Profile, ...]
    precision: str = Field(description="types of the graph's weights; the network is strongly typed")
    options: PlanOptions
    onnx_sha256: str
    sha256: str = Field(description="of the plan")
    size: int
    timing_cache_in_sha256: str | None = None
    timing_cache_out_sha256: str | None = None
    build_seconds: float
    layers: int = Field(description="of the network that was parsed, before fusion")
    warnings: tuple[str, ...] = ()
    created: str


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


def sidecar_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


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


def read_plan(plan: Path) -> PlanInfo:
    """Return what a plan's sidecar says, the plan's digest verified.

    Raises InputError for a missing plan or a missing or foreign sidecar, CheckFailed for a plan that was changed.
    """
    if not plan.is_file():
        raise InputError(f"no plan at '{plan}'")
    if not sidecar_path(plan).is_file():
        raise InputError(f"'{plan}' has no '{sidecar_path(plan).name}': build it with vitx export, which writes both")
    info = read_record(sidecar_path(plan), PlanInfo)
    if plan.stat().st_size != info.size or sha256_file(plan) != info.sha256:
        raise CheckFailed(f"'{plan}' is not the plan its sidecar describes: build it again")
    return info


def check_plan(plan: Path, *, architecture: str | None = None, version: str | None = None) -> PlanInfo:
    """Return what a plan is, if it may be loaded here; call it before any library sees the plan.

    `architecture` is the GPU it is to run on ("sm89"); without it only file and version are checked. `version` stands
    in for the installed TensorRT's. Raises what `read_plan` does, CheckFailed for another version or another GPU, and
    EnvironmentMissing when no TensorRT that could load it is installed.
    """
    info = read_plan(plan)
    _check_version(plan, info, version or installed_version(info))
    if architecture is not None and not runs_on(info, architecture):
        raise CheckFailed(
            f"'{plan}' was built for {', '.join(info.architectures)} and this GPU is {architecture}: "
            "build it for this one"
        )
    return info


def installed_version(info: PlanInfo) -> str:
    """The version of the installed TensorRT that could load a plan; raise EnvironmentMissing if there is none."""
    names = DISTRIBUTIONS[info.flavor]
    if info.options.version_compatible:
        names = (*names, *LEAN_DISTRIBUTIONS)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise EnvironmentMissing(
        f"the plan needs {info.flavor} {info.version}, which is not installed: pip install "
        f"'{info.flavor}=={info.version}'"
    )


def _check_version(plan: Path, info: PlanInfo, installed: str) -> None:
    built, here = _numbers(info.version), _numbers(installed)
    if built == here:
        return
    # NVIDIA: plans of TensorRT 10 work with 11, those of 11.0 with 11.1; never the other way.
    if info.options.version_compatible and here >= built and here[0] - built[0] <= 1:
        return
    kind = (
        "that version and newer ones, up to the next major"
        if info.options.version_compatible
        else "exactly that version"
    )
    raise CheckFailed(
        f"'{plan}' was built with {info.flavor} {info.version} and {installed} is installed: it loads with {kind}; "
        "build it again, or install that version"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """`10.16.1.11.post1` → (10, 16, 1, 11)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def runs_on(info: PlanInfo, architecture: str) -> bool:
    """Whether a plan is for this GPU. A hardware-compatible plan runs on Ampere (sm80) and everything newer."""
    if info.options.hardware_compatible:
        return int(architecture.removeprefix("sm")) >= 80
    return architecture in info.architectures


def digest_of(data: bytes | None) -> str | None:
    return None if data is None else sha256_bytes(data)
