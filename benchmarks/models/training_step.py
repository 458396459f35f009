"""Our networks against their peers, in one run: time of a training step and peak memory, on this machine.

    python benchmarks/models/training_step.py [--batch 8] [--repeats 9] [--json FILE]

Re-Attention and AttnScale: ours against the papers' formulation written out plainly in the same DeepViT-S and DeiT-S
(softmax → Conv2d → BatchNorm2d → × scale → matmul; softmax → less 1/N → × factor → and 1/N again → matmul). Plain
attention: our DeiT-S against timm's. The two of a pair take turns; the ratio is the median of the pairs' ratios. Memory
is the peak resident set of a process that takes two steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import vitx.models

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.process_tree import TRIMMED, own_peak_bytes
from support.targets import at_least, command_line, exit_code, report_header, save_report
from support.turns import take_turns
from vitx.models import AttnScaleAttention, ReAttention
from vitx.models.head_mix import mix_heads


class WrittenOut(nn.Module):
    """Re-Attention or AttnScale as its formula reads, with the trained layers of ours."""

    def __init__(self, ours: ReAttention | AttnScaleAttention) -> None:
        super().__init__()
        self.layers = ours

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers
        B, N, D = x.shape
        q, k, v = layers.qkv(x).reshape(B, N, 3, layers.num_heads, D // layers.num_heads).permute(2, 0, 3, 1, 4)
        maps = (q @ k.transpose(-2, -1)) * layers.scale
        maps = layers.attn_drop(maps.softmax(dim=-1))
        if isinstance(layers, ReAttention):
            maps = layers.var_norm(layers.reatten_matrix(maps)) * layers.reatten_scale
        else:
            low = torch.ones(maps.shape[-2:]) / N
            maps = low + (maps - low) * (1 + layers.lamb[None, :, None, None])
        out: Tensor = layers.proj((maps @ v).transpose(1, 2).reshape(B, N, D))
        return out


def network(name: str) -> Any:
    """A network in training mode; after `written-out-` comes the name of one whose attention is its plain formula."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name.removeprefix("written-out-"))
    if name.startswith("written-out-"):
        for block in model.blocks:
            if isinstance(block.attn, ReAttention | AttnScaleAttention):
                block.attn = WrittenOut(block.attn)
    return model.train()


def step(model: nn.Module, images: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(images).logsumexp(-1).sum().backward()
    return time.perf_counter() - start


def paired_times(ours: str, theirs: str, batch: int, repeats: int) -> dict[str, float]:
    """Interleaved steps; the order within a pair alternates."""
    models = {name: network(name) for name in (ours, theirs)}
    images = torch.randn(batch, 3, 224, 224)
    times = take_turns({name: partial(step, model, images) for name, model in models.items()}, repeats)
    ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
    return {
        "ours_s": statistics.median(times[ours]),
        "theirs_s": statistics.median(times[theirs]),
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_min": min(ratios),
        "speed_ratio_max": max(ratios),
    }


def peak_memory(name: str, batch: int) -> float:
    """Peak resident MiB of a fresh process that builds `name` and takes two steps."""
    command = [sys.executable, __file__, "--memory-of", name, "--batch", str(batch)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **TRIMMED})
    return float(finished.stdout)


def mix_forms(repeats: int, shape: tuple[int, int, int, int] = (8, 12, 197, 197)) -> dict[str, float]:
    """Milliseconds, forward and backward, of the mix over heads in each of its forms; they take turns."""
    H = shape[1]
    maps = torch.rand(shape).softmax(-1).requires_grad_()
    weight, bias = torch.randn(H, H, requires_grad=True), torch.randn(H, requires_grad=True)
    forms: dict[str, Callable[[], Tensor]] = {
        "baddbmm (ours)": lambda: mix_heads(maps, weight, bias),
        "convolution": lambda: functional.conv2d(maps, weight[:, :, None, None], bias),
        "einsum": lambda: torch.einsum("hg,bgij->bhij", weight, maps) + bias[:, None, None],
        "broadcast matmul": lambda: (torch.matmul(weight, maps.flatten(2)) + bias[:, None]).view(shape),
    }

    def milliseconds(form: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        torch.autograd.backward(form().square().sum())
        return 1000 * (time.perf_counter() - start)

    times = take_turns({name: partial(milliseconds, form) for name, form in forms.items()}, repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--repeats", type=at_least(1), default=9)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        model, images = network(arguments.memory_of), torch.randn(arguments.batch, 3, 224, 224)
        step(model, images)
        step(model, images)
        print(own_peak_bytes() / 2**20)
        return
    report: dict[str, Any] = {**report_header(), "batch": arguments.batch}
    for title, ours, theirs in (
        ("deepvit_s, against the formula written out", "deepvit_s", "written-out-deepvit_s"),
        ("attnscale_small_12, against the same", "attnscale_small_12", "written-out-attnscale_small_12"),
        ("deit_small_12, against timm's deit_small_patch16_224", "deit_small_12", "deit_small_patch16_224"),
    ):
        times = paired_times(ours, theirs, arguments.batch, arguments.repeats)
        memory = {"ours_mib": peak_memory(ours, arguments.batch), "theirs_mib": peak_memory(theirs, arguments.batch)}
        report[title] = {**times, **memory}
        print(
            f"{title}: {times['ours_s']:.2f} s against {times['theirs_s']:.2f} s, "
            f"speed × {times['speed_ratio']:.3f} ({times['speed_ratio_min']:.3f} to {times['speed_ratio_max']:.3f}); "
            f"peak memory {memory['ours_mib']:.0f} MiB against {memory['theirs_mib']:.0f} MiB"
        )
    report["mix over heads, (8, 12, 197, 197), forward and backward, ms"] = forms = mix_forms(3 * arguments.repeats)
    print("mix over heads: " + ", ".join(f"{name} {value:.1f} ms" for name, value in forms.items()))
    print(json.dumps(report["machine"]))
    save_report(report, arguments.json)


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(exit_code(main))
