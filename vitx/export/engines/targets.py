"""The steps of an export that another compiler does, each a function that a process of its own can run."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from vitx.core.files import write_bytes
from vitx.core.preprocess import Preprocessing
from vitx.core.sandbox import ConversionCrashed, run_limited
from vitx.core.tensorrt_plan import Flavor, PlanOptions, PluginName
from vitx.core.tolerance import SHARE_OF_STD
from vitx.data.open import open_images
from vitx.export.engines.openvino import openvino_from_onnx
from vitx.export.engines.profiles import DEFAULT_BATCHES, profiles_for
from vitx.export.engines.reproduction import leave_reproduction
from vitx.export.engines.tensorrt import check_options, engine_from_onnx
from vitx.export.engines.tensorrt_library import load_flavor
from vitx.export.precision.acceptance import Bounds, SamplingPlan
from vitx.export.precision.calibration import calibration_images
from vitx.export.precision.lower import LowerPrecision, lower_precision
from vitx.export.precision.qdq import Target

# One attempt of the bisection after a crash.
BISECTION_SECONDS = 300.0


@dataclass(frozen=True)
class EngineRequest:
    """A TensorRT plan to build from the bundle's graph; arguments as in `engine_from_onnx`."""

    flavor: Flavor
    architectures: tuple[str, ...] = ()
    batches: tuple[int, ...] = DEFAULT_BATCHES
    builder_level: int = 3
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_stripped: bool = False
    timing_cache: Path | None = None
    plugin: PluginName | None = None

    def check(self) -> None:
        """Raise what `engine_from_onnx` would raise before it looks at a graph: options, batches, library, GPU."""
        profiles_for(self.batches)
        check_options(self.flavor, self.options(), self.timing_cache)
        load_flavor(self.flavor).targets(self.architectures)

    def options(self) -> PlanOptions:
        return PlanOptions(
            builder_level=self.builder_level,
            version_compatible=self.version_compatible,
            hardware_compatible=self.hardware_compatible,
            weight_stripped=self.weight_stripped,
            plugin=self.plugin,
        )


@dataclass(frozen=True)
class PrecisionRequest:
    """A lower precision to write into a graph, judged on training images of the set `data`.

    plan: what the certificate will ask of images that the search must not look at. Others as in `lower_precision`.
    """

    precision: LowerPrecision
    data: str
    target: Target = "cpu"
    plan: SamplingPlan | None = None
    quiet: bool = False


@dataclass(frozen=True)
class LoweredFile:
    """What lowering a graph's precision left in float32, and how it was found."""

    islands: tuple[str, ...]
    details: dict[str, Any]


def lower_file(path: Path, request: PrecisionRequest, preprocessing: Preprocessing) -> LoweredFile:
    """Replace the graph at `path` by one of lower precision."""
    images = calibration_images(open_images(request.data, "train"), preprocessing)
    lowered = lower_precision(
        onnx.load(str(path)),
        request.precision,
        images,
        target=request.target,
        bounds=Bounds(SHARE_OF_STD[request.precision], plan=request.plan),
        quiet=request.quiet,
    )
    onnx.checker.check_model(lowered.graph, full_check=True)
    write_bytes(path, lowered.graph.SerializeToString())
    return LoweredFile(lowered.islands, lowered.details)


def build_engine(onnx_path: Path, plan: Path, request: EngineRequest, quiet: bool = False) -> None:
    """Build one plan and its sidecar."""
    engine_from_onnx(
        onnx_path,
        plan,
        flavor=request.flavor,
        architectures=request.architectures,
        profiles=profiles_for(request.batches),
        timing_cache=request.timing_cache,
        builder_level=request.builder_level,
        version_compatible=request.version_compatible,
        hardware_compatible=request.hardware_compatible,
        weight_stripped=request.weight_stripped,
        plugin=request.plugin,
        quiet=quiet,
    )


def convert_tensorrt(path: Path) -> None:
    """What reproduces a crash of TensorRT: a plan with every default, thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        build_engine(path, Path(folder) / "model.plan", EngineRequest("tensorrt"))


def convert_tensorrt_rtx(path: Path) -> None:
    """What reproduces a crash of TensorRT for RTX."""
    with tempfile.TemporaryDirectory() as folder:
        build_engine(path, Path(folder) / "model.plan", EngineRequest("tensorrt-rtx"))


def convert_openvino(path: Path) -> None:
    """What reproduces a crash of OpenVINO."""
    with tempfile.TemporaryDirectory() as folder:
        openvino_from_onnx(path, Path(folder) / "openvino")


CONVERT: dict[str, Callable[[Path], None]] = {
    "tensorrt": convert_tensorrt,
    "tensorrt-rtx": convert_tensorrt_rtx,
    "openvino": convert_openvino,
}


def convert_limited(
    target: str,
    function: Callable[..., object],
    onnx_path: Path,
    *arguments: object,
    failed: Path,
    seconds: float,
    memory_gib: float,
) -> None:
    """Run a conversion of `onnx_path` in a limited process; on a crash leave a reproduction in the folder `failed`."""
    try:
        run_limited(target, function, onnx_path, *arguments, seconds=seconds, memory_gib=memory_gib)
    except ConversionCrashed as crash:
        part = leave_reproduction(
            onnx_path,
            CONVERT[target],
            failed,
            str(crash),
            seconds=min(seconds, BISECTION_SECONDS),
            memory_gib=memory_gib,
        )
        raise ConversionCrashed(
            f"{crash}; {len(part.graph.node)} nodes that do the same, and a script that shows it, are in {failed}"
        ) from None
