"""The fused layers of plans that TensorRT for RTX builds, by type and by attention: no GPU is used.

    python benchmarks/export/layer_tables.py [--json FILE]

Published networks with random weights (a fusion depends on shapes and types, not on values) in fp16, and in int8 and
fp8 beside fp16 with every layer quantised, for sm86, sm89 and sm120 (fp8: sm89 and sm120); profiles for batches of 1
and 32. In int8 the weights of queries, keys and values have one scale where that fuses; "int8-per-channel", for sm89,
has one for each channel everywhere, and is left out where nothing differs.
Of each plan: kernels by the type they write, the kernels that write float32 without being an output or half a LayerNorm
(target: none), and attention kernels by type. Exit code 1 when the target is missed.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import vitx.models
from support.targets import all_hold, command_line, exit_code, report_header, save_report
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.fused_layers import count_types, float_layers
from vitx.export.engines.profiles import profiles_for
from vitx.export.engines.tensorrt_engine import engine_from_onnx
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.calibration import observe
from vitx.export.precision.half import HALVES, HalfGraph
from vitx.export.precision.qdq import QuantizedGraph

NETWORKS = {"deit_small_12": 224, "deepvit_s": 224, "deit_small_12_talking": 224, "deepvit_digits": 32}
ARCHITECTURES = {
    "fp16": ("sm86", "sm89", "sm120"),
    "int8": ("sm86", "sm89", "sm120"),
    "int8-per-channel": ("sm89",),
    "fp8": ("sm89", "sm120"),
}
BATCHES = (1, 32)
IMAGES = 4  # ranges only have to be numbers


def lowered(exact: onnx.ModelProto, kind: Any, size: int) -> onnx.ModelProto | None:
    """The graph in fp16, or in 8 bits beside it; None where it is that of int8."""
    flow = Dataflow(exact)
    if kind == "fp16":
        return HalfGraph(flow, HALVES[kind]).build(())
    kind, per_channel, _ = kind.partition("-per-channel")
    quantized = QuantizedGraph(flow, kind, "tensorrt", "fp16")
    one_scale = [layer.node for layer in quantized.layers.values() if layer.one_scale]
    if per_channel and not one_scale:
        return None
    tensors = sorted({name for layer in quantized.layers.values() for name in layer.tensors()})
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, size, size, 3), dtype=np.uint8)
    ranges = observe(exact, tensors, images)
    return quantized.build(list(quantized.layers), ranges, "max", () if per_channel else one_scale)


def measure(graph: Path, architecture: str) -> dict[str, Any]:
    """Build one plan and count its kernels."""
    plan = graph.with_suffix(".plan")
    report = engine_from_onnx(
        graph, plan, flavor="tensorrt-rtx", architectures=(architecture,), profiles=profiles_for(BATCHES), quiet=True
    )
    first = [layer for layer in report.fused if layer.profile == 0]
    found = float_layers(report.fused)
    return {
        "kernels": {
            str(batch): count_types(x for x in report.fused if x.profile == i) for i, batch in enumerate(BATCHES)
        },
        "attention": {
            str(batch): [x.outputs[0].type for x in report.fused if x.profile == i and "_gemm_mha" in x.name]
            for i, batch in enumerate(BATCHES)
        },
        "mb_moved_one_image": round(sum(layer.bytes() or 0 for layer in first) / 1e6, 1),
        "float32": [layer.name for layer in found],
        "holds": not found,
        "tensorrt_rtx": report.info.version,
    }


def main() -> int:
    arguments = command_line(__doc__).parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        for name, size in NETWORKS.items():
            preprocessing = Preprocessing(image_size=size)
            torch.manual_seed(0)
            model = rewrite_for_export(timm.create_model(name).eval(), preprocessing)
            exact = onnx_from_model(model, preprocessing, (), Path(folder) / "exact.onnx")
            for kind, architectures in ARCHITECTURES.items():
                made = lowered(exact, kind, size)
                if made is None:
                    continue
                onnx.save(made, graph)
                for architecture in architectures:
                    found = report[f"{name} {kind} {architecture}"] = measure(graph, architecture)
                    fused = {batch: len(types) for batch, types in found["attention"].items()}
                    print(
                        f"{name} {kind} {architecture}: {found['kernels']}, fused attention {fused}, "
                        f"{found['mb_moved_one_image']} MB for one image, float32 {found['float32'] or 'none'}",
                        flush=True,
                    )
    save_report({**report_header(), "plans": report}, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(exit_code(main))
