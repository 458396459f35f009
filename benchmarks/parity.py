"""What a parity costs beyond the two forward passes that it needs.

    python benchmarks/parity.py [--size 64] [--images 10000] [--repeats 2] [--threads 2] [--json FILE]

Compared, in turns, on DeiT-Ti with random weights and 1,000 classes, torch against ONNX Runtime:
  forward  both sides once over all images in batches of 32, pixels prepared beforehand and in memory
  parity   `vitx.serve.parity.compare` with its defaults: decoding and resizing, both sides once over all images, the
           probe images at batch sizes 1, 2, 7, 32, shuffled and reversed, all statistics
The images are scikit-learn's 1,797 digits as PNG, repeated under other names, resized to SIZE. The network's cost does
not depend on what they show. Parity's fixed part, the probe images, weighs less the more images there are, so the
number of images is part of the result.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch

from vitx.core.bundle import timestamp
from vitx.core.images import ImageSet, open_images
from vitx.core.machine import describe_machine, installed_versions
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.serve.parity.comparison import PROBE_IMAGES, REFERENCE_BATCH, Comparison, compare, infer
from vitx.serve.runtimes import Float32Array, Session
from vitx.serve.runtimes.torch import TorchSession


class GraphSession:
    """A graph in ONNX Runtime without a bundle around it."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def infer(self, images: UInt8Array) -> Float32Array:
        logits: Float32Array = self.session.run(None, {"images": images})[0]
        return logits

    def describe(self) -> dict[str, Any]:
        return {"runtime": "onnxruntime", "version": onnxruntime.__version__, "provider": "CPUExecutionProvider"}


def repeated_digits(count: int) -> ImageSet:
    digits = open_images("digits", "train")
    rows = np.arange(count) % len(digits)
    return ImageSet(
        "digits, repeated",
        digits.class_names,
        tuple(f"{index:05d}.png" for index in range(count)),
        digits.labels[rows],
        lambda index: digits.read(int(rows[index])),
    )


def forward_seconds(sessions: tuple[Session, Session], pixels: list[UInt8Array]) -> float:
    started = time.perf_counter()
    for session in sessions:
        for block in pixels:
            infer(session, block, REFERENCE_BATCH)
    return time.perf_counter() - started


def parity_seconds(
    sessions: tuple[Session, Session], images: ImageSet, preprocessing: Preprocessing
) -> tuple[float, Comparison]:
    started = time.perf_counter()
    found = compare(*sessions, images, preprocessing, quiet=True)
    return time.perf_counter() - started, found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    preprocessing = Preprocessing(image_size=options.size)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = timm.create_model("deit_tiny_patch16_224", img_size=options.size).eval()
    images = repeated_digits(options.images)
    pixels = list(images.batches(preprocessing, 256))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, tuple(map(str, range(1000))), path)
        sessions = (
            TorchSession(model, preprocessing, device="cpu", threads=options.threads),
            GraphSession(path, options.threads),
        )
    forward_seconds(sessions, pixels[:1])
    rows = []
    for _ in range(options.repeats):
        forward = forward_seconds(sessions, pixels)
        parity, found = parity_seconds(sessions, images, preprocessing)
        rows.append({"forward_s": forward, "parity_s": parity, "ratio": parity / forward})
        print(f"forward {forward:.1f} s, parity {parity:.1f} s, ratio {parity / forward:.3f}", flush=True)
    return {
        "model": "deit_tiny_patch16_224, random weights",
        "image_size": options.size,
        "images": options.images,
        "probe_images": found.probe_images,
        "batch_sizes": found.batch_sizes,
        "threads": options.threads,
        "repeats": rows,
        "ratio_median": statistics.median(row["ratio"] for row in rows),
        "max_logit_error": found.max_logit_error,
        "flips": len(found.flips),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="results are appended to this file")
    options = parser.parse_args()
    row = measure(options)
    print(f"ratio {row['ratio_median']:.3f} with {PROBE_IMAGES} probe images of {options.images}")
    if options.json is not None:
        before = json.loads(options.json.read_text())["results"] if options.json.exists() else []
        document = {
            "benchmark": "parity",
            "command": "python benchmarks/parity.py --size SIZE --images N --repeats R --threads T --json FILE",
            "created": timestamp(),
            "machine": describe_machine(),
            "versions": installed_versions(),
            "results": [*before, row],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
