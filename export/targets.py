"""The steps of an export that another compiler does, each a function that a process of its own can run."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from vitx.core.files import write_bytes
from vitx.core.images import open_images
from vitx.core.preprocess import Preprocessing
from vitx.core.sandbox import ConversionCrashed, run_limited
from vitx.export.calibration import calibration_images
from vitx.export.failure import leave_reproduction
from vitx.export.openvino import openvino_from_onnx
from vitx.export.plan import DEFAULT_BATCHES, Flavor, profiles_for
from vitx.export.precision import LowerPrecision, lower_precision
from vitx.export.qdq import Target
from vitx.export.tensorrt import engine_from_onnx

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


@dataclass(frozen=True)
class LoweredFile:
    """What lowering a graph's precision left in float32, and how it was found."""

    islands: tuple[str, ...]
    details: dict[str, Any]


def lower_file(
    path: Path, precision: LowerPrecision, data: str, preprocessing: Preprocessing, target: Target
) -> LoweredFile:
    """Replace the graph at `path` by one of lower precision, judged on training images of `data`."""
    images = calibration_images(open_images(data, "train"), preprocessing)
    lowered = lower_precision(onnx.load(str(path)), precision, images, target=target)
    onnx.checker.check_model(lowered.graph, full_check=True)
    write_bytes(path, lowered.graph.SerializeToString())
    return LoweredFile(lowered.islands, lowered.details)


def build_engine(onnx_path: Path, plan: Path, request: EngineRequest) -> None:
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
