"""int8 against float32 of the same graph in ONNX Runtime on one CPU thread, with top-1 agreement in the same row.

    python benchmarks/quantization.py [--run RUN] [--repeats 9] [--json FILE]

The sessions take turns; a ratio is that of the medians. Beside our int8 stands ONNX Runtime's own dynamic quantisation
of the same graph. With `--run`, a trained run on the digits: agreement is over its 360 evaluation images. DeiT-S has a
random body, biases and norms included, and a head fitted to the digits at 224 px by least squares: its speed is that
of any DeiT-S, and its margins are those of a classifier. (With 1,000 random classes the largest two logits are so close
that 1 to 3 of 32 images change class whatever is done.) scikit-learn's digits are the only labelled real images that
come with a package; nothing here speaks of ImageNet.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
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
from vitx.export.acceptance import agreement_of
from vitx.export.calibration import calibration_images, logits_of
from vitx.export.precision import lower_precision
from vitx.models import image_tensor


def trace(model: nn.Module, preprocessing: Preprocessing, labels: tuple[str, ...], path: Path) -> onnx.ModelProto:
    return onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, labels, path)


def deit_s(folder: Path) -> tuple[onnx.ModelProto, UInt8Array, UInt8Array]:
    """The graph, images to calibrate on, and other images to compare on."""
    torch.manual_seed(0)
    model: Any = timm.create_model("deit_small_patch16_224", num_classes=10).eval()
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
    some = calibration_images(digits, preprocessing, 400)
    labels = digits.labels[np.linspace(0, len(digits) - 1, 400).astype(int)]
    fit_head(model, some, labels, preprocessing)
    graph = trace(model, preprocessing, held_out.class_names, folder / "deit_s.onnx")
    return graph, some, np.concatenate(list(held_out.first(200).batches(preprocessing, 50)))


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
    lowered = lower_precision(graph, "int8", calibration, target="cpu")
    seconds = time.perf_counter() - start
    graphs = {"float32": graph, "int8": lowered.graph, "dynamic": dynamically_quantized(graph, folder)}
    times = medians(graphs, images[:batch], repeats)
    expected = logits_of(graph, images)
    found = {name: agreement_of(expected, logits_of(graphs[name], images)) for name in ("int8", "dynamic")}
    for name, agreement in found.items():
        print(
            f"{title}, {name}: {times['float32']:.2f} → {times[name]:.2f} ms an image, × "
            f"{times['float32'] / times[name]:.2f}; top-1 agreement {agreement.agreement:.4f} of {agreement.images}, "
            f"largest logit error {agreement.max_error:.3g} standard deviations"
        )
    return {
        "batch": batch,
        "ms_per_image": times,
        "speed_ratio": {name: times["float32"] / times[name] for name in found},
        "agreement": {name: agreement.as_json() for name, agreement in found.items()},
        "top_1_agreement": {name: agreement.agreement for name, agreement in found.items()},
        "bytes": {name: len(model.SerializeToString()) for name, model in graphs.items()},
        "search_seconds": seconds,
        "method": lowered.details["method"],
        "methods": lowered.details["methods"],
        "layers": lowered.details["layers"],
        "in_float32": list(lowered.islands),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run trained on the digits")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": describe_machine(), "versions": installed_versions(), "threads": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.run:
            report["digits"] = row("digits", *digits_run(arguments.run, folder), 32, 3 * arguments.repeats, folder)
        report["deit_s"] = row("DeiT-S", *deit_s(folder), 8, arguments.repeats, folder)
    print(json.dumps(report["machine"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
