"""Gradients of the zoo inside autocast on a CPU, and what Re-Attention's mix in float32 costs there.

    python benchmarks/models/half_precision.py [--networks deepvit_16b,deepvit_s] [--batch 2] [--repeats 9]
        [--steps 200 --pixels 64] [--json FILE]

(a) Networks at 224 px (deepvit_l_384 at 384) or at --pixels, training mode, cross-entropy: of each block the cosine
between its gradients in float64 and inside autocast, in bfloat16 and in float16 with the loss scaled by 1024. `worst`
is the smallest of the blocks. Target: 0.99. Fresh ones see --batch images of noise. With --steps they are first trained
for so many steps on the digits (float32, batches of 16, AdamW, lr 3e-4 after 20 steps of warm-up), and the gradients
are those of the next step's batch; `loss` is that of the first and the last ten steps.
AlterNet's blocks are its units. It computes in float32 while it trains: left to autocast, alternet_50 has .54 in
bfloat16 and .92 in float16 at 64 px and 3 images, timm's resnet50 with zero_init_last=False .02 and .65.
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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor
from torch.nn import functional

import vitx.models  # noqa: F401  # registers the networks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, at_least, command_line, report_header, save_report, verdict
from support.turns import take_turns
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.models import ReAttention, image_tensor

TARGET = 0.99
TRAINING_BATCH = 16
TRANSFORMERS = (
    "deepvit_16b,deepvit_24b,deepvit_32b,deepvit_s,deepvit_l,plainvit_16b,deit_small_12,deit_small_12_talking"
)
NETWORKS = f"{TRANSFORMERS},alternet_50"
SCALES = {torch.bfloat16: 1.0, torch.float16: 1024.0}


class LeftToAutocast(ReAttention):
    """The mix in the precision that autocast takes."""

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        return self._mixed(maps_BHNN)


def block_gradients(model: Any, images: Tensor, labels: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Of each block the gradients of all its parameters, as one vector; None is float64."""
    one = copy.deepcopy(model) if dtype else copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = one(images if dtype else images.double())
    wide = logits.float() if dtype else logits
    loss: Tensor = functional.cross_entropy(wide, labels) * (SCALES[dtype] if dtype else 1)
    torch.autograd.backward(loss)
    blocks = one.blocks if hasattr(one, "blocks") else [unit for stage in one.stages for unit in stage]
    return [torch.cat([each.grad.flatten().double() for each in block.parameters()]) for block in blocks]


def agreement(name: str, batch: int, steps: int, pixels: int) -> dict[str, Any]:
    torch.manual_seed(0)
    # A network of convolutions takes any size.
    size_argument: dict[str, Any] = {"img_size": pixels} if pixels and not name.startswith("alternet") else {}
    model: Any = timm.create_model(name, **size_argument).train()
    size = pixels or model.default_cfg["input_size"][-1]
    found: dict[str, Any] = {"pixels": size}
    if steps:
        batches = digits(size)
        found |= {"steps": steps, "loss": train(model, batches, steps)}
        images, labels = next(batches)
    else:
        images, labels = torch.randn(batch, 3, size, size), torch.arange(batch)
    found["batch"] = len(images)
    exact = block_gradients(model, images, labels, None)
    for dtype in SCALES:
        pairs = zip(exact, block_gradients(model, images, labels, dtype), strict=True)
        cosines = [round(float(functional.cosine_similarity(*pair, dim=0).nan_to_num(-1)), 5) for pair in pairs]
        found[str(dtype)] = {"worst": min(cosines), "blocks": cosines, "holds": min(cosines) >= TARGET}
    return found


def digits(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the digits' training images and labels in random order, without end."""
    split, preprocessing = open_images("digits", "train"), Preprocessing(image_size=size)
    pixels = np.concatenate([*split.batches(preprocessing, 256)])
    labels, order = torch.as_tensor(split.labels, dtype=torch.long), torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(labels), (TRAINING_BATCH,), generator=order)
        yield image_tensor(pixels[chosen.numpy()], preprocessing.mean, preprocessing.std), labels[chosen]


def train(model: Any, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Train in float32; return the mean loss of the first and of the last ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses = []
    for _, (images, labels) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        warm_up.step()
        losses.append(float(loss.detach()))
    return [round(statistics.fmean(part), 3) for part in (losses[:10], losses[-10:])]


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
    parser.add_argument("--repeats", type=at_least(1), default=9)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pixels", type=int, default=0)
    arguments: argparse.Namespace = parser.parse_args()
    report: dict[str, Any] = report_header()
    print(json.dumps(report["machine"]))
    report["mix"] = cost(arguments.repeats)
    print(f"mix: {report['mix']}", flush=True)
    for name in filter(None, arguments.networks.split(",")):
        row = agreement(name, arguments.batch, arguments.steps, arguments.pixels)
        report[f"{name} after {arguments.steps} steps" if arguments.steps else name] = row
        said = ", ".join(f"{dtype} {row[str(dtype)]['worst']} {verdict(row[str(dtype)])}" for dtype in SCALES)
        losses = f" (loss {row['loss'][0]} to {row['loss'][1]})" if arguments.steps else ""
        print(f"{name}{losses}: worst cosine of a block's gradients {said}", flush=True)
        save_report(report, arguments.json)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
