"""int8 against float32 of the same graph in ONNX Runtime on one CPU thread, with top-1 agreement in the same row.

    python benchmarks/quantization.py [--run RUN] [--rows digits deit_s deepvit_s] [--repeats 9] [--json FILE]

The sessions take turns; a ratio is that of the medians. Beside our int8 stands ONNX Runtime's own dynamic quantisation
of the same graph. With `--run`, a trained run on the digits: agreement is over its 360 evaluation images. DeiT-S has a
random body, biases and norms included, and a head fitted to the digits at 224 px by least squares: its speed is that
of any DeiT-S, and its margins are those of a classifier. (With 1,000 random classes the largest two logits are so close
that 1 to 3 of 32 images change class whatever is done.) DeepViT-S is random altogether and quantised whole: its row is
of speed alone. scikit-learn's digits are the only labelled real images that come with a package; nothing here speaks
of ImageNet.
"""

import argparse
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import timm
import torch
from torch import nn

import vitx.models
from vitx.core.images import open_images
from vitx.core.machine import describe_machine, installed_versions
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.export import SourceRequest, onnx_from_model, rewrite_for_export
from vitx.export.acceptance import Agreement, Bounds, agreement_of
from vitx.export.calibration import calibration_images, evenly_spaced, logits_of
from vitx.export.precision import lower_precision
from vitx.models import image_tensor

# Images at 224 px for the ranges and the search; others, from the evaluation split, for the agreement.
CALIBRATION, COMPARED = 400, 200
NETWORKS = {"deit_s": "deit_small_patch16_224", "deepvit_s": "deepvit_s"}
# Thirty-two random blocks of Re-Attention have no margins worth measuring, and the search would find none.
SPEED_ALONE = {"deepvit_s": Bounds(math.inf, agreement=0.0)}
ROWS = ("digits", *NETWORKS)


def trace(model: nn.Module, preprocessing: Preprocessing, labels: tuple[str, ...], path: Path) -> onnx.ModelProto:
    return onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, labels, path)


def random_network(name: str, folder: Path) -> tuple[onnx.ModelProto, UInt8Array, UInt8Array]:
    """The graph of one of timm's names, images to calibrate on, and other images to compare on."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=10).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.copy_(1 + 0.3 * torch.randn_like(module.weight))
                module.bias.copy_(0.3 * torch.randn_like(module.bias))
            if isinstance(module, nn.Linear):  # timm's .02 gives maps that are all alike
                module.weight.mul_(2.5)
                module.bias.copy_(0.1 * torch.randn_like(module.bias))
    preprocessing = Preprocessing(image_size=224)
    digits, held_out = open_images("digits", "train"), open_images("digits", "val")
    some = calibration_images(digits, preprocessing, CALIBRATION)
    labels = digits.labels[evenly_spaced(len(digits), CALIBRATION)]
    if name not in SPEED_ALONE:
        fit_head(model, some, labels, preprocessing)
    graph = trace(model, preprocessing, held_out.class_names, folder / f"{name}.onnx")
    return graph, some, np.concatenate(list(held_out.first(COMPARED).batches(preprocessing, 50)))


def fit_head(model: Any, images: UInt8Array, labels: Any, preprocessing: Preprocessing) -> None:
    """Ridge regression of the classes on the class token."""
    with torch.inference_mode():
        parts = [
            model.forward_head(model.forward_features(pixels), pre_logits=True)
            for batch in np.array_split(images, len(images) // 8)
            for pixels in [image_tensor(batch, preprocessing.mean, preprocessing.std)]
        ]
        features = torch.cat(parts).double()
        centred = features - features.mean(dim=0)
        wanted = nn.functional.one_hot(torch.from_numpy(labels), 10).double()
        gram = centred.T @ centred
        gram += 1e-2 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        weight = torch.linalg.solve(gram, centred.T @ (wanted - wanted.mean(dim=0))).T
        model.head.weight.data = weight.float()
        model.head.bias.data = (wanted.mean(dim=0) - weight @ features.mean(dim=0)).float()


def digits_run(run: str, folder: Path) -> tuple[onnx.ModelProto, UInt8Array, UInt8Array]:
    source = SourceRequest(run).load()
    graph = trace(source.model, source.preprocessing, source.class_names, folder / "digits.onnx")
    held_out = open_images("digits", "val")
    calibration = calibration_images(open_images("digits", "train"), source.preprocessing)
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


def session(graph: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


def medians(graphs: dict[str, onnx.ModelProto], batch: UInt8Array, repeats: int) -> dict[str, float]:
    """Milliseconds an image; every round runs each graph once, in another order."""
    sessions = {name: session(graph) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + 1):
        order = list(sessions) if repeat % 2 else list(reversed(sessions))
        for name in order:
            start = time.perf_counter()
            sessions[name].run(None, {"images": batch})
            times[name].append(1000 * (time.perf_counter() - start) / len(batch))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def agreements(graphs: dict[str, onnx.ModelProto], images: UInt8Array) -> dict[str, Agreement]:
    """Each graph against the float32 one."""
    expected = logits_of(graphs["float32"], images)
    return {name: agreement_of(expected, logits_of(graphs[name], images)) for name in graphs if name != "float32"}


def row(
    title: str,
    graph: onnx.ModelProto,
    calibration: UInt8Array,
    images: UInt8Array,
    batch: int,
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    start = time.perf_counter()
    lowered = lower_precision(graph, "int8", calibration, target="cpu", bounds=SPEED_ALONE.get(title))
    seconds = time.perf_counter() - start
    graphs = {"float32": graph, "int8": lowered.graph, "dynamic": dynamically_quantized(graph, folder)}
    times = medians(graphs, images[:batch], repeats)
    ratios = {name: times["float32"] / times[name] for name in ("int8", "dynamic")}
    for name, ratio in ratios.items():
        print(f"{title}, {name}: {times['float32']:.2f} → {times[name]:.2f} ms an image, × {ratio:.2f}")
    found = {} if title in SPEED_ALONE else agreements(graphs, images)
    for name, agreement in found.items():
        print(f"{title}, {name}: top-1 agreement {agreement.agreement:.4f}; {agreement}")
    return {
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


def measure(run: str | None, repeats: int, rows: Sequence[str] = ROWS) -> dict[str, Any]:
    """The rows of the report by name; without `run` the digits are left out."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if run and "digits" in rows:
            report["digits"] = row("digits", *digits_run(run, folder), 32, 3 * repeats, folder)
        for title in NETWORKS:
            if title in rows:
                report[title] = row(title, *random_network(NETWORKS[title], folder), 8, repeats, folder)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run trained on the digits")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": describe_machine(), "versions": installed_versions(), "threads": 1}
    report |= measure(arguments.run, arguments.repeats, arguments.rows)
    print(json.dumps(report["machine"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
