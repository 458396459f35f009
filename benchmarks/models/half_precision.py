"""Gradients of the zoo inside autocast on a CPU, and what Re-Attention's mix in float32 costs there.

    python benchmarks/models/half_precision.py [--networks deepvit_16b,deepvit_s] [--batch 2] [--repeats 9]
        [--json FILE]

(a) Fresh networks at 224 px (deepvit_l_384 at 384), training mode, images of noise, cross-entropy: of each block the
cosine between its gradients in float64 and inside autocast, in bfloat16 and in float16 with the loss scaled by 1024.
`worst` is the smallest of the blocks. Target: 0.99.
(b) One layer of DeepViT-16B, (8, 197, 384), forward and backward inside bfloat16 autocast: ours, which mixes in
float32, and the mix left to autocast, as it was until 2026-11-23. They take turns; the ratio is the median of the
pairs' ratios, of processor time.
`saved_bytes` is what each keeps for its backward pass.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional

import vitx.models  # noqa: F401  # registers the networks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, command_line, report_header, save_report, verdict
from support.turns import take_turns
from vitx.models import ReAttention

TARGET = 0.99
NETWORKS = "deepvit_16b,deepvit_24b,deepvit_32b,deepvit_s,deepvit_l,plainvit_16b,deit_small_12,deit_small_12_talking"
SCALES = {torch.bfloat16: 1.0, torch.float16: 1024.0}


class LeftToAutocast(ReAttention):
    """The mix in the precision that autocast takes."""

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        return self._mixed(maps_BHNN)


def block_gradients(model: Any, images: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Of each block the gradients of all its parameters, as one vector; None is float64."""
    one = copy.deepcopy(model) if dtype else copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = one(images if dtype else images.double())
    wide = logits.float() if dtype else logits
    loss: Tensor = functional.cross_entropy(wide, torch.arange(len(images))) * (SCALES[dtype] if dtype else 1)
    torch.autograd.backward(loss)
    return [torch.cat([each.grad.flatten().double() for each in block.parameters()]) for block in one.blocks]


def agreement(name: str, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = timm.create_model(name).train()
    size = model.patch_embed.img_size[0]
    images = torch.randn(batch, 3, size, size)
    exact = block_gradients(model, images, None)
    found: dict[str, Any] = {"pixels": size, "batch": batch}
    for dtype in SCALES:
        pairs = zip(exact, block_gradients(model, images, dtype), strict=True)
        cosines = [round(float(functional.cosine_similarity(*pair, dim=0)), 5) for pair in pairs]
        found[str(dtype)] = {"worst": min(cosines), "blocks": cosines, "holds": min(cosines) >= TARGET}
    return found


def step(layer: ReAttention, x: Tensor) -> float:
    """Seconds of the processor of one forward and backward pass."""
    begun = time.process_time()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    torch.autograd.backward(out.float().sum())
    return time.process_time() - begun


def saved_bytes(layer: ReAttention, x: Tensor) -> int:
    """What the forward pass keeps for the backward pass, each storage once, weights left out."""
    weights = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    del out
    return sum(kept.values())


def cost(repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(8, 197, 384, requires_grad=True)
    forms: dict[str, ReAttention] = {"float32": ReAttention(384, 12), "autocast": LeftToAutocast(384, 12)}
    times = take_turns({name: partial(step, one, x) for name, one in forms.items()}, repeats, warm_up=2)
    ratios = [ours / other for ours, other in zip(times["float32"], times["autocast"], strict=True)]
    return {
        **{f"{name}_processor_ms": round(1000 * statistics.median(found), 1) for name, found in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(quartile, 3) for quartile in statistics.quantiles(ratios)],
        "saved_bytes": {name: saved_bytes(one, x) for name, one in forms.items()},
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    arguments: argparse.Namespace = parser.parse_args()
    report: dict[str, Any] = report_header()
    print(json.dumps(report["machine"]))
    report["mix"] = cost(arguments.repeats)
    print(f"mix: {report['mix']}", flush=True)
    for name in filter(None, arguments.networks.split(",")):
        report[name] = row = agreement(name, arguments.batch)
        said = ", ".join(f"{dtype} {row[str(dtype)]['worst']} {verdict(row[str(dtype)])}" for dtype in SCALES)
        print(f"{name}: worst cosine of a block's gradients {said}", flush=True)
        save_report(report, arguments.json)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
