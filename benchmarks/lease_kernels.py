"""The steps of `lease.py kernels`: is flash Re-Attention right, how fast is it, and what binds it."""

import csv
import io
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lease_step import Report, mend_interpreter, of_peak, run_step
from vitx.core.machine import installed_versions
from vitx.models.flash_reattention import (
    CANDIDATES,
    INTERPRETED,
    Mixes,
    Tiles,
    plain_reattention,
    reattention,
    using,
)

Shape = tuple[int, int, int, int]  # B, H, N, K
Call = Callable[[int], Any]  # takes the number of the input set

SHAPES: dict[str, Shape] = {
    "16b": (64, 12, 197, 32),
    "S": (64, 12, 197, 33),
    "L": (64, 12, 197, 35),
    "384px": (16, 12, 577, 32),
}
CHECKED: tuple[Shape, ...] = (*SHAPES.values(), (8, 16, 197, 64))
TOYS: dict[str, Shape] = {"16b": (1, 12, 33, 32), "S": (1, 12, 33, 33), "L": (1, 12, 17, 35), "384px": (1, 12, 49, 32)}
CHECKED_TOYS: tuple[Shape, ...] = (*TOYS.values(), (1, 16, 17, 64))
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # bfloat16 has three bits less
SETS, CALLS, REPLAYS = 4, 12, 30
MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}


def shapes(report: Report) -> dict[str, Shape]:
    return TOYS if report.rehearsed else SHAPES


def operands(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Mixes]:
    """(3, B, H, N, K) as a Linear makes it, and the mixes in float32."""
    B, H, N, K = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, N, 3, H, K, generator=generator).to(device, dtype).permute(2, 0, 3, 1, 4)
    weight, bias = torch.randn(H, H, generator=generator), torch.randn(H, generator=generator) / N
    return qkv, Mixes(weight.to(device), bias.to(device))


def poison(device: str) -> None:
    """Fill what the allocator will hand out next with NaN: an element that nobody writes then shows."""
    if device == "cpu":
        torch.use_deterministic_algorithms(True)  # torch.empty is then NaN by itself
        return
    blocks = [torch.full((2**power,), torch.nan, device=device) for power in range(6, 20) for _ in range(8)]
    blocks += [torch.full((2**28,), torch.nan, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    del blocks


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖; NaN where anything is not finite, which passes nothing."""
    return float((found.double() - expected).norm() / expected.norm())


# --- how long a call takes


def milliseconds(call: Call, device: str, calls: int = CALLS, replays: int = REPLAYS) -> dict[str, float]:
    """Time of one call: a CUDA graph of `calls` calls over the input sets, its replays by events; on a CPU by clock."""
    times = cpu_times(call) if device == "cpu" else graph_times(call, calls, replays)
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"ms": median, "quartile_1": low, "quartile_3": high}


def graph_times(call: Call, calls: int, replays: int) -> list[float]:
    make_stream: Any = torch.cuda.Stream
    side = make_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compilation, handles and workspaces, which capture forbids
        for number in range(3):
            call(number % SETS)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number % SETS)
    make_event: Any = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) / calls for first, second in zip(events, events[1:], strict=False)]
    graph.reset()
    return times


def cpu_times(call: Call) -> list[float]:
    call(0)
    times = []
    for number in range(2):
        started = time.perf_counter()
        call(number)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def timed(call: Call, device: str, **options: int) -> dict[str, Any]:
    """`milliseconds`, or the first line of why not: libraries refuse a shape by many classes of errors."""
    try:
        return dict(milliseconds(call, device, **options))
    except Exception as error:  # noqa: BLE001
        return {"refused": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"}


# --- the steps


def machine(report: Report) -> None:
    query = "name,driver_version,vbios_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query},memory.free,memory.total", "--format=csv,noheader"]
    found: dict[str, Any] = {"versions": installed_versions(), "python": platform.python_version()}
    found |= {"cuda": torch.version.cuda, "commands": [command]}
    if report.rehearsed:
        report.row("machine", found, f"needs a GPU: {' '.join(command)[:100]}")
        return
    found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    properties: Any = torch.cuda.get_device_properties(0)
    found["properties"] = {
        name: getattr(properties, name, None)
        for name in ("name", "multi_processor_count", "L2_cache_size", "total_memory", "major", "minor")
    }
    found["cudnn"] = torch.backends.cudnn.version()
    report.row("machine", found, found["nvidia_smi"])
    report.row("tools", {name: tool(name) for name in ("ncu", "compute-sanitizer", "nvcc")})


def ceilings(report: Report) -> None:
    """What this card does at best: products, a copy of 2 GiB, a copy that stays in L2."""
    device, side = report.device, 256 if report.rehearsed else 8192
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        pairs = [[torch.randn(side, side, device=device).to(dtype) for _ in range(2)] for _ in range(SETS)]
        out = torch.empty(side, side, device=device, dtype=dtype)
        row = milliseconds(lambda i, pairs=pairs, out=out: torch.mm(*pairs[i], out=out), device)  # type: ignore[misc]
        rate = 2 * side**3 / row["ms"] * 1e3
        report.row(name, row | of_peak(rate, None), f"{name} product {side}³: {rate / 1e12:.1f} TFLOP/s")
    for name, mib, copies in (("copy", 4 if report.rehearsed else 2048, 1), ("l2_copy", 4, 3)):
        sources = [torch.randn(mib * 2**18, device=device) for _ in range(copies)]
        targets = [torch.empty_like(source) for source in sources]
        row = milliseconds(
            lambda i, sources=sources, targets=targets: targets[i % len(targets)].copy_(sources[i % len(sources)]),  # type: ignore[misc]
            device,
        )
        rate = 2 * mib * 2**20 / row["ms"] * 1e3
        report.row(name, {**row, "bytes_per_second": rate}, f"{name} {copies} × {mib} MiB: {rate / 1e12:.2f} TB/s")


def compile_kernels(report: Report) -> None:
    """Compile every kernel that later steps run, in parallel: they then find it in Triton's cache."""
    device = report.device
    jobs: list[tuple[Shape, Tiles | None, str]] = [
        ((2, *shape[1:]), tiles, dtype)
        for shape in (*CHECKED, SHAPES["16b"])
        for tiles in (None, *CANDIDATES)
        for dtype in ("float16", "bfloat16")
        if tiles is None or dtype == "float16"
    ]
    jobs = [((1, 12, 17, 32), CANDIDATES[0], "float16")] if report.rehearsed else sorted(set(jobs), key=str)
    workers = min(14, len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=mend_interpreter) as pool:
        problems = list(pool.map(partial(compile_one, device), jobs))
    refused = {str(job): problem for job, problem in zip(jobs, problems, strict=True) if problem}
    report.row("jobs", {"count": len(jobs), "refused": refused}, f"{len(jobs)} settings, {len(refused)} refused")


def compile_one(device: str, job: tuple[Shape, Tiles | None, str]) -> str:
    """Forward and backward once; returns why not."""
    shape, tiles, dtype = job
    try:
        both_ways(shape, getattr(torch, dtype), device, tiles)
    except Exception as error:  # noqa: BLE001  # Triton's refusals share no base class; a row says which
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return ""


def both_ways(shape: Shape, dtype: torch.dtype, device: str, tiles: Tiles | None = None) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v of one run by the kernels."""
    qkv, mixes = operands(shape, dtype, device)
    inputs = [part.detach().requires_grad_() for part in qkv]
    with using(tiles or CANDIDATES[0]) if tiles else torch.enable_grad():
        q, k, v = inputs
        out = reattention(q, k, v, mixes, shape[-1] ** -0.5, impl="flash")
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()
    return out, *grads


def correctness(report: Report) -> None:
    """Outputs and all gradients against float64, into memory that was full of NaN."""
    worst: dict[str, float] = {}
    wrong = []
    for shape in CHECKED_TOYS if report.rehearsed else CHECKED:
        for dtype in (torch.float16, torch.bfloat16):
            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            errors = errors_of(shape, dtype, report.device)
            holds = all(error <= ERROR[dtype] for error in errors.values())  # NaN does not hold
            report.row(name, {**errors, "allowed": ERROR[dtype], "holds": holds})
            wrong += [] if holds else [f"{name}: {errors}"]
            key = str(dtype).removeprefix("torch.")
            worst[key] = max(worst.get(key, 0.0), *errors.values())
    for key, error in worst.items():
        report.row(f"worst {key}", error, f"{key}: worst relative error {error:.2e} of output and gradients")
    report.row("wrong", wrong, f"WRONG: {'; '.join(wrong)}" if wrong else "all within their limits")


def errors_of(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    qkv, drawn = operands(shape, dtype, device, seed=1)
    inputs = [part.detach().requires_grad_() for part in (*qkv, *drawn[:2]) if part is not None]
    exact = [part.detach().double().requires_grad_() for part in inputs]
    scale = shape[-1] ** -0.5
    expected = plain_reattention(exact[0], exact[1], exact[2], Mixes(exact[3], exact[4]), scale)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    exact_grads = torch.autograd.grad(expected, exact, weight.double())
    poison(device)
    out = reattention(inputs[0], inputs[1], inputs[2], Mixes(inputs[3], inputs[4]), scale, impl="flash")
    grads = torch.autograd.grad(out, inputs, weight)
    names = ("output", "q", "k", "v", "mix", "bias")
    pairs = zip(names, (out, *grads), (expected, *exact_grads), strict=True)
    return {name: relative(found, wanted) for name, found, wanted in pairs}


# --- the operation


def mixed_by_bmm(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    return plain_reattention(q, k, v, Mixes(weight, bias), scale)


def mixed_by_convolution(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    maps = ((q * scale) @ k.transpose(-2, -1)).softmax(dim=-1)
    return F.conv2d(maps, weight[:, :, None, None], bias) @ v


def mixed_by_einsum(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    maps = ((q * scale) @ k.transpose(-2, -1)).softmax(dim=-1)
    return (torch.einsum("gh,bhnm->bgnm", weight, maps) + bias[:, None, None]) @ v


FORMS = {"bmm": mixed_by_bmm, "conv": mixed_by_convolution, "einsum": mixed_by_einsum}


class Operation:
    """One shape: its input sets, and every way to compute it; float16."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device, self.scale = shape, device, shape[-1] ** -0.5
        drawn = [operands(shape, torch.float16, device, seed) for seed in range(SETS)]
        self.qkv = [tuple(qkv) for qkv, _ in drawn]
        self.mixes = drawn[0][1]
        assert self.mixes.bias is not None
        self.half = [self.mixes.weight.half(), self.mixes.bias.half()]

    def flash(self, number: int) -> Tensor:
        q, k, v = self.qkv[number]
        return reattention(q, k, v, self.mixes, self.scale, impl="flash")

    def form(self, function: Callable[..., Tensor]) -> Call:
        return lambda number: function(*self.qkv[number], *self.half, self.scale)

    def compiled(self, form: str, mode: str) -> Call:
        torch.compiler.reset()
        return self.form(torch.compile(FORMS[form], mode=MODES[mode], dynamic=False))

    def sdpa(self, backend: SDPBackend) -> Call:
        """Attention without the mix: the floor."""

        def call(number: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*self.qkv[number])

        return call


def flash_rows(report: Report, title: str, operation: Operation) -> float:
    """Every candidate; returns the best time."""
    times: dict[str, Any] = {}
    for tiles in CANDIDATES:
        with using(tiles):
            times[" ".join(map(str, tiles))] = timed(operation.flash, report.device)
    report.row(f"{title} flash", times)
    best = {name: row["ms"] for name, row in times.items() if "ms" in row}
    if not best:
        report.row(f"{title} flash refused", times, f"{title}: flash REFUSED: {next(iter(times.values()))['refused']}")
        return float("nan")
    return min(best.values())


def floor_rows(report: Report, title: str, operation: Operation) -> None:
    """SDPA without the mix, by each backend."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    times = {name: timed(operation.sdpa(backend), report.device) for name, backend in backends.items()}
    told = " ".join(f"{name} {_ms(row)}" for name, row in times.items())
    report.row(f"{title} sdpa", times, f"{title} {operation.shape} SDPA without mix, ms: {told}")


def compiled_rows(
    report: Report, title: str, operation: Operation, wanted: list[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    times: dict[str, Any] = {}
    for form, mode in wanted:
        times[f"{form} {mode}"] = timed(operation.compiled(form, mode), report.device)
        report.row(f"{title} compiled", times)
    told = " ".join(f"{name} {_ms(row)}" for name, row in times.items())
    report.row(f"{title} compiled", times, f"{title} torch.compile, ms: {told}")
    return {key: times[" ".join(key)]["ms"] for key in wanted if "ms" in times[" ".join(key)]}


def _ms(row: dict[str, Any]) -> str:
    return f"{row['ms']:.3f}" if "ms" in row else "refused"


def verdict(report: Report, title: str, shape: Shape, flash: float, compiled: dict[tuple[str, str], float]) -> None:
    """Flash over the best of torch.compile, and how near it is to what the measured ceilings allow."""
    best = min(compiled, key=lambda key: compiled[key]) if compiled else None
    over = compiled[best] / flash if best else float("nan")
    limit = limit_ms(report, shape)
    row = {"flash_ms": flash, "best_compiled": best, "over_best_compiled": over, "limit_ms": limit}
    told = f"{title} {shape}: flash {flash:.3f} ms, × {over:.2f} of the best torch.compile ({' '.join(best or ())})"
    report.row(f"{title} verdict", row, told + (f"; limit {limit:.3f} ms" if limit else ""))


def limit_ms(report: Report, shape: Shape) -> float | None:
    """The roofline of benchmarks/flash_reattention.py: QKᵀ twice, A V, the mix padded to 16 heads; q, k, v, out once."""
    found = report.rows_of("ceilings")
    if not {"float16", "copy"} <= set(found):
        return None
    B, H, N, K = shape
    operations = 3 * 2 * B * H * N * N * K + 2 * B * 16 * 16 * N * N
    moved = 2 * 4 * B * H * N * K
    return 1e3 * max(operations / found["float16"]["flops_per_second"], moved / found["copy"]["bytes_per_second"])


@torch.no_grad()
def operation(report: Report) -> None:
    """The published shape by every way there is."""
    shape = shapes(report)["16b"]
    subject = Operation(shape, report.device)
    flash = flash_rows(report, "16b", subject)
    floor_rows(report, "16b", subject)
    report.row("16b eager", {form: timed(subject.form(function), report.device) for form, function in FORMS.items()})
    wanted = [(form, mode) for mode in MODES for form in FORMS]
    times = compiled_rows(report, "16b", subject, wanted)
    report.row("order", [list(key) for key in sorted(times, key=lambda key: times[key])])
    verdict(report, "16b", shape, flash, times)


@torch.no_grad()
def other_shapes(report: Report) -> None:
    """The other published shapes, against the two best forms of the first."""
    order = report.rows_of("operation").get("order") or [["bmm", "max-autotune"], ["bmm", "default"]]
    for title, shape in list(shapes(report).items())[1:]:
        subject = Operation(shape, report.device)
        flash = flash_rows(report, title, subject)
        floor_rows(report, title, subject)
        verdict(
            report, title, shape, flash, compiled_rows(report, title, subject, [(key[0], key[1]) for key in order[:2]])
        )


def backward(report: Report) -> None:
    """Forward and backward together, as training runs them, the mixes' gradients included."""
    shape = shapes(report)["16b"]
    subject = Operation(shape, report.device)
    leaves = [[part.detach().requires_grad_() for part in qkv] for qkv in subject.qkv]
    ones = torch.ones(shape, device=report.device, dtype=torch.float16)

    def both(function: Callable[..., Tensor], mixes: list[Tensor]) -> Call:
        def call(number: int) -> Any:
            out = function(*leaves[number], *mixes, subject.scale)
            return torch.autograd.grad(out, [*leaves[number], *mixes], ones)

        return call

    def flash(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
        return reattention(q, k, v, Mixes(weight, bias), scale, impl="flash")

    assert subject.mixes.bias is not None
    mixes = [part.detach().requires_grad_() for part in (subject.mixes.weight, subject.mixes.bias)]
    half = [part.detach().requires_grad_() for part in subject.half]
    ours: dict[str, Any] = {}
    for tiles in CANDIDATES:
        with using(tiles):
            ours[" ".join(map(str, tiles))] = timed(both(flash, mixes), report.device)
    report.row("flash", ours)
    order = report.rows_of("operation").get("order") or [["bmm", "default"]]
    theirs: dict[str, Any] = {}
    for form, mode in order[:2]:
        torch.compiler.reset()
        compiled = torch.compile(FORMS[form], mode=MODES[mode], dynamic=False)
        theirs[f"{form} {mode}"] = timed(both(compiled, half), report.device)
        report.row("compiled", theirs)
    told = " ".join(f"{name}: {_ms(row)}" for name, row in {**ours, **theirs}.items())
    report.row("summary", None, f"{shape} forward + backward, ms: {told}")


# --- tools of the CUDA toolkit


def tool(name: str) -> str | None:
    """Its path, also where a CUDA image has it outside PATH."""
    places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    places += [str(path.parent) for path in Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


def kernel_names() -> list[str]:
    """The kernels that a GPU launches for the operator."""
    from vitx.models import flash_kernels

    return [name for name, value in vars(flash_kernels).items() if hasattr(value, "run") and name.endswith("_kernel")]


def once(report: Report) -> None:
    """What a tool looks at: forward and backward once, at each shape of LEASE_SHAPES."""
    for text in os.environ.get("LEASE_SHAPES", "1,12,17,33").split(";"):
        B, H, N, K = map(int, text.split(","))
        results = both_ways((B, H, N, K), torch.float16, report.device)
        assert all(part.isfinite().all() for part in results), "not finite"
        print("ran", text, flush=True)


def under(report: Report, command: list[str], shape: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `once` below a tool; in a rehearsal `once` alone, so that its own command line is tried."""
    inner = [sys.executable, str(Path(__file__)), "once", "--report", f"{report.path}.once"]
    inner += ["--rehearse"] * report.rehearsed
    environment = {**os.environ, "LEASE_SHAPES": shape, **variables}
    if not report.rehearsed:
        both_ways_first = subprocess.run(inner, env=environment, capture_output=True, text=True, check=False)
        print(both_ways_first.stdout, both_ways_first.stderr[-2000:], flush=True)  # compiled now, outside the tool
    finished = subprocess.run(
        inner if report.rehearsed else command + inner, env=environment, capture_output=True, text=True, check=False
    )
    print(finished.stdout[-8000:], finished.stderr[-8000:], flush=True)
    return finished


def sanitizer(report: Report, name: str, shape: str) -> None:
    path = tool("compute-sanitizer")
    command = [path or "compute-sanitizer", "--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
    if path is None and not report.rehearsed:
        report.row(name, None, "compute-sanitizer is not installed")
        return
    finished = under(report, command, shape, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    said = [line for line in finished.stdout.splitlines() if "SUMMARY" in line]
    row = {"command": command, "exit": finished.returncode, "summary": said, "output": finished.stdout[-4000:]}
    if report.rehearsed:
        line = f"needs a GPU: {' '.join(command)} (its program ran: {finished.returncode == 0})"
    else:
        line = f"{name} at {shape}: {said[-1].strip('= ') if said else last(finished)} (exit {finished.returncode})"
    report.row(name, row, line)


def last(finished: subprocess.CompletedProcess[str]) -> str:
    return ((finished.stdout + finished.stderr).strip().splitlines() or ["it said nothing"])[-1][:100]


def memcheck(report: Report) -> None:
    sanitizer(report, "memcheck", "1,12,17,33" if report.rehearsed else "2,12,65,33;1,12,197,32")


def racecheck(report: Report) -> None:
    sanitizer(report, "racecheck", "1,12,17,33")


SECTIONS = (
    *("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "MemoryWorkloadAnalysis", "InstructionStats"),
    *("ComputeWorkloadAnalysis", "SchedulerStats"),
)


def profile(report: Report) -> None:
    """Nsight Compute on the kernels at two shapes: every raw metric in the report, what binds in the table."""
    path = tool("ncu")
    names = "|".join(kernel_names())
    command = [path or "ncu", "--clock-control", "none", "--kernel-name", f"regex:^({names})$", "--csv", "--page", "raw"]
    for section in SECTIONS:
        command += ["--section", section]
    if path is None and not report.rehearsed:
        report.row("profile", None, "ncu is not installed")
        return
    for title in ("16b", "S"):
        shape = ",".join(map(str, shapes(report)[title]))
        finished = under(report, command, shape, {})
        if report.rehearsed:
            report.row(title, {"command": command}, f"needs a GPU: {' '.join(command[:6])} … (its program ran)")
            assert finished.returncode == 0, finished.stderr[-500:]
            continue
        launches = parse_raw_page(finished.stdout)
        report.row(title, {"command": command, "exit": finished.returncode, "launches": launches})
        if not launches:
            report.row(f"{title} refused", finished.stdout[-2000:], f"{title}: ncu gave nothing: {last(finished)}")
        for launch in launches:
            report.row(f"{title} {launch['Kernel Name']}", None, f"{title} {bound(launch)}")


def parse_raw_page(text: str) -> list[dict[str, Any]]:
    """One dictionary a launch from ncu's CSV: a header, a row of units, a row a launch; numbers with commas in them."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3:
        return []
    header, units, *launches = rows
    named = [f"{name} [{unit}]" if unit else name for name, unit in zip(header, units, strict=True)]
    return [{name: number_of(value) for name, value in zip(named, launch, strict=True)} for launch in launches]


def number_of(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def bound(launch: dict[str, Any]) -> str:
    """A line: time, shares of the peaks, registers, occupancy, the most frequent stalls."""

    def metric(name: str) -> Any:
        return next((value for key, value in launch.items() if key.split(" [")[0] == name), float("nan"))

    prefix, suffix = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
    stalls = {
        key.split(" [")[0].removeprefix(prefix).removesuffix(suffix): value
        for key, value in launch.items()
        if key.startswith(prefix) and key.split(" [")[0].endswith(suffix) and isinstance(value, float)
    }
    top = sorted(stalls, key=lambda name: -stalls[name])[:3]
    unit = next((key.partition("[")[2].rstrip("]") for key in launch if key.startswith("gpu__time_duration.sum")), "")
    return (
        f"{launch['Kernel Name'][:26]}: {metric('gpu__time_duration.sum'):.0f} {unit}, SM "
        f"{metric('sm__throughput.avg.pct_of_peak_sustained_elapsed'):.0f} %, memory "
        f"{metric('gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed'):.0f} %, "
        f"{metric('launch__registers_per_thread'):.0f} registers, occupancy "
        f"{metric('sm__warps_active.avg.pct_of_peak_sustained_active'):.0f} %, stalls "
        + " ".join(f"{name} {stalls[name]:.1f}" for name in top)
    )


STEPS: dict[str, Callable[[Report], None]] = {
    "machine": machine,
    "ceilings": ceilings,
    "compile": compile_kernels,
    "correctness": correctness,
    "operation": operation,
    "shapes": other_shapes,
    "backward": backward,
    "memcheck": memcheck,
    "profile": profile,
    "racecheck": racecheck,
}

if __name__ == "__main__":
    assert INTERPRETED or torch.cuda.is_available(), "no GPU"
    run_step({**STEPS, "once": once})
