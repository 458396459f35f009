"""A TensorRT plan on disk: what its sidecar `NAME.plan.json` says, and whether it may be loaded here.

Nothing here imports TensorRT: a plan is checked before any library sees it.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import Record, read_record, sha256_file
from vitx.core.machine import installed_version

ENGINES_FOLDER = "engines"  # of a bundle
Flavor = Literal["tensorrt", "tensorrt-rtx"]
PluginName = Literal["flash"]
DEFAULT_LEVEL = 3  # TensorRT's own builder level
FLAVORS: tuple[Flavor, ...] = ("tensorrt", "tensorrt-rtx")
EXTRAS: dict[Flavor, str] = {"tensorrt": "trt", "tensorrt-rtx": "trt-rtx"}
# The module of each and the distributions that bring it. The lean runtime loads version-compatible plans only.
MODULES: dict[Flavor, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
LEAN_MODULE = "tensorrt_lean"
_DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx",),
    LEAN_MODULE: ("tensorrt-lean", "tensorrt-lean-cu13", "tensorrt-lean-cu12"),
}


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
    plugin: PluginName | None = None


class PlanInfo(Record):
    """`NAME.plan.json`: what a plan is made of and where it runs."""

    format_version: Literal[1] = 1
    flavor: Flavor
    version: str = Field(pattern=r"^\d+(\.\d+)+", description="of TensorRT, all four numbers")
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
    fused_layers: Annotated[dict[str, int], Field(exclude_if=lambda counts: not counts)] = Field(
        default_factory=dict, description="of the plan, by the type they write; each is in NAME.plan.layers.tsv"
    )
    warnings: tuple[str, ...] = ()
    created: str


class InstalledLibrary(NamedTuple):
    """A TensorRT that is installed: the module to import, and its version."""

    module: str
    version: str


def sidecar_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


def layers_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.layers.tsv")


def read_sidecar(plan: Path) -> PlanInfo:
    """Return what a plan's sidecar says; raise InputError if it is missing or foreign."""
    if not sidecar_path(plan).is_file():
        raise InputError(f"'{plan}' has no '{sidecar_path(plan).name}': build it with vitx export, which writes both")
    return read_record(sidecar_path(plan), PlanInfo)


def read_plan(plan: Path) -> PlanInfo:
    """Return what a plan's sidecar says, the plan's digest verified.

    Raises InputError for a missing plan or a missing or foreign sidecar, CheckFailed for a plan that was changed.
    """
    if not plan.is_file():
        raise InputError(f"no plan at '{plan}'")
    info = read_sidecar(plan)
    require_described(plan, info, sha256_file(plan), plan.stat().st_size)
    return info


def require_described(plan: Path, info: PlanInfo, sha256: str, size: int) -> None:
    """Raise CheckFailed unless a plan of this digest and size is the one of its sidecar."""
    if (sha256, size) != (info.sha256, info.size):
        raise CheckFailed(f"'{plan}' is not the plan its sidecar describes: build it again")


def check_plan(plan: Path, *, architecture: str | None = None, version: str | None = None) -> PlanInfo:
    """Return what a plan is, if it may be loaded here; call it before any library sees the plan.

    `architecture` is the GPU it is to run on ("sm89"); without it only file and version are checked. `version` stands
    in for the installed TensorRT's. Raises what `read_plan` does, CheckFailed for another version or another GPU, and
    EnvironmentMissing when no TensorRT that could load it is installed.
    """
    info = read_plan(plan)
    installed = version or library_for(info).version
    if not loads_with(info, installed):
        newer = "that version and newer ones, up to the next major"
        loading = newer if info.options.version_compatible else "exactly that version"
        raise CheckFailed(
            f"'{plan}' was built with {info.flavor} {info.version} and {installed} is installed: it loads with "
            f"{loading}; build it again, or install that version"
        )
    if architecture is not None and not runs_on(info, architecture):
        raise CheckFailed(
            f"'{plan}' was built for {', '.join(info.architectures)} and this GPU is {architecture}: "
            "build it for this one"
        )
    return info


def library_for(info: PlanInfo) -> InstalledLibrary:
    """The installed TensorRT to load a plan with; raise EnvironmentMissing if there is none.

    The first whose version loads it, the full library before the lean one; otherwise the first that is installed.
    """
    modules = (MODULES[info.flavor], *((LEAN_MODULE,) if info.options.version_compatible else ()))
    libraries = [library for module in modules if (library := installed_library(module)) is not None]
    if not libraries:
        raise EnvironmentMissing(
            f"the plan needs {info.flavor} {info.version}, which is not installed: pip install "
            f"'{info.flavor}=={info.version}'"
        )
    return next((library for library in libraries if loads_with(info, library.version)), libraries[0])


def installed_library(module: str) -> InstalledLibrary | None:
    """The version of a TensorRT module that is installed here, read without importing it."""
    versions = filter(None, map(installed_version, _DISTRIBUTIONS[module]))
    return next((InstalledLibrary(module, version) for version in versions), None)


def loads_with(info: PlanInfo, version: str) -> bool:
    """Whether that version of its TensorRT can load a plan."""
    built, here = _numbers(info.version), _numbers(version)
    # NVIDIA: plans of TensorRT 10 work with 11, those of 11.0 with 11.1; never the other way.
    return built == here or (info.options.version_compatible and here >= built and here[0] - built[0] <= 1)


def _numbers(version: str) -> tuple[int, ...]:
    """`10.16.1.11.post1` → (10, 16, 1, 11)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def runs_on(info: PlanInfo, architecture: str) -> bool:
    """Whether a plan is for this GPU. A hardware-compatible plan runs on Ampere (sm80) and everything newer."""
    if info.options.hardware_compatible:
        return int(architecture.removeprefix("sm")) >= 80
    return architecture in info.architectures
