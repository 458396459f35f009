"""What a user gets from PyTorch's exporter alone, and calls of two graphs that take turns."""

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.turns import take_turns


def export_as_it_comes(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write `torch.onnx.export`'s graph, `images` → `logits`, the first dimension dynamic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N")},),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    program.save(str(path), external_data=False)


def timed(session: Any, images: Any) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    session.run(None, {"images": images})
    return time.perf_counter() - wall, time.thread_time() - cpu


def paired(ours: tuple[Any, Any], theirs: tuple[Any, Any], repeats: int, *, warm_up: int = 1) -> dict[str, Any]:
    """Interleaved calls of two sessions, each with its images: medians, and the pairs' ratios of theirs over ours."""
    times = take_turns({"ours": lambda: timed(*ours), "theirs": lambda: timed(*theirs)}, repeats, warm_up=warm_up)
    report: dict[str, Any] = {"pairs": repeats}
    for index, clock in enumerate(("wall", "cpu")):
        mine, other = ([pair[index] for pair in times[name]] for name in ("ours", "theirs"))
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        report[f"ours_{clock}_ms"] = 1000 * statistics.median(mine)
        report[f"theirs_{clock}_ms"] = 1000 * statistics.median(other)
        report[f"speed_ratio_{clock}"] = statistics.median(ratios)
        report[f"speed_ratio_{clock}_quartiles"] = [round(q, 4) for q in statistics.quantiles(ratios)]
    return report
