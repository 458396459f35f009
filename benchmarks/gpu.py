"""Fill a dated results file on a machine with an NVIDIA GPU, row by row; a row that is there is not measured again.

    python benchmarks/gpu.py [--out FILE] [--models …] [--precisions …] [--batches …] [--runtimes …] [--seconds 1]

A row is one network, precision, batch size and runtime: torch eager, torch.compile, both of them in a CUDA graph, ONNX
Runtime's CUDA provider, TensorRT where its Python package is. It holds

- `device_ms`: median time of a call by CUDA events, images and logits staying on the GPU, and its percentiles;
- `host_ms`: by the host's clock, from a uint8 array in pageable memory to a float32 array: both transfers included;
- `compute_share`: FLOP/s over those of a matrix product of the precision, measured before and after the row's turn;
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
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

try:
    import timm
    import torch
    from safetensors.torch import load_file
    from torch import Tensor, nn

    import vitx.models
    from vitx.bench.energy import gpu_energy
    from vitx.core.errors import VitxError
    from vitx.core.files import write_json
    from vitx.core.machine import describe_machine, installed_versions
    from vitx.core.preprocess import Preprocessing
    from vitx.core.tolerance import SHARE_OF_STD
    from vitx.data.open import open_images
    from vitx.export.rewrite.rewrites import ImageClassifier, rewrite_for_export
    from vitx.models.flops import count_flops
except ModuleNotFoundError as error:
    print(f"error: the package '{error.name}' is not installed: pip install 'vitx[export,train]'", file=sys.stderr)
    raise SystemExit(3) from None

MODELS = ("deit_base_12", "deepvit_16b", "plainvit_16b")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BATCHES = (64,)
RUNTIMES = ("torch", "torch-compile", "cuda-graph", "compile-cuda-graph", "onnxruntime", "tensorrt")
TURNS = 5
# Of the standard deviation of the reference's logits; below float32 the certificate's own tolerances.
ALLOWED = {"fp32": 1e-3, "fp16": SHARE_OF_STD["fp16"], "bf16": SHARE_OF_STD["bf16"]}
PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}

# uint8 (N, S, S, 3) on the device → float32 (N, C) on the device, enqueued on the current stream.
Run = Callable[[Tensor], Tensor]


class Unavailable(Exception):
    """Why a runtime cannot make a row."""


@dataclass(frozen=True)
class Network:
    """A network in one precision, uint8 in and float32 out, on the device; its graph is written when asked for."""

    classifier: nn.Module
    graph: Callable[[], Path]
    size: int


class Float32Logits(nn.Module):
    """uint8 (N, S, S, 3) → float32 logits, whatever `classifier` computes in."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images)
        return logits.float()


def build(name: str, weights: Path | None, *, small: bool) -> tuple[Any, Preprocessing]:
    """The network in float32 on the processor, and its preprocessing; small: its last two blocks, 64 px images."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 64} if small else {}
    model: Any = timm.create_model(name, **sizes).eval()
    if small:
        model.blocks = model.blocks[-2:]
    if weights is not None:
        model.load_state_dict(load_file(weights / f"{name}.safetensors"))
    return model, Preprocessing(image_size=64 if small else model.pretrained_cfg["input_size"][1])


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


def cuda_graph_run(module: Run, example: Tensor) -> Run:
    """Capture one call; a replay copies the images into the graph's own buffer first, which is in the time."""
    if example.device.type != "cuda":
        raise Unavailable("CUDA graphs need a GPU")
    buffer = example.clone()
    make_stream: Any = torch.cuda.Stream
    side = make_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what capture forbids happens here: compilation, handles, workspaces
        for _ in range(3):
            module(buffer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = module(buffer)

    def run(images: Tensor) -> Tensor:
        buffer.copy_(images)
        graph.replay()
        return logits

    return run


def onnxruntime_run(graph: Callable[[], Path], example: Tensor) -> Run:
    """ONNX Runtime on torch's stream and torch's memory; a node that would fall back to the processor is an error."""
    import onnxruntime

    cuda = example.device.type == "cuda"
    provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise Unavailable(f"this onnxruntime {onnxruntime.__version__} has no {provider}: install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    settings: dict[str, str] = {}
    if cuda:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {"use_tf32": "0", "user_compute_stream": str(torch.cuda.current_stream().cuda_stream)}
    session = onnxruntime.InferenceSession(str(graph()), options, providers=[(provider, settings)])
    if session.get_providers()[0] != provider:
        raise Unavailable(f"ONNX Runtime took {session.get_providers()[0]} instead of {provider}")
    classes = session.get_outputs()[0].shape[1]
    logits = torch.empty(len(example), classes, device=example.device)
    device = example.device.type

    def run(images: Tensor) -> Tensor:
        binding = session.io_binding()
        binding.bind_input("images", device, 0, np.uint8, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", device, 0, np.float32, tuple(logits.shape), logits.data_ptr())
        session.run_with_iobinding(binding)
        return logits

    return run


def tensorrt_run(graph: Callable[[], Path], example: Tensor) -> Run:
    """A plan for exactly this batch, built here; not kept."""
    if example.device.type != "cuda":
        raise Unavailable("TensorRT needs a GPU")
    try:
        import tensorrt
    except ModuleNotFoundError:
        raise Unavailable("the package 'tensorrt' is not installed") from None
    from vitx.core.tensorrt_plan import Profile
    from vitx.export import engine_from_onnx

    size, path = len(example), graph()
    plan = path.with_suffix(".plan")
    engine_from_onnx(
        *(path, plan), flavor="tensorrt", profiles=[Profile(minimum=size, optimum=size, maximum=size)], quiet=True
    )
    engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR)).deserialize_cuda_engine(plan.read_bytes())
    context = engine.create_execution_context()
    context.set_input_shape("images", tuple(example.shape))
    shape: Any = context.get_tensor_shape("logits")
    logits = torch.empty(tuple(shape), device=example.device)

    def run(images: Tensor) -> Tensor:
        context.set_tensor_address("images", images.data_ptr())
        context.set_tensor_address("logits", logits.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise Unavailable("TensorRT could not run the plan")
        return logits

    return run


def device_times(run: Callable[[], object], seconds: float, device: str) -> list[float]:
    """Seconds of each call in about `seconds`: by events between the calls on a GPU, by the clock on a processor."""
    if device == "cpu":
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return times
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    calls = max(3, min(2000, round(seconds / (time.perf_counter() - start))))
    make_event: Any = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1000 for first, second in pairwise(events)]


def host_times(run: Run, images: np.ndarray, seconds: float, device: str) -> list[float]:
    """Seconds from the host's array to the host's logits."""
    return device_times_on_host(lambda: run(torch.from_numpy(images).to(device)).cpu().numpy(), seconds)


def device_times_on_host(call: Callable[[], object], seconds: float) -> list[float]:
    call()
    return device_times(call, seconds, "cpu")


def product_rate(precision: str, device: str, seconds: float) -> float:
    """FLOP/s of a square product of random values in this precision now."""
    side = PRODUCT_SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=PRECISIONS[precision]) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / statistics.median(device_times(lambda: torch.mm(left, right, out=out), seconds, device))


def parity(run: Run, images: Tensor, batch: int, reference: Tensor, precision: str) -> dict[str, Any]:
    """All images at this batch size against the reference; the last batch is filled from the start again."""
    rows: Any = torch.arange(-(-len(images) // batch) * batch) % len(images)
    found = torch.cat([run(images[part]).cpu().clone() for part in rows.split(batch)])[: len(images)].double()
    error = (found - reference).abs()
    share = float(error.max() / reference.std())
    return {
        "images": len(images),
        "flips": int((found.argmax(1) != reference.argmax(1)).sum()),
        "max_logit_error": float(error.max()),
        "mean_logit_error": float(error.mean()),
        "max_error_over_std": share,
        "allowed_over_std": ALLOWED[precision],
        "verdict": "pass" if share <= ALLOWED[precision] else "fail",  # NaN fails
    }


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
    joules = dict.fromkeys(runs, 0.0)
    rates, meter = [product_rate(precision, device, seconds / TURNS / 2)], gpu_energy() if device == "cuda" else None
    for _ in range(TURNS):
        for name, run in runs.items():
            before = meter() if meter else 0.0
            times[name] += device_times(lambda run=run: run(on_device), seconds / TURNS, device)  # type: ignore[misc]
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
                "joules_per_image": joules[name] / len(ordered) / len(images) if meter else None,
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


def reference_logits(model: nn.Module, preprocessing: Preprocessing, images: Tensor, device: str) -> Tensor:
    """float64 (N, C) on the processor, of the network in float32 in eager mode, 32 at a time."""
    classifier = ImageClassifier(model, preprocessing).eval().to(device)
    logits = torch.cat([classifier(part).cpu() for part in torch.split(images, 32)]).double()
    model.cpu()
    return logits


def parity_images(data: str, count: int, preprocessing: Preprocessing) -> np.ndarray:
    """The first `count` images of the evaluation split, uint8 (N, S, S, 3)."""
    found = open_images(data, "val")
    return np.stack([preprocessing.from_bytes(found.read(index)) for index in range(min(count, len(found)))])


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
    def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            found = text.split(",")
            if unknown := set(found) - set(known):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
            return found

        return split

    day = datetime.now(UTC).date()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{day}-gpu.json")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--precisions", type=names(tuple(PRECISIONS)), default=["fp16"])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES))
    parser.add_argument("--runtimes", type=names(RUNTIMES), default=list(RUNTIMES))
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
    assert vitx.models.registry, "registers our networks with timm"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    results = Results(arguments.out, arguments.device if torch.cuda.is_available() else "cpu")
    if arguments.dry_run:
        print(*(" ".join(map(str, key.values())) for key in keys(arguments) if not results.has(key)), sep="\n")
        return 0
    return 0 if fill(arguments, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
