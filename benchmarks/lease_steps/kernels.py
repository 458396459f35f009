"""The steps of `lease.py kernels`: is flash Re-Attention right, how fast is it, and what binds it."""

import os
import platform
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from lease_steps.attention_forms import (
    SHAPES,
    TOYS,
    Shape,
    backward,
    both_passes,
    compiled,
    operands,
    operation,
    other_shapes,
)
from lease_steps.cuda_tools import profile, sanitizers, tool
from lease_steps.step_report import Report, of_peak, run_step
from lease_steps.tile_sweep import compile_sweep, other_sweep, tiles_sweep
from support.gpu_timing import SETS, first_line, milliseconds
from support.triton_interpreter import patch_interpreter
from vitx.core.machine import installed_versions
from vitx.models.flash.reattention import INTERPRETED, Mixes, flash_reattention, plain_reattention

# A shape and a dtype.
Job = tuple[Shape, str]
CHECKED: tuple[Shape, ...] = (*SHAPES.values(), (8, 16, 197, 64))
CHECKED_TOYS: tuple[Shape, ...] = (*TOYS.values(), (1, 16, 17, 64))
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # bfloat16 has three bits less


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
    found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
    report.row("machine", found, found["nvidia_smi"])
    report.row("tools", {name: tool(name) for name in ("ncu", "compute-sanitizer", "nvcc")})


def ceilings(report: Report) -> None:
    """The card's measured peaks: products, a copy of 2 GiB, a copy that stays in L2."""
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
    """Compile every kernel that later steps run, in parallel: they then find it in Triton's cache.

    Both passes at every shape and dtype; the batch size is no part of a kernel.
    """
    jobs: list[Job] = [((2, *shape[1:]), dtype) for shape in CHECKED for dtype in ("float16", "bfloat16")]
    jobs = [((1, 12, 9, 32), "float16")] if report.rehearsed else jobs
    workers = min(14, len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=patch_interpreter) as pool:
        problems = list(pool.map(partial(compile_one, report.device), jobs))
    refused = {str(job): problem for job, problem in zip(jobs, problems, strict=True) if problem}
    line = f"{len(jobs)} settings, {len(refused)} refused {next(iter(refused.items()), '')}"
    report.row("jobs", {"count": len(jobs), "refused": refused}, line)


def compile_one(device: str, job: Job) -> str:
    """Run the kernels once; returns the error, empty for none."""
    shape, name = job
    try:
        both_passes(shape, getattr(torch, name), device)
    except Exception as error:  # noqa: BLE001  # Triton's refusals share no base class; a row says which
        return first_line(error)
    return ""


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
    out = flash_reattention(inputs[0], inputs[1], inputs[2], Mixes(inputs[3], inputs[4]), scale)
    grads = torch.autograd.grad(out, inputs, weight)
    names = ("output", "q", "k", "v", "mix", "bias")
    pairs = zip(names, (out, *grads), (expected, *exact_grads), strict=True)
    return {name: relative(found, wanted) for name, found, wanted in pairs}


def poison(device: str) -> None:
    """Fill what the allocator will hand out next with NaN: an element that nobody writes then shows."""
    if device == "cpu":
        torch.use_deterministic_algorithms(True)  # torch.empty is then NaN by itself
        return
    torch.cuda.empty_cache()
    # Small ones first: they fill what is left of segments that are in use. Then whole segments of both pools.
    kib = [*[4] * 256, *[64] * 64, *[256] * 64, *[1024] * 64, *[2048] * 40, *[32768] * 64]
    blocks = [torch.full((256 * each,), torch.nan, device=device) for each in kib]
    torch.cuda.synchronize()
    del blocks


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖; NaN where anything is not finite, which passes nothing."""
    return float((found.double() - expected).norm() / expected.norm())


STEPS: dict[str, Callable[[Report], None]] = {
    "machine": machine,
    "ceilings": ceilings,
    "compile": compile_kernels,
    "correctness": correctness,
    "operation": operation,
    "compiled": compiled,
    "profile": profile,
    "sanitizers": sanitizers,
    "backward": backward,
    "shapes": other_shapes,
    "compile_sweep": compile_sweep,
    "sweep": tiles_sweep,
    "other_sweep": other_sweep,
}

if __name__ == "__main__":
    assert INTERPRETED or torch.cuda.is_available(), "no GPU"
    run_step(STEPS)
