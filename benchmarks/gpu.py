"""Fill a dated results file on a machine with an NVIDIA GPU, row by row; a row that is there is not measured again.

    python benchmarks/gpu.py [--out FILE] [--models …] [--precisions …] [--batches …] [--runtimes …] [--seconds 1]

A row is one network, precision, batch size and runtime: torch eager, torch.compile, both of them in a CUDA graph, ONNX
Runtime's CUDA provider, TensorRT where its Python package is. It holds

- `device_ms`: median time of a call by CUDA events, images and logits staying on the GPU, and its percentiles;
- `host_ms`: by the host's clock, from a uint8 array in pageable memory to a float32 array: both transfers included;
- `compute_share`: FLOP/s over those of a matrix product of the precision, measured between the rounds of turns;
- `joules_per_image` from NVML, and the clock and temperature it was measured at;
- `parity`: logits of --parity images at this batch size against the network in float32 in eager mode, no TF32.

By default 18 rows. A runtime that cannot be had, or refuses the graph, leaves a row with the reason, which a later run
tries again. Weights are random (seed 0) unless --weights names a folder of NAME.safetensors; runtimes take turns. Exit
code 3 without a GPU or pydantic. `--dry-run` lists the rows; `--device cpu --small` tries the script anywhere.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import torch
    from torch import Tensor, nn

    from support.gpu_networks import (
        Float32Logits,
        Run,
        Unavailable,
        build,
        cuda_graph_run,
        parity,
        parity_images,
        reference_logits,
    )
    from support.gpu_runtimes import onnxruntime_run, tensorrt_run
    from support.gpu_timing import PRECISIONS, device_times, product_rate
    from support.targets import some_of
    from support.turns import turn_order
    from vitx.bench.energy import gpu_energy
    from vitx.core.errors import VitxError
    from vitx.core.files import write_json
    from vitx.core.machine import describe_machine, installed_versions
    from vitx.core.preprocess import Preprocessing
    from vitx.export.rewrite.rewrites import ImageClassifier, rewrite_for_export
    from vitx.models.flops import count_flops
except ModuleNotFoundError as error:
    print(f"error: the package '{error.name}' is not installed: pip install 'vitx[export,train]'", file=sys.stderr)
    raise SystemExit(3) from None

MODELS = ("deit_base_12", "deepvit_16b", "plainvit_16b")
BATCHES = (64,)
RUNTIMES = ("torch", "torch-compile", "cuda-graph", "compile-cuda-graph", "onnxruntime", "tensorrt")
TURNS = 5


@dataclass(frozen=True)
class Network:
    """A network in one precision, uint8 in and float32 out, on the device; its graph is written when asked for."""

    classifier: nn.Module
    graph: Callable[[], Path]
    size: int


def lowered(model: nn.Module, preprocessing: Preprocessing, precision: str, device: str, folder: Path) -> Network:
    """The network as trained for torch, and rewritten for the graph, both in `precision`."""
    dtype = PRECISIONS[precision]
    plain = Float32Logits(ImageClassifier(copy.deepcopy(model), preprocessing)).eval().to(device, dtype)

    def graph() -> Path:
        from vitx.export import onnx_from_model

        path = folder / f"{precision}.onnx"
        if not path.is_file():
            rewritten = Float32Logits(rewrite_for_export(model, preprocessing).to(dtype)).eval()
            labels = tuple(map(str, range(1000)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                onnx_from_model(rewritten, preprocessing, labels, path, check=False)
        return path

    return Network(plain, graph, preprocessing.image_size)


def load(runtime: str, network: Network, example: Tensor) -> Run:
    """Make a runtime ready for batches like `example`; raise Unavailable with the reason."""
    if runtime == "onnxruntime":
        return onnxruntime_run(network.graph, example)
    if runtime == "tensorrt":
        return tensorrt_run(network.graph, example)
    module: Run = network.classifier
    if "compile" in runtime:
        torch.compiler.reset()
        module = torch.compile(network.classifier, dynamic=False)
    if not runtime.endswith("cuda-graph"):
        return module
    return cuda_graph_run(module, example)


def host_times(run: Run, images: np.ndarray, seconds: float, device: str) -> list[float]:
    """Seconds from the host's array to the host's logits, after one call that is not counted."""

    def call() -> object:
        return run(torch.from_numpy(images).to(device)).cpu().numpy()

    call()
    return device_times(call, seconds, "cpu")


def gpu_state() -> dict[str, Any]:
    """Clock (MHz), temperature (°C) and power (W) now, from the driver's own tool; empty where it is not there."""
    query = "clocks.sm,temperature.gpu,power.draw"
    try:
        finished = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(query.split(","), finished.stdout.strip().split(", "), strict=False))


class Results:
    """The file: what was measured where, and its rows, written after every batch size."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path.is_file() else {"rows": []}
        gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
        self.content = {
            "machine": {**describe_machine(), "gpu": gpu},
            "versions": {**installed_versions(), "cuda": torch.version.cuda},
            "rows": known["rows"],
        }
        if known.get("machine", self.content["machine"]) != self.content["machine"]:
            raise SystemExit(f"error: {path} was measured on another machine: choose another --out")

    def has(self, key: dict[str, Any]) -> bool:
        return any("refused" not in row and key.items() <= row.items() for row in self.content["rows"])

    def add(self, rows: list[dict[str, Any]]) -> None:
        keys = [row["key"] for row in rows]
        kept = [row for row in self.content["rows"] if not any(key.items() <= row.items() for key in keys)]
        new = [{**row.pop("key"), **row} for row in rows]
        self.content["rows"] = [*kept, *new]
        write_json(self.path, self.content)


def measure(
    runs: dict[str, Run], images: np.ndarray, precision: str, device: str, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time the runtimes in turns at one batch size; yields (runtime, its numbers)."""
    on_device = torch.from_numpy(images).to(device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    joules, made = dict.fromkeys(runs, 0.0), Counter[str]()

    def call(name: str) -> Tensor:
        made[name] += 1  # those that are not timed use energy too
        return runs[name](on_device)

    rates, meter = [product_rate(precision, device, seconds / TURNS / 2)], gpu_energy() if device == "cuda" else None
    for turn in range(TURNS):
        for name in turn_order(runs, turn):
            before = meter() if meter else 0.0
            times[name] += device_times(partial(call, name), seconds / TURNS, device)
            joules[name] += meter() - before if meter else 0.0
        rates.append(product_rate(precision, device, seconds / TURNS / 2))
    for name, run in runs.items():
        ordered, host = np.array(times[name]), host_times(run, images, seconds / 2, device)
        yield (
            name,
            {
                "device_ms": 1e3 * float(np.median(ordered)),
                **{f"device_p{share}_ms": 1e3 * float(np.quantile(ordered, share / 100)) for share in (90, 99)},
                "host_ms": 1e3 * statistics.median(host),
                "images_per_second": len(images) / float(np.median(ordered)),
                "calls": len(ordered),
                "product_flops_per_second": statistics.median(rates),
                "joules_per_image": joules[name] / made[name] / len(images) if meter else None,
                "gpu_state": gpu_state() if device == "cuda" else {},
            },
        )


@torch.no_grad()
def fill(arguments: argparse.Namespace, results: Results) -> bool:
    """Measure what is missing; return whether every measured row agrees with its reference."""
    device, agreed = arguments.device, True
    for name in arguments.models:
        model, preprocessing = build(name, arguments.weights, small=arguments.small)
        wanted = [key for key in keys(arguments) if key["model"] == name and not results.has(key)]
        if not wanted:
            continue
        pixels = parity_images(arguments.data, arguments.parity, preprocessing)
        images = torch.from_numpy(pixels).to(device)
        flops_per_image = count_flops(ImageClassifier(model, preprocessing), torch.from_numpy(pixels[:1]))
        for precision in arguments.precisions:
            with tempfile.TemporaryDirectory() as folder:
                network = lowered(model, preprocessing, precision, device, Path(folder))
                reference = reference_logits(model, preprocessing, images, device)
                for batch in arguments.batches:
                    missing = [key for key in wanted if key["precision"] == precision and key["batch_size"] == batch]
                    rows = rows_of(missing, network, pixels, images, reference, arguments)
                    for row in rows:
                        row["weights"] = str(arguments.weights or "random, seed 0")
                        if "images_per_second" in row:
                            flops = row["images_per_second"] * flops_per_image
                            row["compute_share"] = flops / row["product_flops_per_second"]
                            agreed &= row["parity"]["verdict"] == "pass"
                        print(describe(row), flush=True)
                    results.add(rows)
    return agreed


def rows_of(
    missing: list[dict[str, Any]],
    network: Network,
    pixels: np.ndarray,
    images: Tensor,
    reference: Tensor,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The rows of one network, precision and batch size."""
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {key["runtime"]: {"key": key} for key in missing}
    for runtime, row in rows.items():
        precision, batch = row["key"]["precision"], row["key"]["batch_size"]
        example = images[torch.arange(batch) % len(images)]
        try:
            run = load(runtime, network, example)
            row["parity"] = parity(run, images, batch, reference, precision)
            runs[runtime] = run
        except (Unavailable, VitxError, RuntimeError, ImportError, NotImplementedError) as reason:
            row["refused"] = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        except Exception as reason:
            if type(reason).__module__.split(".")[0] not in ("onnx", "onnxruntime"):
                raise
            row["refused"] = str(reason).splitlines()[0]
    if runs:
        batch_pixels = pixels[np.arange(batch) % len(pixels)]
        for runtime, numbers in measure(runs, batch_pixels, precision, arguments.device, arguments.seconds):
            rows[runtime] |= numbers
    return list(rows.values())


def keys(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What names each row that was asked for."""
    chosen = product(arguments.models, arguments.precisions, arguments.batches, arguments.runtimes)
    names = ("model", "precision", "batch_size", "runtime")
    return [dict(zip(names, values, strict=True)) for values in chosen]


def describe(row: dict[str, Any]) -> str:
    title = " ".join(str(value) for value in row["key"].values())
    if "refused" in row:
        return f"{title}: refused: {row['refused']}"
    return (
        f"{title}: {row['device_ms']:.3f} ms, with transfers {row['host_ms']:.3f} ms, "
        f"{row['images_per_second']:.0f} images/s, {100 * row['compute_share']:.0f} % of the product, "
        f"{row['parity']['flips']} flips, error {row['parity']['max_error_over_std']:.2g} std: "
        f"{row['parity']['verdict']}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    day = datetime.now(UTC).date()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{day}-gpu.json")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--precisions", type=some_of(PRECISIONS), default=["fp16"])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES))
    parser.add_argument("--runtimes", type=some_of(RUNTIMES), default=list(RUNTIMES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row, by the device's clock")
    parser.add_argument("--data", default="digits", help="images of the parity check")
    parser.add_argument("--parity", type=int, default=256, help="how many of them")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="two blocks, 64 px: to try the script")
    parser.add_argument("--dry-run", action="store_true", help="list the rows that are missing")
    return parser.parse_args(arguments)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.device == "cuda" and not torch.cuda.is_available() and not arguments.dry_run:
        print("error: torch sees no GPU: run this on a machine with one, or --device cpu --small", file=sys.stderr)
        return 3
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    results = Results(arguments.out, arguments.device if torch.cuda.is_available() else "cpu")
    if arguments.dry_run:
        print(*(" ".join(map(str, key.values())) for key in keys(arguments) if not results.has(key)), sep="\n")
        return 0
    return 0 if fill(arguments, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
