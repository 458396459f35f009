"""The step of `lease.py kernels` that looks for the fastest tiles of each launch of the flash kernels.

One launch is varied at a time, the others keep their tiles; what is timed is the whole pass that the launch belongs to.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from lease_steps.attention_forms import SHAPES, TOYS, Shape, operands
from lease_steps.step_report import Report
from support.gpu_timing import SETS, first_line, timed
from support.triton_interpreter import patch_interpreter
from vitx.models.flash import reattention
from vitx.models.flash.reattention import Launch, Mixes, Tiles

SHOWN = 4
SIDES = ((32, 16, 2), (16, 16, 1))
# The best at the published shape on an H100, and what may be better at another.
GOOD: dict[Launch, list[Tiles]] = {
    "out": [Tiles(*side, stages, heads) for side in SIDES for stages in (2, 3) for heads in (2, 3, 4, 6)],
    "v_grad": [Tiles(*side, 2, heads) for side in SIDES for heads in (2, 3, 4, 6)],
    "score_grad": [Tiles(*side, 2, heads) for side in SIDES for heads in (2, 3, 4)],
    "sums": [Tiles(128, 32, 4, 3, 1), Tiles(64, 64, 4, 2, 3), Tiles(64, 32, 4, 3, 4)],
    "weight_grad": [Tiles(128, 32, 4, 3, 1), Tiles(64, 64, 4, 3, 1)],
    "talking": [Tiles(*side, stages, heads) for side in SIDES for stages, heads in ((1, 4), (2, 4), (2, 3))],
}


class Job(NamedTuple):
    launch: Launch
    tiles: Tiles
    shape: Shape


def candidates(launch: Launch) -> Iterator[Tiles]:
    """Tiles whose outputs and mixed maps at width 32 fill a part of a thread's 255 registers that is neither small nor
    too large; the sums and the weights' gradients keep nothing of that kind.
    """
    if launch == "sums":
        one_head = ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 64, 4), (32, 64, 2), (64, 128, 4), (128, 32, 4))
        yield from (Tiles(*side, stages, 1) for side, stages in product(one_head, (2, 3)))
        yield from (Tiles(64, 64, 4, 2, 3), Tiles(64, 32, 4, 3, 4))
        return
    if launch == "weight_grad":
        one_head = ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8), (128, 32, 4), (64, 64, 8), (32, 64, 4))
        yield from (Tiles(*side, stages, 1) for side, stages in product(one_head, (2, 3)))
        return
    outputs = {"out": (3, 4, 6, 12), "v_grad": (3, 4, 6), "score_grad": (2, 3, 4, 6)}[launch]
    # A tile of dP and one of P for each output of a gradient of the scores.
    maps = 2 if launch == "score_grad" else 1
    sides = ((32, 2), (32, 4), (64, 4), (64, 8)) + ((16, 1), (128, 8)) * (launch == "out")
    for (rows, warps), keys, heads in product(sides, (16, 32), outputs):
        numbers = heads * rows * (32 + maps * keys) // (32 * warps)
        if 40 <= numbers <= 150:
            yield from (Tiles(rows, keys, warps, stages, heads) for stages in (2, 3))
            if launch == "out" and rows == 16 * warps:
                yield Tiles(rows, keys, warps, 1, heads)


def one_pass(shape: Shape, launch: Launch, device: str) -> Callable[[int], Any]:
    """The pass that a launch belongs to, on several sets of inputs."""
    qkv = [operands(shape, torch.float16, device, seed)[0] for seed in range(SETS)]
    mixes = operands(shape, torch.float16, device)[1]
    scale = shape[-1] ** -0.5
    if shape[-1] % 8:
        qkv = [torch.nn.functional.pad(each, (0, -shape[-1] % 8)) for each in qkv]
        qkv = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in qkv]
    if launch == "talking":
        talking = Mixes(mixes.weight, mixes.bias, mixes.weight)
        return lambda number: torch.ops.vitx.reattention(*qkv[number], *talking, scale)
    if launch in ("sums", "out"):
        return lambda number: torch.ops.vitx.reattention(*qkv[number], *mixes, scale)
    results = [torch.ops.vitx.reattention(*each, *mixes, scale) for each in qkv]

    def backward(number: int) -> Any:
        out, sums = results[number]
        return torch.ops.vitx.reattention_backward(out, *qkv[number], *mixes[:2], sums, scale)

    return backward


def with_tiles(job: Job) -> AbstractContextManager[object]:
    """Inside, the job's launch runs with its tiles."""
    own = reattention.tiles_of

    def tiles_of(launch: Launch, heads: int, width: int) -> Tiles:
        return job.tiles if launch == job.launch else own(launch, heads, width)

    return patch.object(reattention, "tiles_of", tiles_of)


def compile_job(device: str, job: Job) -> str:
    """Run the pass once, on one image; returns the error, empty for none."""
    try:
        call = one_pass((1, *job.shape[1:]), job.launch, device)
        with with_tiles(job):
            call(0)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # Triton's refusals share no base class; a row says which
        return first_line(error)
    return ""


def first_jobs(report: Report) -> list[Job]:
    launches: tuple[Launch, ...] = ("out", "sums", "score_grad", "v_grad", "weight_grad")
    shape = (TOYS if report.rehearsed else SHAPES)["16b"]
    jobs = [Job(launch, tiles, shape) for launch in launches for tiles in candidates(launch)]
    return jobs[:2] if report.rehearsed else jobs


def compile_sweep(report: Report) -> None:
    """Fill Triton's cache, so that the sweep itself is mostly measuring; nothing here is timed."""
    problems = compile_jobs(first_jobs(report), report.device)
    refused = [problem for problem in problems if problem]
    report.row("jobs", {"count": len(problems), "refused": refused}, f"{len(problems)} tiles, {len(refused)} refused")


def compile_jobs(jobs: list[Job], device: str) -> list[str]:
    workers = min(15, len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=patch_interpreter) as pool:
        return list(pool.map(partial(compile_job, device), jobs))


def tiles_sweep(report: Report) -> None:
    """Every candidate at the published shape of width 32."""
    swept(report, "16b", first_jobs(report))


def other_sweep(report: Report) -> None:
    """The best of that at other shapes: heads of width 33, which are 40 or 48 wide in memory; 384 px; wide heads."""
    every: tuple[Launch, ...] = ("out", "sums", "score_grad", "v_grad", "weight_grad")
    swept_shapes: dict[str, tuple[Shape, tuple[Launch, ...]]]
    swept_shapes = {"384px": (SHAPES["384px"], ("out",)), "16b": (SHAPES["16b"], ("talking",))}
    swept_shapes |= {"S": (SHAPES["S"], every), "wide": ((16, 16, 197, 64), ("out", "score_grad", "v_grad"))}
    swept_shapes |= {"S48": ((64, 12, 197, 48), ("out", "sums"))}
    jobs = [
        Job(launch, tiles, shape)
        for shape, launches in swept_shapes.values()
        for launch in launches
        for tiles in GOOD[launch]
    ]
    if report.rehearsed:
        jobs = [job._replace(shape=(1, 12, 17, job.shape[-1])) for job in jobs if job.launch == "talking"][::4]
        swept(report, "toys", jobs)
        return
    problems = dict(zip(jobs, compile_jobs(jobs, report.device), strict=True))
    for title, (shape, _) in swept_shapes.items():
        swept(report, title, [job for job in jobs if job.shape == shape], problems)


def swept(report: Report, title: str, jobs: list[Job], problems: dict[Job, str] | None = None) -> None:
    """Time each job; compile all in parallel before, if that has not been done."""
    if problems is None:
        problems = dict(zip(jobs, compile_jobs(jobs, report.device), strict=True))
    for launch in dict.fromkeys(job.launch for job in jobs):
        call = one_pass(jobs[0].shape, launch, report.device)
        times: dict[str, Any] = {"as it is": timed(call, report.device)}
        for job in jobs:
            if job.launch == launch:
                with with_tiles(job):
                    row = {"refused": problems[job]} if problems[job] else timed(call, report.device)
                times[" ".join(str(int(number)) for number in job.tiles)] = row
                report.row(f"{title} {launch}", times)
        milliseconds = {name: row["ms"] for name, row in times.items() if "ms" in row}
        order = sorted(milliseconds, key=lambda name: milliseconds[name])
        said = ", ".join(f"{name}: {milliseconds[name]:.3f}" for name in order[:SHOWN])
        refused = sum("refused" in row for row in times.values())
        now = milliseconds.get("as it is", float("nan"))
        line = f"{title} {launch} as it is: {now:.3f}, best {said}; {refused} refused"
        report.row(f"{title} {launch}", times, line)
