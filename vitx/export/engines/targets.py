"""The conversions of an export after tracing: lower precision, TensorRT, OpenVINO.

Each is a function at the top of the module, so that a process of its own can run it, with limits of time and memory.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from vitx.core.bundle import Base, Precision
from vitx.core.console import counted
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_bytes
from vitx.core.preprocess import Preprocessing
from vitx.core.sandbox import ConversionCrashed, LimitExceeded, run_limited
from vitx.core.tensorrt_plan import Flavor, PlanOptions
from vitx.core.tolerance import SHARE_OF_STD
from vitx.data.open import log_skipped, open_images
from vitx.export.engines.architectures import with_precision
from vitx.export.engines.openvino_ir import openvino_from_onnx
from vitx.export.engines.profiles import profiles_for
from vitx.export.engines.reproduction import write_reproduction
from vitx.export.engines.tensorrt_engine import check_options, engine_from_onnx
from vitx.export.engines.tensorrt_library import load_flavor
from vitx.export.options import EngineOptions, Target
from vitx.export.precision.acceptance import Bounds, SamplingPlan
from vitx.export.precision.calibration import sample_images
from vitx.export.precision.lower import LowerPrecision, least_images, lower_precision

DEFAULT_OPTIONS = EngineOptions()
# The limit of one attempt of the bisection after a crash.
BISECTION_SECONDS = 300.0


@dataclass(frozen=True)
class EngineRequest:
    """A TensorRT plan to build from the bundle's graph; arguments as in `engine_from_onnx`."""

    flavor: Flavor
    options: EngineOptions = DEFAULT_OPTIONS
    architectures: tuple[str, ...] = ()

    def check(self, precision: Precision = "fp32", base: Base = "fp32") -> None:
        """Raise what `engine_from_onnx` would raise of any graph of these types: options, batches, library, GPU."""
        profiles_for(self.options.batches)
        asked = PlanOptions(**self.options.model_dump(exclude={"batches", "timing_cache"}))
        check_options(self.flavor, asked, self.options.timing_cache)
        targets = load_flavor(self.flavor).targets(self.architectures)
        with_precision(targets, precision, asked=bool(self.architectures))
        products = base if precision in ("int8", "fp8") else precision
        if self.flavor == "tensorrt-rtx" and "sm75" in targets and products != "fp16":
            raise InputError(
                f"TensorRT for RTX has no {products} products for sm75: leave it out of --arch, or take --precision "
                "fp16, or int8 with --base fp16"
            )


@dataclass(frozen=True)
class PrecisionRequest:
    """A lower precision to write into a graph, judged on training images of the set `data`.

    sampling_plan: the certificate to come, on images that the search must not look at. Others as in `lower_precision`.
    """

    precision: LowerPrecision
    data: str
    target: Target
    base: Base
    sampling_plan: SamplingPlan | None
    quiet: bool
    skip_bad: bool


@dataclass(frozen=True)
class LoweredFile:
    """What `lower_file` reports: the nodes left in float32, and JSON for the manifest on how they were found."""

    islands: tuple[str, ...]
    details: dict[str, Any]


def lower_file(path: Path, request: PrecisionRequest, preprocessing: Preprocessing) -> LoweredFile:
    """Replace the float32 graph at `path` by one of lower precision."""
    check_size = preprocessing.check_size
    training = open_images(request.data, "train", skip_bad=request.skip_bad, check_size=check_size)
    log_skipped(training)
    images = sample_images(training, preprocessing, least=least_images(request.precision))
    lowered = lower_precision(
        onnx.load(str(path)),
        request.precision,
        images,
        target=request.target,
        base=request.base,
        bounds=Bounds(SHARE_OF_STD[request.precision], sampling_plan=request.sampling_plan),
        quiet=request.quiet,
    )
    write_bytes(path, lowered.graph.SerializeToString())
    return LoweredFile(lowered.islands, lowered.details)


def build_engine(onnx_path: Path, plan: Path, request: EngineRequest, quiet: bool = False) -> None:
    """Build one plan and its sidecar."""
    engine_from_onnx(
        onnx_path,
        plan,
        flavor=request.flavor,
        architectures=request.architectures,
        profiles=profiles_for(request.options.batches),
        **request.options.model_dump(exclude={"batches"}),
        quiet=quiet,
    )


def convert_tensorrt(path: Path, flavor: Flavor = "tensorrt") -> None:
    """Reproduce a crash of TensorRT: build a plan with default options and throw it away."""
    with tempfile.TemporaryDirectory() as folder:
        build_engine(path, Path(folder) / "model.plan", EngineRequest(flavor))


def convert_tensorrt_rtx(path: Path) -> None:
    """Reproduce a crash of TensorRT for RTX."""
    convert_tensorrt(path, "tensorrt-rtx")


def convert_openvino(path: Path) -> None:
    """Reproduce a crash of OpenVINO."""
    with tempfile.TemporaryDirectory() as folder:
        openvino_from_onnx(path, Path(folder) / "openvino")


# A script in OUT.failed/ imports the function by its name, so these take a path and nothing else.
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
    """Run a conversion of `onnx_path` in a limited process; on a crash leave a reproduction in the folder `failed`.

    A limit that was exceeded is no crash: no part of the graph would show it.
    """
    try:
        run_limited(target, function, onnx_path, *arguments, seconds=seconds, memory_gib=memory_gib)
    except LimitExceeded as exceeded:
        raise LimitExceeded(f"{exceeded}: allow it more (--seconds, --memory-gib)") from None
    except ConversionCrashed as crash:
        limits = {"seconds": min(seconds, BISECTION_SECONDS), "memory_gib": memory_gib}
        try:
            part = write_reproduction(onnx_path, CONVERT[target], failed, str(crash), **limits)
        except CheckFailed as reason:
            raise ConversionCrashed(f"{crash}; {reason}") from None
        raise ConversionCrashed(
            f"{crash}; a graph of {counted(len(part.graph.node), 'node')} that does the same, and a script that shows "
            f"it, are in {failed}"
        ) from None
