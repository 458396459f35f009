"""Exported graphs against the exporter's output of the same network as it comes, in one run, on this machine.

    python benchmarks/export.py [--batch 1 8] [--repeats 21] [--json FILE]

(a) DeiT-S: `vitx export`'s graph of deit_small_12 against `torch.onnx.export` of timm's deit_small_patch16_224.
    DeepViT-S: ours with the rewrites against ours without. Random weights, ONNX Runtime, one thread each. Ours takes
    uint8 images and normalises them inside; the other takes the same images normalised, which costs it nothing here.

The two of a pair take turns, and the order within a pair alternates; the ratio is the median of the pairs' ratios.
`cpu` is of processor seconds, which other work on the machine moves less than `wall`.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch

import vitx.models
from vitx.core.machine import describe_machine, installed_versions
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.models import image_tensor

PREPROCESSING = Preprocessing(image_size=224)
# What was promised: throughput of ours over the throughput of the other.
TARGETS = {"deit_small": 1.08, "deepvit_s": 1.06}
PAIRS = {"deit_small": ("deit_small_12", "deit_small_patch16_224"), "deepvit_s": ("deepvit_s", "deepvit_s")}


def network(name: str) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name).eval()


def export_as_it_comes(name: str, path: Path) -> None:
    """What a user gets from PyTorch's exporter alone: float32 (N, 3, 224, 224) → logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            network(name),
            (torch.zeros(2, 3, 224, 224),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N")},),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    program.save(str(path), external_data=False)


def session_of(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def timed(session: Any, images: Any) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    session.run(None, {"images": images})
    return time.perf_counter() - wall, time.thread_time() - cpu


def paired(ours: Any, theirs: Any, batch: int, repeats: int) -> dict[str, Any]:
    """Interleaved calls of both sessions on the same images."""
    images = np.random.default_rng(0).integers(0, 256, (batch, 224, 224, 3), dtype=np.uint8)
    normalised = image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std).contiguous().numpy()
    calls = {"ours": (ours, images), "theirs": (theirs, normalised)}
    for session, inputs in calls.values():
        timed(session, inputs)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in sorted(calls, reverse=bool(repeat % 2)):
            times[name].append(timed(*calls[name]))
    report: dict[str, Any] = {}
    for index, clock in enumerate(("wall", "cpu")):
        mine, other = ([pair[index] for pair in times[name]] for name in ("ours", "theirs"))
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        report[f"ours_{clock}_ms"] = 1000 * statistics.median(mine)
        report[f"theirs_{clock}_ms"] = 1000 * statistics.median(other)
        report[f"speed_ratio_{clock}"] = statistics.median(ratios)
        report[f"speed_ratio_{clock}_quartiles"] = [round(q, 4) for q in statistics.quantiles(ratios)]
    return report


def rewrites_against_as_it_comes(batches: list[int], repeats: int) -> dict[str, Any]:
    """(a) fp32 graphs of DeiT-S and DeepViT-S."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, (ours, theirs) in PAIRS.items():
            paths = Path(folder) / f"{title}.onnx", Path(folder) / f"{title}_as_it_comes.onnx"
            onnx_from_model(rewrite_for_export(network(ours), PREPROCESSING), PREPROCESSING, (), paths[0])
            export_as_it_comes(theirs, paths[1])
            sessions = [session_of(path) for path in paths]
            report[title] = {f"batch {batch}": paired(sessions[0], sessions[1], batch, repeats) for batch in batches}
            for batch, times in report[title].items():
                print(
                    f"(a) {title}, {batch}: {times['ours_wall_ms']:.1f} ms against {times['theirs_wall_ms']:.1f} ms, "
                    f"speed × {times['speed_ratio_wall']:.3f} (processor × {times['speed_ratio_cpu']:.3f}), "
                    f"target {TARGETS[title]}"
                )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": describe_machine(), "versions": installed_versions()}
    print(json.dumps(report["machine"]))
    report["a: rewritten against as it comes"] = rewrites_against_as_it_comes(arguments.batch, arguments.repeats)
    # Here follow, one function each: (b) int8 against fp32, (c) time and memory of an export, (d) TensorRT plans.
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    main()
