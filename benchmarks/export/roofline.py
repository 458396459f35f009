"""What plans should reach on GPUs that are not here: arithmetic on their kernels and on datasheets. Nothing is run.

    python benchmarks/export/roofline.py [--batch 32] [--networks deit_small_12,deepvit_s] [--json FILE]

TensorRT for RTX builds a plan of each network in fp16, and in int8 and fp8 beside fp16 with every layer quantised (the
kinds of layer_tables.py), for one batch size; random weights, for a kernel depends on shapes and types. The table of
the plan says which nodes each kernel computes and what it reads and writes. A kernel is given the larger of

- its products' operations over the dense peak of the type that they read, with sums in float32;
- its bytes, constants included, over the bandwidth of the memory.

Images a second are those of the sum over the kernels. Left out are the start of a kernel, exponentials and GELU, and
caches, which make a plan faster where they hold what the next kernel reads: only `ideal`, all operations at the peak
and no bytes, is a bound. `compute` is the share of the time in kernels that the peak limits. A10 and A100 have no
fp8. The builder offers no sm90: H100 has the kernels of sm89.
"""

import copy
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import timm
import torch
from onnx.shape_inference import infer_shapes

sys.path.insert(0, str(Path(__file__).parents[1]))
from layer_tables import NETWORKS, lowered

import vitx.models
from support.targets import command_line, report_header, save_report, some_of
from vitx.bench.graph_cost import node_flops
from vitx.core.preprocess import Preprocessing
from vitx.core.tensorrt_plan import Profile
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.fused_layers import FusedLayer
from vitx.export.engines.tensorrt_engine import engine_from_onnx


class Gpu(NamedTuple):
    """A datasheet: dense peaks with float32 (int32) sums in TFLOP/s, memory in TB/s, and whose kernels are counted."""

    architecture: str
    fp16: float
    int8: float
    fp8: float | None
    memory: float


GPUS = {
    "A10": Gpu("sm86", 125, 250, None, 0.600),
    "L4": Gpu("sm89", 121, 242.5, 242.5, 0.300),
    "A100 SXM": Gpu("sm80", 312, 624, None, 2.039),
    "H100 SXM": Gpu("sm89", 989.5, 1979, 1979, 3.35),
    "RTX 4090": Gpu("sm89", 165.2, 660.6, 330.3, 1.008),
    "RTX 5090": Gpu("sm120", 209.5, 838, 419, 1.792),
}
KINDS = ("fp16", "int8", "int8-per-channel", "fp8")


def node_operations(graph: onnx.ModelProto, batch: int) -> dict[str, int]:
    """FLOPs of each node with products, by its name."""
    graph = copy.deepcopy(graph)
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    inferred = infer_shapes(graph, data_prop=True).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    shapes |= {weight.name: list(weight.dims) for weight in inferred.initializer}
    found = {}
    for node in inferred.node:
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            sides = [[shapes[name] for name in names if name] for names in (node.input, node.output)]
            found[node.name] = node_flops(node.op_type, *sides)
            if not found[node.name]:
                raise SystemExit(f"{node.op_type} {node.name}: its shapes {sides} are not known")
    return found


def on_paper(layers: tuple[FusedLayer, ...], operations: dict[str, int], gpu: Gpu, batch: int) -> dict[str, Any]:
    """The arithmetic of one plan on one GPU. A node that the builder split into several kernels counts once."""
    owner = {node: layer.name for layer in reversed(layers) for node in layer.nodes if node in operations}
    missing = operations.keys() - owner.keys()
    if missing:
        raise SystemExit(f"no kernel computes {sorted(missing)[:3]}")
    seconds = {"compute": 0.0, "memory": 0.0}
    ideal = 0.0
    for layer in layers:
        flops = sum(operations[node] for node in layer.nodes if owner.get(node) == layer.name)
        peak = getattr(gpu, product_type(layer)) if flops else math.inf
        compute, memory = flops / peak / 1e12, (layer.bytes() or 0) / gpu.memory / 1e12
        seconds["compute" if compute > memory else "memory"] += max(compute, memory)
        ideal += compute
    total = sum(seconds.values())
    return {
        "images_per_second": round(batch / total),
        "ms": round(1e3 * total, 3),
        "compute": round(seconds["compute"] / total, 2),
        "ideal_images_per_second": round(batch / ideal),
    }


def product_type(layer: FusedLayer) -> str:
    """The narrowest type that a kernel with products reads: int8 and fp8 operands meet in 8-bit products."""
    read = {tensor.type for tensor in (*layer.inputs, *layer.constants)}
    return next((kind for kind in ("int8", "fp8") if kind in read), "fp16")


def plans(graph: onnx.ModelProto, kind: str, batch: int, folder: Path) -> dict[str, Any]:
    operations = node_operations(graph, batch)
    path = folder / "model.onnx"
    onnx.save(graph, path)
    found: dict[str, Any] = {}
    tables: dict[str, tuple[FusedLayer, ...]] = {}
    for name, gpu in GPUS.items():
        if getattr(gpu, kind.partition("-")[0]) is None:
            continue
        if gpu.architecture not in tables:
            profiles = (Profile(minimum=batch, optimum=batch, maximum=batch),)
            plan, target = folder / "model.plan", (gpu.architecture,)
            report = engine_from_onnx(
                path, plan, flavor="tensorrt-rtx", architectures=target, profiles=profiles, quiet=True
            )
            tables[gpu.architecture] = report.fused
        layers = tables[gpu.architecture]
        mb = round(sum(layer.bytes() or 0 for layer in layers) / 1e6)
        found[name] = on_paper(layers, operations, gpu, batch) | {"kernels": len(layers), "mb": mb}
    whole = {"gflop_an_image": round(sum(operations.values()) / batch / 1e9, 2), "tensorrt_rtx": report.info.version}
    return whole | found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--networks", type=some_of(NETWORKS), default=[*NETWORKS])
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.networks:
            preprocessing = Preprocessing(image_size=NETWORKS[name])
            torch.manual_seed(0)
            model = rewrite_for_export(timm.create_model(name).eval(), preprocessing)
            exact = onnx_from_model(model, preprocessing, (), Path(folder) / "exact.onnx")
            for kind in KINDS:
                graph = lowered(exact, kind, NETWORKS[name])
                if graph is None:
                    continue
                found = plans(graph, kind, arguments.batch, Path(folder))
                report[f"{name} {kind}"] = found
                print(f"{name} {kind}: {found}", flush=True)
    save_report({**report_header(), "batch": arguments.batch, "on paper": report}, arguments.json)
    return 0


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(main())
