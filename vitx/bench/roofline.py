"""What this machine does now, the share of it that a model gets, and the name of what binds it.

Probes are ONNX graphs in ONNX Runtime, with the session's number of threads: a share then says how far the model is
from the best that the runtime's own kernels do here, and needs neither another BLAS nor its settings.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitx.bench.probe_graphs import ELEMENT_TYPES, copy_graph, empty_graph, product_graph, raw_elements
from vitx.bench.timing import Lane, Probe
from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Precision
from vitx.core.errors import EnvironmentMissing, VitxError
from vitx.core.files import sha256_bytes, write_bytes, write_json
from vitx.core.latency import GraphCost, Limit
from vitx.runtimes.session import image_shape

# The fastest of 192 to 1024 on a core of an AMD EPYC, and within 2 % between runs; a GPU needs more to fill it.
CPU_SIDE, GPU_SIDE = 512, 8192
GPU_COPY_BYTES = 2**30
CACHE_FILES = "/sys/devices/system/cpu/cpu0/cache/index*/size"


def probe_dtype(precision: Precision, device: str) -> str:
    """The dtype whose product is the limit: a CPU's is float32; a GPU has none below 16 bits that we probe."""
    if device == "cpu":
        return "fp32"
    return precision if precision in ("fp32", "bf16") else "fp16"


def product_probe(device: str, dtype: str, threads: int) -> Probe:
    """FLOP/s of one square matrix product."""
    side = CPU_SIDE if device == "cpu" else GPU_SIDE
    # Of random bits: a GPU that multiplies equal ones uses less power and keeps a higher clock.
    values = (np.random.default_rng(1).integers(-8, 9, (side, side)) / 8).astype(np.float32)
    call = _bound_call(product_graph(side, dtype), values, dtype, device, threads)
    return Probe("product", 2 * side**3, Lane(f"probe: {dtype} product", call))


def copy_probe(device: str, threads: int) -> Probe:
    """Bytes/s read and written by a copy that no cache holds."""
    if device != "cpu":
        values = np.ones(GPU_COPY_BYTES // 4, dtype=np.float32)
        call = _bound_call(copy_graph(), values, "fp32", device, threads)
        return Probe("copy", 2 * values.nbytes, Lane("probe: copy", call))
    source = np.ones(copy_bytes(), dtype=np.uint8)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    call = _threaded_copy(parts, threads)
    return Probe("copy", 2 * source.nbytes, Lane("probe: copy", call))


def copy_bytes() -> int:
    """Four times the largest cache of the first core, at least 64 MiB, at most 512 MiB."""
    sizes = [path.read_text().strip() for path in Path("/").glob(CACHE_FILES.lstrip("/"))]
    largest = max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in "KM"), default=0)
    return min(max(4 * largest, 64 << 20), 512 << 20)


def _threaded_copy(parts: Sequence[tuple[np.ndarray, np.ndarray]], threads: int) -> Callable[[], object]:
    """numpy lets the interpreter go while it copies, so each part has a thread of its own."""
    if threads == 1:
        return lambda: np.copyto(parts[0][1], parts[0][0])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))


def _bound_call(graph: bytes, values: np.ndarray, dtype: str, device: str, threads: int) -> Callable[[], object]:
    """One run of a graph whose input and output stay on the device."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    provider = ("CPUExecutionProvider", {}) if device == "cpu" else ("CUDAExecutionProvider", {"use_tf32": "0"})
    if device != "cpu" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    session = onnxruntime.InferenceSession(graph, options, providers=[provider])
    if session.get_providers()[0] != provider[0]:
        raise EnvironmentMissing(f"the probes need {provider[0]}, but ONNX Runtime would use another: leave them out")
    binding = session.io_binding()
    (source,), (target,) = session.get_inputs(), session.get_outputs()
    if dtype == "bf16":  # numpy has none
        bits = np.frombuffer(raw_elements(values, dtype), dtype=np.uint16).reshape(values.shape)
        tensor = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENT_TYPES[dtype])
    else:
        tensor = onnxruntime.OrtValue.ortvalue_from_numpy(values.astype("f2" if dtype == "fp16" else "f4"), device, 0)
    binding.bind_ortvalue_input(source.name, tensor)
    binding.bind_output(target.name, device)

    def call() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return call


def empty_call(bundle: Bundle, load: Callable[[Bundle], Any]) -> Lane | None:
    """A call of the same runtime with the same tensors and an empty graph between: what Python and the binding cost.

    None for a runtime that takes no such bundle (compiled engines).
    """
    with tempfile.TemporaryDirectory() as folder, suppress(VitxError):
        graph = empty_graph(bundle.manifest.input, bundle.manifest.output)
        entry = FileEntry(sha256=sha256_bytes(graph), size=len(graph))
        manifest = bundle.manifest.model_copy(update={"files": {"model.onnx": entry}})
        write_bytes(Path(folder) / "model.onnx", graph)
        write_json(Path(folder) / MANIFEST, manifest)
        session = load(Bundle.open(folder))
        image = np.zeros((1, *image_shape(bundle)), dtype=np.uint8)
        return Lane("probe: empty call", lambda: session.infer(image))
    return None


def fixed_seconds(times: dict[int, float]) -> float:
    """What a call costs however many images it holds: the line through the two smallest batch sizes, at zero images.

    times: seconds of a call by batch size, two sizes at least. Between 0 and the smallest batch's time.
    """
    (small, less), (large, more) = sorted(times.items())[:2]
    slope = (more - less) / (large - small)
    return min(max(less - slope * small, 0.0), less)


def name_limit(
    seconds: float,
    *,
    fixed: float,
    call: float = 0.0,
    decode: float = 0.0,
    cost: GraphCost,
    batch_size: int,
    flops_per_second: float,
    bytes_per_second: float,
) -> Limit:
    """Name what the greatest part of a call's `seconds` goes to.

    `decode` and `call` (an empty call: Python) are measured; `launch` is what else does not grow with the batch, less
    the time to read the weights; the rest is `compute` or `memory`, whichever the probes give the longer time for.
    """
    memory = (cost.weight_bytes + batch_size * cost.activation_bytes) / bytes_per_second
    compute = batch_size * cost.flops / flops_per_second
    launch = max(0.0, fixed - call - cost.weight_bytes / bytes_per_second)
    rest = max(0.0, seconds - decode - call - launch)
    parts: dict[Limit, float] = {
        "compute" if compute >= memory else "memory": rest,
        "launch": launch,
        "decode": decode,
        "python": call,
    }
    return max(parts, key=lambda name: parts[name])


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
