"""int8 against float32 of the same graph in ONNX Runtime on one CPU thread, with top-1 agreement in the same row.

    python benchmarks/export/quantization.py [--run RUN]... [--networks deit_s deepvit_s] [--repeats 9] [--json FILE]

The sessions take turns; a ratio is that of the medians. Beside our int8 stands ONNX Runtime's own dynamic quantisation
of the same graph. `--run` names a run trained on the digits, and may be repeated: top-1 agreement is over its 360
evaluation images, and the layers that stay in float32 are those that the search leaves. A run of DeiT-S's size:

    vitx train digits-deit --out RUN --set model.name=deit_small_12 --set model.kwargs.patch_size=8 \\
      --set optimizer.lr=5e-4 --set epochs=7 --set cutmix.probability=0 --set losses.contrastive=0 --set losses.mixing=0

DeiT-S and DeepViT-S at 224 px have random weights, every layer is quantised, and their rows are of speed alone: images
differ too little in a random network for its classes to mean anything (docs/precision.md). scikit-learn's digits are
the only labelled real images that come with a package; nothing here speaks of ImageNet.
"""

import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import timm
import torch
from torch import nn

import vitx.models

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.onnx_session import cpu_session
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, verdict
from support.turns import take_turns
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.export import SourceRequest, onnx_from_model, rewrite_for_export
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Agreement, Bounds, agreement_of
from vitx.export.precision.calibration import sample_images
from vitx.export.precision.lower import lower_precision

NETWORKS = {"deit_s": "deit_small_patch16_224", "deepvit_s": "deepvit_s"}
# As many as `lower_precision` asks for.
CALIBRATION = 320
# What was promised of a network of DeiT-S's size: speed over float32's, at this top-1 agreement.
SPEED_TARGET, AGREEMENT_TARGET = 2.2, 0.99
NO_BOUNDS = Bounds(math.inf, agreement=0.0)


def trace(model: nn.Module, preprocessing: Preprocessing, labels: tuple[str, ...], path: Path) -> onnx.ModelProto:
    return onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, labels, path)


def random_network(name: str, folder: Path) -> tuple[onnx.ModelProto, UInt8Array]:
    """The graph of one of timm's names, and images at 224 px."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=10).eval()
    preprocessing, digits = Preprocessing(image_size=224), open_images("digits", "train")
    graph = trace(model, preprocessing, digits.class_names, folder / f"{name}.onnx")
    return graph, sample_images(digits, preprocessing, CALIBRATION)


def digits_run(run: str, folder: Path) -> tuple[onnx.ModelProto, UInt8Array, UInt8Array]:
    source = SourceRequest(run).load()
    graph = trace(source.model, source.preprocessing, source.class_names, folder / "digits.onnx")
    held_out = open_images("digits", "val")
    calibration = sample_images(open_images("digits", "train"), source.preprocessing)
    return graph, calibration, np.concatenate(list(held_out.batches(source.preprocessing, 64)))


def dynamically_quantized(graph: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """ONNX Runtime's own, of products with a weight matrix."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)
    bare = onnx.ModelProto()
    bare.CopyFrom(graph)
    del bare.graph.value_info[:]  # its shape inference trips over what an exporter left behind
    # Per channel it makes a graph that fails on a head mix, whose constant has three axes.
    quantize_dynamic(
        bare, folder / "dynamic.onnx", weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"]
    )
    return onnx.load(str(folder / "dynamic.onnx"))


def medians(graphs: dict[str, onnx.ModelProto], batch: UInt8Array, repeats: int) -> dict[str, float]:
    """Milliseconds an image; the graphs take turns."""
    sessions = {name: cpu_session(graph.SerializeToString()) for name, graph in graphs.items()}
    times = take_turns({name: partial(milliseconds, session, batch) for name, session in sessions.items()}, repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def milliseconds(session: Any, batch: UInt8Array) -> float:
    """Of one image."""
    start = time.perf_counter()
    session.run(None, {"images": batch})
    return 1000 * (time.perf_counter() - start) / len(batch)


def agreements(graphs: dict[str, onnx.ModelProto], images: UInt8Array) -> dict[str, Agreement]:
    """Each graph against the float32 one."""
    expected = logits_of(graphs["float32"], images)
    return {name: agreement_of(expected, logits_of(graphs[name], images)) for name in graphs if name != "float32"}


def row(
    title: str,
    graph: onnx.ModelProto,
    calibration: UInt8Array,
    held_out: UInt8Array | None,
    batch: int,
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    """Agreement is measured on `held_out`; without it every layer is quantised, whatever comes of it."""
    start = time.perf_counter()
    bounds = NO_BOUNDS if held_out is None else None
    lowered = lower_precision(graph, "int8", calibration, target="cpu", bounds=bounds)
    seconds = time.perf_counter() - start
    graphs = {"float32": graph, "int8": lowered.graph, "dynamic": dynamically_quantized(graph, folder)}
    times = medians(graphs, calibration[:batch], repeats)
    ratios = {name: times["float32"] / times[name] for name in ("int8", "dynamic")}
    for name, ratio in ratios.items():
        print(f"{title}, {name}: {times['float32']:.2f} → {times[name]:.2f} ms an image, × {ratio:.2f}")
    found = {} if held_out is None else agreements(graphs, held_out)
    for name, agreement in found.items():
        print(f"{title}, {name}: top-1 agreement {agreement.agreement:.4f}; {agreement}")
    agrees = held_out is None or found["int8"].agreement >= AGREEMENT_TARGET
    judged = {"target": SPEED_TARGET, "holds": ratios["int8"] >= SPEED_TARGET and agrees}
    print(f"{title}, int8: target × {SPEED_TARGET} at an agreement of {AGREEMENT_TARGET}: {verdict(judged)}")
    return {
        **judged,
        "batch": batch,
        "ms_per_image": times,
        "speed_ratio": ratios,
        "agreement": {name: agreement.as_json() for name, agreement in found.items()},
        "top_1_agreement": {name: agreement.agreement for name, agreement in found.items()},
        "bytes": {name: len(model.SerializeToString()) for name, model in graphs.items()},
        "search_seconds": seconds,
        "method": lowered.details["method"],
        "methods": lowered.details["methods"],
        "layers": lowered.details["layers"],
        "in_float32": list(lowered.islands),
    }


def measure(runs: Sequence[str], repeats: int, networks: Sequence[str] = tuple(NETWORKS)) -> dict[str, Any]:
    """The rows of the report by name: every run, then every network."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in runs:
            graph, calibration, held_out = digits_run(run, folder)
            title = f"{RunFolder.open(run).info.model.name} on the digits"
            report[title] = row(title, graph, calibration, held_out, 32, 2 * repeats, folder)
        for title in networks:
            graph, calibration = random_network(NETWORKS[title], folder)
            report[title] = row(title, graph, calibration, None, 8, repeats, folder)
    return report


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--run", action="append", default=[], help="a run trained on the digits; may be repeated")
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--repeats", type=at_least(1), default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {**report_header(), "threads": 1}
    report |= measure(arguments.run, arguments.repeats, arguments.networks)
    print(json.dumps(report["machine"]))
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(exit_code(main))
