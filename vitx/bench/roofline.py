"""Probes of what the machine can do now, in FLOP/s and bytes/s, and the rule that names what limits a model.

Probes are ONNX graphs in ONNX Runtime, with the session's number of threads: a model's share of a probe then says how
far it is from the best that the runtime's own kernels do here. Another BLAS would come with settings of its own.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from vitx.bench.probe_graphs import ELEMENT_TYPES, copy_graph, empty_graph, product_graph, raw_elements
from vitx.bench.timing import Lane, Probe
from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Precision
from vitx.core.errors import EnvironmentMissing, VitxError
from vitx.core.files import sha256_bytes, write_bytes, write_json
from vitx.core.latency import GraphCost, Limit
from vitx.runtimes.session import Session, image_shape

# Rows and columns of the product. 512 was the fastest of 192 to 1024 on a core of an AMD EPYC, and repeats within 2 %;
# a GPU needs a larger product to be filled.
CPU_SIDE, GPU_SIDE = 512, 8192
GPU_COPY_BYTES = 2**30
CACHE_FILES = "/sys/devices/system/cpu/cpu0/cache/index*/size"


def probe_dtype(precision: Precision, device: str) -> str:
    """The dtype of the product to compare with: float32 on a CPU; on a GPU the bundle's, but fp16 for 8-bit bundles."""
    if device == "cpu":
        return "fp32"
    return precision if precision in ("fp32", "bf16") else "fp16"


def product_probe(device: str, dtype: str, threads: int) -> Probe:
    """A probe of FLOP/s: one square matrix product."""
    side = CPU_SIDE if device == "cpu" else GPU_SIDE
    # Random values: a GPU that multiplies equal ones draws less power and keeps a higher clock.
    values = (np.random.default_rng(1).integers(-8, 9, (side, side)) / 8).astype(np.float32)
    call = _call_on_device(product_graph(side, dtype), values, dtype, device, threads)
    return Probe(2 * side**3, Lane(f"probe: {dtype} product", call))


def copy_probe(device: str, threads: int) -> Probe:
    """A probe of bytes/s, read and written: a copy too large for any cache."""
    if device != "cpu":
        values = np.ones(GPU_COPY_BYTES // 4, dtype=np.float32)
        call = _call_on_device(copy_graph(), values, "fp32", device, threads)
        return Probe(2 * values.nbytes, Lane("probe: copy", call))
    source = np.ones(copy_bytes(), dtype=np.uint8)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    call = _threaded_copy(parts, threads)
    return Probe(2 * source.nbytes, Lane("probe: copy", call))


def copy_bytes() -> int:
    """Four times the largest cache of the first core, at least 64 MiB, at most 512 MiB."""
    sizes = [path.read_text().strip() for path in Path("/").glob(CACHE_FILES.lstrip("/"))]
    units = {"K": 10, "M": 20}
    largest = max((int(size[:-1]) << units[size[-1]] for size in sizes if size[-1:] in units), default=0)
    return min(max(4 * largest, 64 << 20), 512 << 20)


def _threaded_copy(parts: Sequence[tuple[np.ndarray, np.ndarray]], threads: int) -> Callable[[], object]:
    """Copy each part on a thread of its own: numpy releases the interpreter's lock while it copies."""
    if threads == 1:
        return lambda: np.copyto(parts[0][1], parts[0][0])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))


def _call_on_device(graph: bytes, values: np.ndarray, dtype: str, device: str, threads: int) -> Callable[[], object]:
    """A function that runs a graph once, with its input and output bound to the device's memory."""
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
    if dtype == "bf16":  # numpy has no such dtype
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


def empty_call(bundle: Bundle, load: Callable[[Bundle], Session], opened: ExitStack) -> Lane | None:
    """A call of the same runtime with the same tensors and an empty graph between: what Python and the binding cost.

    The session of the empty graph is closed with `opened`. None for a runtime that takes no such bundle (compiled
    engines).
    """
    with tempfile.TemporaryDirectory() as folder, suppress(VitxError):
        graph = empty_graph(bundle.manifest.input, bundle.manifest.output)
        entry = FileEntry(sha256=sha256_bytes(graph), size=len(graph))
        manifest = bundle.manifest.model_copy(update={"files": {"model.onnx": entry}})
        write_bytes(Path(folder) / "model.onnx", graph)
        write_json(Path(folder) / MANIFEST, manifest)
        session = opened.enter_context(load(Bundle.open(folder)))
        image = np.zeros((1, *image_shape(bundle)), dtype=np.uint8)
        return Lane("probe: empty call", lambda: session.infer(image))
    return None


def fixed_seconds(times: dict[int, float]) -> float:
    """Seconds that a call takes whatever its batch size: the line through the two smallest sizes, at zero images.

    times: seconds of a call by batch size, two sizes at least. The result lies between 0 and the smallest batch's time.
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
    """Name the largest part of a call's `seconds`.

    `decode` and `call` (of an empty graph: Python's part) are measured. `launch` is the rest of `fixed`, less the time
    to read the weights. What is left is `compute` or `memory`: the one for which the probes predict the longer time.
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
