"""One training step compiled with inductor beside the same step without: equal? how long does compiling take?

    python benchmarks/models/compiled_step.py [--network deepvit_digits] [--depth 2] [--batch 8] [--repeats 9]
        [--json FILE]

Blocks are compiled one by one, as `execution.compile` does, in two processes one after the other with one cache on disk
that is empty at first. `first_seconds` is the first step of each, compilation included, on the clock. Equality: the
error of the gradient against float64, norm over norm, of the compiled step and of the plain one; a fresh Re-Attention
amplifies the rounding of either. Target: at most 1e-3, what the test with an eager back end allows. Two blocks of the
digits' network (2026-11-23): compiled 1.1e-4, plain 2.8e-5, so inductor rounds four times as much here. `ratio` is the
median of processor time, compiled over not, in turns. A test would take too long: that network took 75 s and 106 s on
two busy cores, 13 s from the cache.
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
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import vitx.models  # noqa: F401  # registers the networks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import (
    all_hold,
    at_least,
    command_line,
    exit_code,
    network_name,
    report_header,
    save_report,
    verdict,
)
from support.turns import take_turns

TARGET = 1e-3


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The loss of a forward and backward pass, which leaves gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(model(images), labels)
    torch.autograd.backward(loss)
    return float(loss.detach())


def seconds(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Seconds of the processor of such a pass."""
    begun = time.process_time()
    loss_of(model, images, labels)
    return time.process_time() - begun


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one process finds."""
    torch.manual_seed(0)
    depth: dict[str, Any] = {"depth": arguments.depth} if arguments.depth else {}
    if arguments.depth and arguments.network.startswith("deepvit"):
        depth["attention"] = ["plain", *["re-attention"] * (arguments.depth - 1)]
    plain: Any = timm.create_model(arguments.network, **depth).train()
    compiled, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    for block in compiled.blocks:
        block.compile()
    size = plain.patch_embed.img_size[0]
    images, labels = torch.randn(arguments.batch, 3, size, size), torch.arange(arguments.batch)
    begun = time.perf_counter()
    compiled_loss = loss_of(compiled, images, labels)
    first = time.perf_counter() - begun
    loss_difference = abs(loss_of(plain, images, labels) - compiled_loss)
    loss_of(exact, images.double(), labels)
    expected, *found = (
        torch.cat([each.grad.double().flatten() for each in model.parameters()]) for model in (exact, compiled, plain)
    )
    errors = [float((gradient - expected).norm() / expected.norm()) for gradient in found]
    both = {"plain": plain, "compiled": compiled}
    times = take_turns(
        {name: partial(seconds, model, images, labels) for name, model in both.items()}, arguments.repeats, warm_up=2
    )
    ratios = [ours / other for ours, other in zip(times["compiled"], times["plain"], strict=True)]
    return {
        "first_seconds": round(first, 1),
        "loss_difference": loss_difference,
        "gradient_errors": dict(zip(both, reversed(errors), strict=True)),
        "holds": errors[0] <= TARGET,
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--network", type=network_name, default="deepvit_digits")
    parser.add_argument("--depth", type=at_least(0), default=2, help="0: the network's own")
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--repeats", type=at_least(1), default=9)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments)))
        return 0
    report: dict[str, Any] = report_header()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "full cache"):
            run = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child"],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                check=True,
            )
            report[name] = json.loads(run.stdout.splitlines()[-1])
            print(f"{arguments.network}, {name}: {report[name]}: {verdict(report[name])}", flush=True)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
