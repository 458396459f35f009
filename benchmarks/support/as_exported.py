"""What a user gets from PyTorch's exporter alone, and one timed call of the graph."""

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


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
