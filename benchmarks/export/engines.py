"""Time of TensorRT for RTX plans, built ahead of time on this machine's processor: no GPU is used.

    python benchmarks/export/engines.py [--model deepvit_s] [--architectures sm86,sm89,sm120,sm121] [--repeats 3]

The fp16 graph of a network with random weights is written once; its plan for all the architectures, with profiles for
batches of 1, 8, 32 and 128, is built `--repeats` times, and once for each architecture alone. Exit code 1 when the
median is not below `--limit` seconds. Architectures that the library does not know (sm90, sm100: data-centre GPUs) are
refused by name. As part (d) of benchmarks/export/against_exporter.py it is written to its results.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import timm

sys.path.insert(0, str(Path(__file__).parents[1]))
import vitx.models
from support.gpu_networks import Float32Logits
from support.targets import at_least, exit_code, network_name
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.tensorrt_engine import EngineReport, engine_from_onnx

ARCHITECTURES = ("sm86", "sm89", "sm120", "sm121")
LIMIT = 60.0  # seconds
# Layers for shapes and constants: there are many, and they cost nothing at run time.
SHAPE_KINDS = {"SHAPE", "CONSTANT", "CAST", "CONCATENATION", "GATHER", "SLICE", "SHUFFLE", "UNSQUEEZE", "SQUEEZE"}


def write_half(model: Any, image_size: int, path: Path) -> None:
    """Write the network as an fp16 graph. It is not run: random weights may overflow fp16."""
    preprocessing = Preprocessing(image_size=image_size)
    labels = tuple(str(index) for index in range(model.num_classes))
    half = Float32Logits(rewrite_for_export(model, preprocessing).half()).eval()
    onnx_from_model(half, preprocessing, labels, path, check=False)


def build(graph: Path, architectures: tuple[str, ...]) -> tuple[float, EngineReport]:
    """Seconds from the ONNX file to the plan on the disk, and what was built."""
    start = time.perf_counter()
    plan = graph.with_suffix(".plan")
    report = engine_from_onnx(graph, plan, flavor="tensorrt-rtx", architectures=architectures, quiet=True)
    return time.perf_counter() - start, report


def measure(model: str, architectures: tuple[str, ...], repeats: int, limit: float = LIMIT) -> dict[str, Any]:
    """Build the plans and print what they took; `holds` says whether the median is within `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        start = time.perf_counter()
        network: Any = timm.create_model(model).eval()
        write_half(network, network.pretrained_cfg["input_size"][-1], graph)
        graph_seconds = time.perf_counter() - start
        built = [build(graph, architectures) for _ in range(repeats)]
        alone = {name: round(build(graph, (name,))[0], 2) for name in architectures}
        graph_mb = graph.stat().st_size / 1e6
    seconds, info = [time_taken for time_taken, _ in built], built[0][1].info
    median = statistics.median(seconds)
    print(
        f"(d) {model}, fp16, {', '.join(info.architectures)}, {len(info.profiles)} profiles: "
        f"median {median:.2f} s of {repeats} ({min(seconds):.2f} to {max(seconds):.2f}); "
        f"target below {limit:g} s: {'holds' if median < limit else 'MISSED'}; "
        f"{info.size / 1e6:.1f} MB of a {graph_mb:.1f} MB graph, which took {graph_seconds:.1f} s to write"
    )
    print("(d) one architecture alone: " + ", ".join(f"{name} {value:.2f} s" for name, value in alone.items()))
    return {
        "model": model,
        "precision": info.precision,
        "architectures": info.architectures,
        "profiles": [str(profile) for profile in info.profiles],
        "plan_seconds": {"median": median, "all": seconds, "target": limit, "holds": median < limit},
        "one_architecture_seconds": alone,
        "graph_seconds": graph_seconds,
        "graph_mb": graph_mb,
        "plan_mb": info.size / 1e6,
        "working_layers": dict(Counter(working_kinds(built[0][1])).most_common()),
    }


def working_kinds(report: EngineReport) -> list[str]:
    """Of the parsed layers that compute on activations: no constants, casts or arithmetic of shapes."""
    return [
        layer
        for _, layer, kind, _ in report.layers
        if layer not in SHAPE_KINDS and "INT" not in kind and kind != "BOOL"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=network_name, default="deepvit_s")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--limit", type=float, default=LIMIT)
    arguments = parser.parse_args()
    architectures = tuple(arguments.architectures.split(","))
    report = measure(arguments.model, architectures, arguments.repeats, arguments.limit)
    return 0 if report["plan_seconds"]["holds"] else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(exit_code(main))
