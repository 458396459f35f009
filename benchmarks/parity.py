"""What a parity costs beyond the two forward passes that it needs.

    python benchmarks/parity.py [--size 224] [--images 2000 --of 10000] [--jpeg] [--repeats 2] [--json FILE]

Compared, in turns, on DeiT-Ti with random weights and 1,000 classes, torch against ONNX Runtime:
  forward  both sides once over all images in batches of 32, pixels prepared beforehand and in memory
  parity   `vitx.parity.compare` with its defaults: decoding and resizing, both sides once over all images, the
           probe images at batch sizes 1, 2, 7, 32, shuffled and reversed, all statistics
The images are scikit-learn's 1,797 digits, repeated under other names: as PNG of 8×8, or with --jpeg as JPEG of 500×375
and some 110 kB, which cost as much to decode as ImageNet's do. The network's cost does not depend on what they show.

Cost is linear in images and in probe images. Of a split of --of images, --images are run, with as many of the 192 probe
images as are their share (but no fewer than the largest batch, 32): the ratio is that of the whole split, in less time.
Beside the seconds stand those of the processor. The ratio is that of the shortest parity to the shortest forward: other
work only ever adds to either.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch
from PIL import Image

from support.onnx_session import cpu_session
from support.targets import at_least, command_line, report_header, write_report
from vitx.core.bundle import timestamp
from vitx.core.preprocess import Preprocessing, UInt8Array, decode
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.parity.comparison import PROBE_IMAGES, REFERENCE_BATCH, Comparison, compare, infer
from vitx.runtimes.session import Float32Array, Session
from vitx.runtimes.torch import TorchSession

PHOTOGRAPH, NOISE = (500, 375), 22


class GraphSession(Session):
    """A graph in ONNX Runtime without a bundle around it."""

    def __init__(self, path: Path, threads: int) -> None:
        super().__init__()
        self.session = cpu_session(path, threads)

    def _infer(self, images: UInt8Array) -> Float32Array:
        logits: Float32Array = self.session.run(None, {"images": images})[0]
        return logits

    def describe(self) -> dict[str, Any]:
        return {"runtime": "onnxruntime", "version": onnxruntime.__version__, "provider": "CPUExecutionProvider"}


def repeated_digits(count: int, *, jpeg: bool = False) -> ImageSet:
    digits = open_images("digits", "train")
    rows = np.arange(count) % len(digits)
    encoded = [digits.read(index) for index in range(min(count, len(digits)))]
    if jpeg:
        encoded = [photograph(data) for data in encoded]
    return ImageSet(
        f"digits, repeated, {'JPEG of 500×375' if jpeg else 'PNG of 8×8'}",
        digits.class_names,
        tuple(f"{index:05d}" for index in range(count)),
        digits.labels[rows],
        lambda index: encoded[int(rows[index])],
    )


def photograph(data: bytes) -> bytes:
    """An image as a JPEG of 500×375 with as many bytes as a photograph has (some 100 kB), from noise added to it."""
    pixels = np.asarray(decode(data).resize(PHOTOGRAPH, Image.Resampling.BICUBIC), dtype=np.int16)
    noise = np.random.default_rng(pixels[::50].sum()).normal(0, NOISE, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the clock and of the processor, over all threads."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - clock, "processor_seconds": time.process_time() - processor}


def forward(sessions: tuple[Session, Session], pixels: list[UInt8Array]) -> None:
    for session in sessions:
        for block in pixels:
            infer(session, block, REFERENCE_BATCH)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    preprocessing = Preprocessing(image_size=options.size)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = timm.create_model("deit_tiny_patch16_224", img_size=options.size).eval()
    images = repeated_digits(options.images, jpeg=options.jpeg)
    pixels: list[UInt8Array] = []
    decoding = timed(lambda: pixels.extend(images.batches(preprocessing, 256)))
    probe_images = round(PROBE_IMAGES * options.images / options.of)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, tuple(map(str, range(1000))), path)
        sessions = (
            TorchSession(model, preprocessing, device="cpu", threads=options.threads),
            GraphSession(path, options.threads),
        )
    forward(sessions, pixels[:1])
    rows: list[dict[str, dict[str, float]]] = []
    found: list[Comparison] = []
    for _ in range(options.repeats):
        passes = timed(lambda: forward(sessions, pixels))
        parity = timed(
            lambda: found.append(compare(*sessions, images, preprocessing, probe_images=probe_images, quiet=True))
        )
        rows.append({"forward": passes, "parity": parity})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "model": "deit_tiny_patch16_224, random weights",
        "image_size": options.size,
        "data": images.name,
        "images": options.images,
        "of": options.of,
        "probe_images": found[-1].probe_images,
        "batch_sizes": found[-1].batch_sizes,
        "threads": options.threads,
        "decoding": decoding,
        "repeats": rows,
        "ratio": {
            name: min(row["parity"][name] for row in rows) / min(row["forward"][name] for row in rows)
            for name in ("seconds", "processor_seconds")
        },
        "max_logit_error": found[-1].max_logit_error,
        "flips": len(found[-1].flips),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--of", type=int, default=10_000, help="how many images the whole split has")
    parser.add_argument("--jpeg", action="store_true")
    parser.add_argument("--repeats", type=at_least(1), default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    row = measure(options)
    print(f"ratio {row['ratio']} for {PROBE_IMAGES} probe images of {options.of}")
    if options.json is not None:
        before = json.loads(options.json.read_text())["results"] if options.json.exists() else []
        document = {
            "benchmark": "parity",
            "command": "python benchmarks/parity.py --size SIZE --images N --of M --repeats R --threads T --json FILE",
            "created": timestamp(),
            **report_header(),
            "results": [*before, row],
        }
        write_report(document, options.json)


if __name__ == "__main__":
    main()
