"""Which of a bundle's TensorRT plans to load, and how a batch is split into chunks that fit the plan's profiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.tensorrt_plan import (
    ENGINES_FOLDER,
    EXTRAS,
    Flavor,
    PlanInfo,
    Profile,
    check_plan,
    read_sidecar,
    require_described,
    runs_on,
)


def plans_of(bundle: Bundle) -> dict[str, PlanInfo]:
    """What the sidecar of each TensorRT plan says, by its name in the bundle; raise CheckFailed for that of another."""
    names = [name for name in sorted(bundle.manifest.files) if name.startswith(f"{ENGINES_FOLDER}/")]
    plans = {name: read_sidecar(bundle.path / name) for name in names if name.endswith(".plan")}
    for name, info in plans.items():
        entry = bundle.manifest.files[name]
        require_described(bundle.path / name, info, entry.sha256, entry.size)
    return plans


def find_plan(bundle: Bundle, flavor: Flavor, architecture: str) -> tuple[Path, PlanInfo]:
    """Return the bundle's plan of a flavour for this GPU, checked before TensorRT opens it.

    Only plans that the manifest names count, because the certificate covers only those. Raises InputError when there
    is none, CheckFailed for a plan of another GPU, TensorRT version or graph, EnvironmentMissing
    when no library that loads it is installed.
    """
    plans = [(bundle.path / name, info) for name, info in plans_of(bundle).items() if info.flavor == flavor]
    if not plans:
        raise InputError(
            f"'{bundle.path}' has no plan of {flavor}: build one with vitx export --{EXTRAS[flavor]}, or choose the "
            "runtime onnxruntime"
        )
    plan = next((path for path, info in plans if runs_on(info, architecture)), plans[0][0])
    info = check_plan(plan, architecture=architecture)
    if info.onnx_sha256 != bundle.manifest.files[bundle.model_path.name].sha256:
        raise CheckFailed(f"'{plan}' was not built from the graph of '{bundle.path}': export it again")
    return plan, info


@dataclass(frozen=True)
class Chunk:
    """Images `start` to `stop` of a batch, run in the profile of index `profile`, filled up to `rows` images."""

    start: int
    stop: int
    rows: int
    profile: int


def split_batch(images: int, profiles: Sequence[Profile]) -> tuple[Chunk, ...]:
    """Split a batch into as few chunks as the profiles allow: chunks of the largest batch first, then the rest."""
    largest = largest_batch(profiles)
    chunks = []
    for start in range(0, images, largest):
        stop = min(start + largest, images)
        profile = choose_profile(stop - start, profiles)
        chunks.append(Chunk(start, stop, max(stop - start, profiles[profile].minimum), profile))
    return tuple(chunks)


def choose_profile(images: int, profiles: Sequence[Profile]) -> int:
    """The index of the profile for a batch of `images`, which is at most the largest that any profile takes.

    Of the profiles whose range holds the batch, the one with the nearest optimum. If the batch falls between two
    ranges, the next larger one: the batch is then filled up to its minimum.
    """
    taking = [index for index, profile in enumerate(profiles) if profile.minimum <= images <= profile.maximum]
    if taking:
        return min(taking, key=lambda index: (abs(profiles[index].optimum - images), index))
    above = [index for index, profile in enumerate(profiles) if profile.minimum > images]
    return min(above, key=lambda index: profiles[index].minimum)


def largest_batch(profiles: Sequence[Profile]) -> int:
    return max(profile.maximum for profile in profiles)
