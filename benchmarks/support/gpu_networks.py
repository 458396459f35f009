"""Whole networks on a GPU: made, captured in a CUDA graph, and compared with themselves in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitx.models
from support.gpu_timing import capture
from vitx.core.preprocess import Preprocessing
from vitx.core.tolerance import SHARE_OF_STD
from vitx.data.open import open_images
from vitx.export.rewrite.rewrites import ImageClassifier

# Of the standard deviation of the reference's logits; below float32 the certificate's own tolerances.
ALLOWED = {"fp32": 1e-3, "fp16": SHARE_OF_STD["fp16"], "bf16": SHARE_OF_STD["bf16"]}
# uint8 (N, S, S, 3) on the device → float32 (N, C) on the device, enqueued on the current stream.
Run = Callable[[Tensor], Tensor]

assert vitx.models.registry, "registers our networks with timm"


class Unavailable(Exception):
    """Why a runtime cannot make a row."""


class Float32Logits(nn.Module):
    """uint8 (N, S, S, 3) → float32 logits, whatever `classifier` computes in."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images)
        return logits.float()


def build(name: str, weights: Path | None, *, small: bool) -> tuple[Any, Preprocessing]:
    """The network in float32 on the processor, and its preprocessing; small: its last two blocks, 64 px images."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 64} if small else {}
    model: Any = timm.create_model(name, **sizes).eval()
    if small:
        model.blocks = model.blocks[-2:]
    if weights is not None:
        model.load_state_dict(load_file(weights / f"{name}.safetensors"))
    return model, Preprocessing(image_size=64 if small else model.pretrained_cfg["input_size"][1])


def cuda_graph_run(module: Run, example: Tensor) -> Run:
    """Capture one call; a replay copies the images into the graph's own buffer first, which is in the time."""
    if example.device.type != "cuda":
        raise Unavailable("CUDA graphs need a GPU")
    buffer = example.clone()
    graph, logits = capture(lambda: module(buffer), lambda: [module(buffer) for _ in range(3)])

    def run(images: Tensor) -> Tensor:
        buffer.copy_(images)
        graph.replay()
        return logits  # type: ignore[no-any-return]  # what `module` returned

    return run


def parity(run: Run, images: Tensor, batch: int, reference: Tensor, precision: str) -> dict[str, Any]:
    """All images at this batch size against the reference; the last batch is filled from the start again."""
    rows: Any = torch.arange(-(-len(images) // batch) * batch) % len(images)
    found = torch.cat([run(images[part]).cpu().clone() for part in rows.split(batch)])[: len(images)].double()
    error = (found - reference).abs()
    share = float(error.max() / reference.std())
    return {
        "images": len(images),
        "flips": int((found.argmax(1) != reference.argmax(1)).sum()),
        "max_logit_error": float(error.max()),
        "mean_logit_error": float(error.mean()),
        "max_error_over_std": share,
        "allowed_over_std": ALLOWED[precision],
        "verdict": "pass" if share <= ALLOWED[precision] else "fail",  # NaN fails
    }


def reference_logits(model: nn.Module, preprocessing: Preprocessing, images: Tensor, device: str) -> Tensor:
    """float64 (N, C) on the processor, of the network in float32 in eager mode, 32 at a time."""
    classifier = ImageClassifier(model, preprocessing).eval().to(device)
    logits = torch.cat([classifier(part).cpu() for part in torch.split(images, 32)]).double()
    model.cpu()
    return logits


def parity_images(data: str, count: int, preprocessing: Preprocessing) -> np.ndarray:
    """The first `count` images of the evaluation split, uint8 (N, S, S, 3)."""
    found = open_images(data, "val")
    return np.stack([preprocessing.from_bytes(found.read(index)) for index in range(min(count, len(found)))])
