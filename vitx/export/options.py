"""What `vitx export` may be told. Every default is here, and nowhere else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from vitx.core.errors import unknown_name
from vitx.core.options import (
    OUTPUTS,
    Base,
    CheckpointOption,
    DataOption,
    DeviceOption,
    MaxFlipRate,
    Options,
    Precision,
    comma_separated,
    option,
    parse_batch_sizes,
)
from vitx.core.tensorrt_plan import DEFAULT_LEVEL, PluginName

Target = Literal["cpu", "tensorrt"]


def parse_witness(given: Any) -> Any:
    """'none' → 0, '200' → 200, anything but a text as it is; raise ValueError for another text."""
    if not isinstance(given, str):
        return given
    if given == "none":
        return 0
    if not (given.isascii() and given.isdigit() and int(given)):
        raise ValueError("expected a number of images, or none")
    return int(given)


class EngineOptions(Options):
    """How a TensorRT plan is built; see `engine_from_onnx`. batches: one optimisation profile each."""

    batches: Annotated[tuple[int, ...], BeforeValidator(parse_batch_sizes)] = option(
        (1, 8, 32, 128), "Batch sizes a plan is made for.", flag="--profiles", text=True
    )
    builder_level: int = option(DEFAULT_LEVEL, "With --trt: 0 (fast to build) to 5 (fast to run).")
    timing_cache: Path | None = option(None, "With --trt: read if there, and written back.")
    version_compatible: bool = option(False, "Plan loads in newer TensorRT.")
    hardware_compatible: bool = option(False, "Plan runs on all since Ampere.")
    plugin: PluginName | None = option(None, "With --trt: Re-Attention through our kernels. Not run on a GPU yet.")


class ExportOptions(Options):
    """What to make of a source; seconds and memory_gib (resident) are limits of each conversion."""

    headings: ClassVar[Mapping[str, str]] = {
        "precision": "Precision",
        "without": "Rewrites",
        "trt": "Engines",
        "checkpoint": "Certificate",
        "outputs": "What else is written",
    }
    precision: Precision = option("fp32", "Written into the graph.")
    base: Base | None = option(
        None, "What computes beside int8 and fp8 products. Default: fp16 for TensorRT and for fp8, fp32 for a CPU."
    )
    calibration: str | None = option(
        None, "Judges a lower precision. Default: the training images.", flag="--calibration-data"
    )
    target: Target | None = option(
        None, "What int8 is written for. Default: tensorrt with a plan, else cpu.", flag="--quantize-for"
    )
    without: tuple[str, ...] = option((), "Leave a rewrite out; may be repeated.", metavar="REWRITE")
    with_: tuple[str, ...] = option((), "Add a rewrite that is off by default; may be repeated.", metavar="REWRITE")
    explain: bool = option(False, "Only print what each rewrite removes.")
    trt: bool = option(False, "Build a TensorRT plan for this machine's GPU.")
    trt_rtx: bool = option(False, "Build a TensorRT for RTX plan; needs no GPU.")
    arch: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = option(
        (), "With --trt-rtx: sm86,sm89,sm120.", text=True
    )
    engine: EngineOptions = EngineOptions()
    openvino: bool = option(False, "Add OpenVINO IR.")
    for_: Literal["cpu"] | None = option(
        None,
        "Add what may be fastest there, and keep what passes: an int8 graph, OpenVINO IR, and it in bfloat16.",
        flag="--for",
    )
    seconds: float = option(3600, "Time limit of one conversion.", ge=1)
    memory_gib: float = option(64, "Memory limit of one conversion.", ge=0.1)
    checkpoint: CheckpointOption = "best"
    data: DataOption = None
    max_flip_rate: MaxFlipRate = 0.01
    witness: Annotated[int | None, BeforeValidator(parse_witness)] = option(
        None,
        "Evaluation images that certify the bundle elsewhere. Default: at most 20 MB, a tenth more, and seconds.",
        metavar="N|none",
        text=True,
    )
    device: DeviceOption = "auto"
    skip_bad: bool = option(False, "Leave unreadable images out, and count them.")
    uncertified: bool = option(False, "Write the bundle without comparing it with the checkpoint.")
    outputs: tuple[str, ...] = option(
        (),
        "What sessions may ask for beside logits: embedding, attention or rollout; may be repeated.",
        flag="--output",
        metavar="NAME",
    )
    triton: Path | None = option(None, "Also write a Triton model repository.", metavar="DIR")
    hub: Path | None = option(None, "Also write timm's and Hugging Face's layout, with a model card.", metavar="DIR")
    sign: Path | None = option(None, "Sign the bundle with this private key (elliptic curve, PEM).", metavar="KEY")

    def quantize_for(self) -> Target:
        """The target of an int8 or fp8 graph: fp8 has no other than TensorRT."""
        return self.target or ("tensorrt" if self.trt or self.trt_rtx or self.precision == "fp8" else "cpu")

    def base_type(self) -> Base:
        """What computes beside 8-bit products; fp32 for other precisions.

        TensorRT runs it in the tensor cores' type at half the bytes; a CPU has no kernels of half types to gain by.
        """
        if self.precision not in ("int8", "fp8"):
            return "fp32"
        return self.base or ("fp16" if self.quantize_for() == "tensorrt" else "fp32")

    @model_validator(mode="after")
    def _options_that_go_together(self) -> "ExportOptions":
        if self.arch and not self.trt_rtx:
            raise ValueError(f"--arch {','.join(self.arch)} goes with --trt-rtx: --trt builds for this machine's GPU")
        if self.engine.plugin is not None and not self.trt:
            raise ValueError(f"--plugin {self.engine.plugin} goes with --trt: TensorRT alone takes it")
        if not (self.trt or self.trt_rtx):
            for name, field in EngineOptions.model_fields.items():
                if getattr(self.engine, name) != field.default:
                    flag = "--profiles" if name == "batches" else f"--{name.replace('_', '-')}"
                    raise ValueError(f"{flag} is of a plan, and none is built: leave it out, or add --trt or --trt-rtx")
        if self.target == "cpu" and (self.trt or self.trt_rtx):
            raise ValueError(
                "--quantize-for cpu makes a graph that TensorRT does not read: leave --trt and --trt-rtx out"
            )
        for name in self.outputs:
            if name not in OUTPUTS:
                raise unknown_name("--output", name, OUTPUTS)
        if self.outputs and self.witness == 0:
            raise ValueError(f"--output {self.outputs[0]} is certified by the witness set: leave --witness none out")
        if self.uncertified and self.witness:
            raise ValueError(f"--witness {self.witness} is made with the certificate: leave --uncertified out")
        if self.uncertified and self.for_:
            raise ValueError("--for cpu keeps what the certificate passes: leave --uncertified out, or take --openvino")
        if self.calibration is not None and self.precision == "fp32" and self.for_ is None:
            raise ValueError(
                f"--calibration-data {self.calibration} goes with a --precision below fp32 or --for cpu: leave it out"
            )
        if self.base is not None and self.precision not in ("int8", "fp8"):
            raise ValueError(f"--base {self.base} is of int8 and fp8, and {self.precision} is its own: leave it out")
        if self.quantize_for() == "cpu" and self.base_type() != "fp32":
            raise ValueError(
                f"--base {self.base} of int8 is for TensorRT, a CPU only loses by it: leave it out, or add "
                "--quantize-for tensorrt"
            )
        if self.target is not None and self.precision != "int8":
            raise ValueError(
                f"--quantize-for {self.target} is of int8, and {self.precision} has one form: leave it out"
            )
        return self
