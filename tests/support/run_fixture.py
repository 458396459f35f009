"""Run folders: one whose network is the function of bundle_fixture's graph, and one that has learned the digits."""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bundle_fixture import BIAS, LABELS, PREPROCESSING, WEIGHT
from vitx.core.files import link_atomically, sha256_file, write_json
from vitx.core.preprocess import Preprocessing
from vitx.core.run import CheckpointState, ModelSpec, RunFolder, RunInfo
from vitx.data.open import open_images
from vitx.models import build_model, image_tensor
from vitx.models.source import Source

MODEL = "colour_mean"
DIGITS_PREPROCESSING = Preprocessing(image_size=32)
SMALL_DEEPVIT = ModelSpec(
    name="deepvit_digits",
    num_classes=10,
    kwargs={
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 3,
        "attention": ["plain", "re-attention", "re-attention"],
        # As in the recipe: digits differ by where their ink is, so positions start as large as the patch embedding.
        "weight_init": "jax",
        "position_std": 0.5,
    },
)
EPOCHS, STEPS = 6, 23
# tests/conftest.py names a folder there that all processes of a run of the tests share.
SHARED_FOLDER = "VITX_TESTS_SHARED_FOLDER"


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
    """Write a run whose averaged weights are those of the graph; `bias_change` is added to the bias of class 0."""
    weight, bias = torch.from_numpy(WEIGHT.T.copy()), torch.from_numpy(BIAS.copy())
    bias[0] += bias_change
    files = {
        "model.safetensors": {"head.weight": torch.zeros_like(weight), "head.bias": bias},
        "ema.safetensors": {"head.weight": weight, "head.bias": bias},
    }
    info = RunInfo(
        name=path.name,
        recipe="tests",
        model=ModelSpec(name=MODEL, num_classes=len(LABELS)),
        class_names=LABELS,
        preprocessing=PREPROCESSING,
        data=data,
        seed=0,
    )
    return _written(path, info, files)


def write_trained_run(path: Path, change: Callable[[Any], None] = lambda model: None) -> RunFolder:
    """Write a run of a small DeepViT (about 85 % top-1 on the digits), after `change` was applied to its network."""
    info = RunInfo(
        name=path.name,
        recipe="digits-deepvit",
        model=SMALL_DEEPVIT,
        class_names=tuple("0123456789"),
        preprocessing=DIGITS_PREPROCESSING,
        data="digits",
        seed=0,
    )
    model = deepcopy(trained_deepvit())
    change(model)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    return _written(path, info, {"model.safetensors": weights})


@cache
def trained_deepvit() -> Any:
    """The network of that run, seed 0, in evaluation mode. Cached for all tests of a process: change a copy only.

    One process of a run of the tests trains it; the others wait and read its weights.
    """
    folder = os.environ.get(SHARED_FOLDER)
    if folder is None:
        return _train_deepvit()
    file = Path(folder) / "trained_deepvit.safetensors"
    with FileLock(file.with_suffix(".lock")):
        if not file.is_file():
            save_file(_train_deepvit().state_dict(), file)
        model = build_model(SMALL_DEEPVIT).eval()
        model.load_state_dict(load_file(file))
    return model


def _train_deepvit() -> Any:
    digits = open_images("digits", "train")
    images = np.concatenate(list(digits.batches(DIGITS_PREPROCESSING, 256)))
    labels = torch.from_numpy(digits.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = build_model(SMALL_DEEPVIT).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=EPOCHS * STEPS)
        for _ in range(EPOCHS):
            for index in torch.chunk(torch.randperm(len(images)), STEPS):
                p = DIGITS_PREPROCESSING
                logits = model(image_tensor(images[index.numpy()], p.mean, p.std))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(logits, labels[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return model.eval()


def _written(path: Path, info: RunInfo, files: Mapping[str, Mapping[str, Tensor]]) -> RunFolder:
    folder = path / "checkpoints" / "epoch-0001"
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name)
    digests = {name: sha256_file(folder / name) for name in files}
    state = CheckpointState(epoch=1, step=1, best_metric=0.0, best_epoch=1, sha256=digests)
    write_json(folder / "state.json", state)
    for link in ("best", "last"):
        link_atomically(path / "checkpoints" / link, "epoch-0001")
    write_json(path / "run.json", info)
    return RunFolder.open(path)


def digits_source(name: str, model: nn.Module) -> Source:
    """A network of `trained_deepvit`'s kind, as an analysis takes it."""
    return Source(
        name=name,
        model=model,
        spec=SMALL_DEEPVIT,
        class_names=tuple("0123456789"),
        preprocessing=DIGITS_PREPROCESSING,
        data="digits",
        checkpoint="tests",
        checkpoint_sha256="0" * 64,
    )
