"""8 bits beside ONNX Runtime's and NVIDIA ModelOpt's quantisers, on the same trained networks and images. No speed.

    python benchmarks/export/against_quantizers.py --run RUN [--run RUN]… [--modelopt PYTHON] [--json FILE]

Each run was trained on the digits (`vitx train digits-deit`, digits-deepvit, digits-patchvit, digits-alternet). Ranges
are from the same 512 training images for every tool; agreement is with the checkpoint's classes on the 360 evaluation
images and, because a near tie among so few flips by chance, on 3,240: the same shifted by up to one of the scanner's
pixels in each direction. The error is that of the logits in their standard deviations. PYTHON is the interpreter of an
environment with nvidia-modelopt[onnx], whose requirements differ from ours.

- vitx: `lower_precision` as `vitx export` calls it: the search aims at a certificate of 360 images without a flip.
- ONNX Runtime: `quantize_static`, Q/DQ, per channel, MinMax, MatMul, Gemm and Conv; a product with a constant of three
  axes is excluded, or the graph loads and fails when it runs. uint8 asymmetric as for CPUs, int8 symmetric as for GPUs.
- ModelOpt: its defaults for ONNX (int8 by entropy, fp8 by max), with what is not quantised in float16 and in float32.

float16 is rounded as on a GPU (`cpu_twin`), for every tool alike. A tool that fails has its message in the row.
"""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from quantization import digits_run
from support.targets import command_line, exit_code, report_header, require_program, save_report
from vitx.core.errors import VitxError
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.core.tolerance import SHARE_OF_STD
from vitx.data.image_set import evenly_spaced
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Bounds, SamplingPlan, agreement_of
from vitx.export.precision.half import NUMPY_TYPES, cpu_twin
from vitx.export.precision.lower import lower_precision

CALIBRATION = 512
SCANNED = 8  # the digits' own pixels a side
PRODUCTS = ("MatMul", "Gemm", "Conv")
MODELOPT = """
import sys, numpy
from modelopt.onnx.quantization import quantize
graph, images, out, mode, rest = sys.argv[1:]
quantize(
    graph, quantize_mode=mode, calibration_data={"images": numpy.load(images)}, calibration_eps=["cpu"],
    high_precision_dtype=rest, output_path=out, log_level="ERROR",
)
"""


class Tools:
    """Every quantiser on one graph; each returns a graph."""

    def __init__(self, graph: onnx.ModelProto, images: UInt8Array, folder: Path, modelopt: str | None) -> None:
        self.graph, self.images, self.folder, self.modelopt = graph, images, folder, modelopt

    def all(self) -> dict[str, Callable[[], onnx.ModelProto]]:
        found: dict[str, Callable[[], onnx.ModelProto]] = {
            "vitx int8, cpu": partial(self.vitx, "int8", "cpu", "fp32"),
            "vitx int8, tensorrt, fp16": partial(self.vitx, "int8", "tensorrt", "fp16"),
            "vitx fp8, tensorrt, fp16": partial(self.vitx, "fp8", "tensorrt", "fp16"),
            "ONNX Runtime uint8": partial(self.onnx_runtime, symmetric=False),
            "ONNX Runtime int8": partial(self.onnx_runtime, symmetric=True),
        }
        if self.modelopt is not None:
            for mode in ("int8", "fp8"):
                for rest in ("fp16", "fp32"):
                    found[f"ModelOpt {mode}, {rest}"] = partial(self.model_opt, mode, rest)
        return found

    def vitx(self, kind: Any, target: Any, base: Any) -> onnx.ModelProto:
        bounds = Bounds(SHARE_OF_STD[kind], sampling_plan=SamplingPlan(360, 0))
        return lower_precision(self.graph, kind, self.images, target=target, base=base, bounds=bounds, quiet=True).graph

    def onnx_runtime(self, *, symmetric: bool) -> onnx.ModelProto:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            def __init__(self, images: UInt8Array) -> None:
                self.chunks = iter(np.split(images, range(8, len(images), 8)))

            def get_next(self) -> Any:
                chunk = next(self.chunks, None)
                return None if chunk is None else {"images": chunk}

        bare = onnx.ModelProto()
        bare.CopyFrom(self.graph)
        del bare.graph.value_info[:]  # its shape inference trips over what an exporter left behind
        flow = Dataflow(self.graph)
        excluded = [
            node.name
            for node in flow.nodes
            if node.op_type == "MatMul"
            and any(len(flow.constants[x].dims) > 2 for x in node.input if x in flow.constants)
        ]
        kind = QuantType.QInt8 if symmetric else QuantType.QUInt8
        path = self.folder / "static.onnx"
        quantize_static(
            bare, path, Reader(self.images), quant_format=QuantFormat.QDQ, per_channel=True,
            weight_type=QuantType.QInt8, activation_type=kind, op_types_to_quantize=list(PRODUCTS),
            nodes_to_exclude=excluded, extra_options={"ActivationSymmetric": symmetric},
        )  # fmt: skip
        return onnx.load(str(path))

    def model_opt(self, mode: str, rest: str) -> onnx.ModelProto:
        graph, images, out = (self.folder / name for name in ("exact.onnx", "images.npy", "modelopt.onnx"))
        onnx.save(self.graph, graph)
        np.save(images, self.images)
        out.unlink(missing_ok=True)
        command = [str(self.modelopt), "-c", MODELOPT, str(graph), str(images), str(out), mode, rest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.is_file():
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise RuntimeError("".join(last) or f"exit code {done.returncode}")
        return onnx.load(str(out))


def in_eight_bits(graph: onnx.ModelProto) -> int:
    """How many products read a dequantised tensor."""
    made = {name: node.op_type for node in graph.graph.node for name in node.output}
    return sum(
        node.op_type in PRODUCTS and any(made.get(name) == "DequantizeLinear" for name in node.input[:2])
        for node in graph.graph.node
    )


def shifted(images: UInt8Array) -> UInt8Array:
    """The images (n, S, S, 3) first, then each shifted by a scanner's pixel, S/8, in the eight directions."""
    step = images.shape[1] // SCANNED
    padded = np.pad(images, ((0, 0), (step, step), (step, step), (0, 0)), mode="edge")
    size = images.shape[1]
    moves = sorted(product((0, step, 2 * step), repeat=2), key=lambda move: move != (step, step))
    return np.concatenate([padded[:, y : y + size, x : x + size] for y, x in moves])


def row(make: Callable[[], onnx.ModelProto], expected: Any, images: UInt8Array) -> dict[str, Any]:
    try:
        graph = make()
        half = any(tensor.data_type in NUMPY_TYPES for tensor in graph.graph.initializer)
        found = logits_of(cpu_twin(graph) if half else graph, images, fused=False)
    # Whatever a tool or its graph fails with is its row.
    except (VitxError, RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        return {"failed": " ".join(str(error).split())[:300]}
    unmoved = len(images) // 9
    parts = {"unmoved": agreement_of(expected[:unmoved], found[:unmoved]), "all": agreement_of(expected, found)}
    return {"products": in_eight_bits(graph)} | {
        name: {"agreement": part.agreement, **part.as_json()} for name, part in parts.items()
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--run", action="append", required=True, help="a run trained on the digits; may be repeated")
    parser.add_argument("--modelopt", help="the Python of an environment with nvidia-modelopt[onnx]")
    arguments = parser.parse_args()
    if arguments.modelopt is not None:
        require_program(arguments.modelopt)
    logging.disable(logging.WARNING)  # ONNX Runtime's advice
    for run in arguments.run:
        title, report = RunFolder.open(run).info.recipe, dict[str, Any]()
        with tempfile.TemporaryDirectory() as name:
            graph, images, held_out = digits_run(run, Path(name))
            calibration = images[evenly_spaced(len(images), CALIBRATION)]
            held_out = shifted(held_out)
            expected = logits_of(graph, held_out)
            for tool, make in Tools(graph, calibration, Path(name), arguments.modelopt).all().items():
                found = report[tool] = row(make, expected, held_out)
                print(f"{title}, {tool}: {found}", flush=True)
        command = f"python benchmarks/export/against_quantizers.py --run {title}"
        if arguments.modelopt is not None:
            command += " --modelopt python"
        save_report({**report_header(), title: report}, arguments.json, command)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
