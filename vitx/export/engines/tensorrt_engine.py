"""From an ONNX graph to a TensorRT plan, with the classic TensorRT 10 and 11 or with TensorRT for RTX, by one path.

A plan is a serialised engine. Networks are strongly typed: a plan's precision is the graph's. The classic library
builds for the GPU of the machine it runs on; TensorRT for RTX compiles ahead of time for named architectures, and needs
no GPU. This file checks, prepares and reports; the calls are in tensorrt_library.py.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from vitx.core.bundle import timestamp
from vitx.core.console import progress
from vitx.core.errors import InputError
from vitx.core.files import check_file, sha256_bytes, sha256_file, write_bytes
from vitx.core.tensorrt_plan import DEFAULT_LEVEL, Flavor, PlanInfo, PlanOptions, PluginName, Profile
from vitx.export.engines.architectures import with_precision
from vitx.export.engines.build_log import BuildLog, BuildProgress
from vitx.export.engines.fused_layers import FusedLayer, count_types, layers_as_text
from vitx.export.engines.profiles import DEFAULT_PROFILES, check_profiles, write_plan
from vitx.export.engines.tensorrt_graph import load_for_tensorrt, precision_of
from vitx.export.engines.tensorrt_library import BuildJob, LayerRow, load_flavor
from vitx.export.graph.dataflow import inputs_of

if TYPE_CHECKING:
    from vitx.export.engines.flash_nodes import FusedGraph

# Reported, neither confirmed nor closed: worth a warning. (11.2 folds a transposed network *input* into attention
# wrongly, issues/4826; our graphs are not affected, their input is pixels.)
_FUSED_ATTENTION_SM120 = (
    "fp16 and bf16 attention was reported silently wrong on sm120, in 10.16.1 too "
    "(github.com/NVIDIA/TensorRT/issues/4837): certify this plan on that GPU"
)
_PLUGIN_NEVER_RAN = "the flash plugin was compiled and not run when it was written: certify this plan on its GPU"
_PLUGIN_LEAK = (
    "plugins compiled ahead of time were reported to leak GPU memory in 11.1 and 11.2 whenever the batch changes "
    "(github.com/NVIDIA/TensorRT/issues/4849)"
)


@dataclass(frozen=True)
class EngineReport:
    """A plan that was built, and the parsed layers: name, kind, output type and shape (N is the batch).

    fused: the plan's own layers; none of the classic TensorRT, which does not tell them when it builds.
    """

    path: Path
    info: PlanInfo
    layers: tuple[LayerRow, ...]
    fused: tuple[FusedLayer, ...] = ()


def engine_from_onnx(
    onnx_path: Path,
    plan_path: Path,
    *,
    flavor: Flavor,
    architectures: Sequence[str] = (),
    profiles: Sequence[Profile] = DEFAULT_PROFILES,
    timing_cache: Path | None = None,
    builder_level: int = DEFAULT_LEVEL,
    version_compatible: bool = False,
    hardware_compatible: bool = False,
    plugin: PluginName | None = None,
    quiet: bool = False,
) -> EngineReport:
    """Build `plan_path` and its sidecar from a graph with one input, images uint8 (N, S, S, 3), N dynamic.

    architectures: for TensorRT for RTX ("sm86", …; default: every one it knows from sm80 on). The classic library
        builds for this machine's GPU.
    timing_cache: read if the file exists, and written back: a second build does not time the same kernels again.
    builder_level: 0 to 5; higher levels try more kernels and build more slowly. Classic library only.
    version_compatible: the plan also loads in newer releases, and in the lean runtime.
    hardware_compatible: the plan runs on every GPU since Ampere.
    plugin: with "flash", Re-Attention and talking heads of a float16 or bfloat16 graph run in our kernels, which are
        compiled here and stored in the plan. Classic library only.

    Raises InputError for an argument or a graph that cannot be used (the parser's message names the node),
    EnvironmentMissing without TensorRT or the GPU it needs, CheckFailed if the build fails, OSError with a full disk.
    After an error the plan at `plan_path` is as it was.
    """
    library = load_flavor(flavor)
    options = PlanOptions(
        builder_level=builder_level,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        plugin=plugin,
    )
    check_options(flavor, options, timing_cache)
    check_file(plan_path, "model.plan")
    if plan_path.exists() and onnx_path.exists() and plan_path.samefile(onnx_path):
        raise InputError(f"'{plan_path}' is the graph that the plan is made of: expected another path")
    targets = library.targets(architectures)
    model = load_for_tensorrt(onnx_path)
    check_profiles(tuple(profiles), _image_elements(model))
    precision = precision_of(model)
    targets = with_precision(targets, precision, asked=bool(architectures))
    fused = None if plugin is None else _with_plugin(model, targets[0])
    cache = timing_cache.read_bytes() if timing_cache is not None and timing_cache.is_file() else None
    log, start = BuildLog(), time.perf_counter()
    with progress(f"{flavor} {library.version}", 1000, quiet=quiet) as bar:
        graph, steps = model if fused is None else fused.model, BuildProgress(bar)
        job = BuildJob(graph, tuple(profiles), options, targets, cache, timing_cache is not None, log, steps)
        built = library.build(job)
    seconds, fused_layers = time.perf_counter() - start, log.layers()
    info = PlanInfo(
        flavor=flavor,
        version=library.version,
        architectures=targets,
        profiles=tuple(profiles),
        precision=precision,
        options=options,
        onnx_sha256=sha256_file(onnx_path),
        sha256=sha256_bytes(built.plan),
        size=len(built.plan),
        timing_cache_in_sha256=_digest(cache),
        timing_cache_out_sha256=_digest(built.timing_cache),
        build_seconds=round(seconds, 3),
        layers=len(built.layers),
        fused_layers=count_types(fused_layers),
        warnings=(*log.warnings(), *known_issues(flavor, targets, precision), *plugin_warnings(library.version, fused)),
        created=timestamp(),
    )
    write_plan(plan_path, built.plan, info, layers_as_text(fused_layers).encode() if fused_layers else b"")
    if timing_cache is not None and built.timing_cache is not None:
        write_bytes(timing_cache, built.timing_cache)
    return EngineReport(plan_path, info, built.layers, fused_layers)


def check_options(flavor: Flavor, options: PlanOptions, timing_cache: Path | None) -> None:
    """Raise InputError for options that this TensorRT would ignore."""
    if not 0 <= options.builder_level <= 5:
        raise InputError(f"builder level {options.builder_level}: expected 0 (fast to build) to 5 (fast to run)")
    if flavor == "tensorrt":
        if options.plugin is not None and (options.version_compatible or options.hardware_compatible):
            raise InputError("a plan with the flash plugin holds code for one GPU and one release: leave out either")
        if timing_cache is not None:
            check_file(timing_cache, "timing.cache")
        return
    if options.plugin is not None:
        raise InputError(
            "TensorRT for RTX takes no plugin compiled ahead of time (its Python package has no tensorrt_rtx.plugin): "
            "build with --trt, or leave --plugin out"
        )
    if timing_cache is not None:
        raise InputError(
            "TensorRT for RTX has no use for a timing cache: it times nothing ahead of time, and asking for one makes "
            "it look for a GPU; leave it out"
        )
    if options.builder_level != DEFAULT_LEVEL:
        raise InputError(
            f"builder level {options.builder_level}: TensorRT for RTX builds the same plan at every level, since it "
            "chooses kernels on the GPU that loads it; leave it out (--builder-level needs --trt)"
        )
    if options.version_compatible:
        raise InputError("TensorRT for RTX loads plans of its own release only: version-compatible needs --trt")
    if options.hardware_compatible:
        raise InputError("a TensorRT for RTX plan runs on the architectures it names: list them instead (--arch)")


def known_issues(flavor: Flavor, architectures: Sequence[str], precision: str) -> tuple[str, ...]:
    """Unconfirmed reports about TensorRT that concern this plan."""
    low = any(kind in precision for kind in ("fp16", "bf16"))
    return (_FUSED_ATTENTION_SM120,) if flavor == "tensorrt" and low and "sm120" in architectures else ()


def plugin_warnings(version: str, fused: "FusedGraph | None") -> tuple[str, ...]:
    """Reasons for caution with a plan that has the flash plugin; none without it."""
    if fused is None:
        return ()
    skipped = [f"'{name}' runs without the flash plugin: {reason}" for name, reason in fused.skipped.items()]
    leak = [_PLUGIN_LEAK] if version.startswith(("11.1.", "11.2.")) else []
    return (_PLUGIN_NEVER_RAN, *leak, *skipped)


def _with_plugin(model: onnx.ModelProto, architecture: str) -> "FusedGraph":
    """The graph with plugin nodes; the plugins are registered, so that the parser finds them."""
    from vitx.export.engines.flash_nodes import plugin_graph  # imports PyTorch, which other plans need not wait for
    from vitx.export.engines.flash_plugin import register  # imports TensorRT

    fused = plugin_graph(model)
    register(architecture)
    return fused


def _digest(data: bytes | None) -> str | None:
    return None if data is None else sha256_bytes(data)


def _image_elements(model: onnx.ModelProto) -> int:
    """Numbers in one image; raise InputError unless the graph has one input, of which only the batch is dynamic."""
    inputs = inputs_of(model.graph)
    dims = inputs[0].type.tensor_type.shape.dim if len(inputs) == 1 else ()
    if not dims or dims[0].HasField("dim_value") or not all(dim.dim_value > 0 for dim in dims[1:]):
        found = ", ".join(value.name for value in inputs) or "none"
        raise InputError(f"inputs {found}: expected one, with a dynamic batch first and fixed dimensions after it")
    return math.prod(dim.dim_value for dim in dims[1:])
