"""A run folder whose network is the function of bundle_fixture's graph, written in torch."""

from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bundle_fixture import BIAS, LABELS, PREPROCESSING, WEIGHT
from vitx.core.files import link_atomically, sha256_file, write_json
from vitx.core.run import CheckpointState, ModelSpec, RunFolder, RunInfo

MODEL = "colour_mean"


class ColourMean(nn.Module):
    """(B, 3, S, S) normalised → (B, C): a linear map of the mean over space."""

    def __init__(self, num_classes: int = len(LABELS), **_: Any) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.mean(dim=(2, 3)))
        return logits


def colour_mean(pretrained: bool = False, **kwargs: Any) -> ColourMean:
    return ColourMean(num_classes=kwargs["num_classes"])


if MODEL not in timm.list_models():
    timm.models.register_model(colour_mean)


def write_run(path: Path, data: str, *, bias_change: float = 0.0) -> RunFolder:
    """Write a run with averaged weights that are the graph's; `bias_change` is added to its first class."""
    weight, bias = torch.from_numpy(WEIGHT.T.copy()), torch.from_numpy(BIAS.copy())
    bias[0] += bias_change
    folder = path / "checkpoints" / "epoch-0001"
    folder.mkdir(parents=True)
    save_file({"head.weight": torch.zeros_like(weight), "head.bias": bias}, folder / "model.safetensors")
    save_file({"head.weight": weight, "head.bias": bias}, folder / "ema.safetensors")
    write_json(
        folder / "state.json",
        CheckpointState(
            epoch=1,
            step=1,
            best_metric=0.0,
            best_epoch=1,
            sha256={name: sha256_file(folder / name) for name in ("model.safetensors", "ema.safetensors")},
        ),
    )
    for link in ("best", "last"):
        link_atomically(path / "checkpoints" / link, "epoch-0001")
    info = RunInfo(
        name=path.name,
        recipe="tests",
        model=ModelSpec(name=MODEL, num_classes=len(LABELS)),
        class_names=LABELS,
        preprocessing=PREPROCESSING,
        data=data,
        seed=0,
    )
    write_json(path / "run.json", info)
    return RunFolder.open(path)
