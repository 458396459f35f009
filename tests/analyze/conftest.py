"""Runs to analyse: small DeepViTs on the digits, random weights, and the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from run_fixture import DIGITS_PREPROCESSING, SMALL_DEEPVIT
from vitx.core.files import link_atomically, sha256_file, write_json
from vitx.core.run import CheckpointState, RunInfo
from vitx.models import build_model


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """(name, seed) → a run folder whose checkpoint has random weights."""

    def make(name: str, seed: int) -> Path:
        path = tmp_path_factory.mktemp("runs") / name
        folder = path / "checkpoints" / "epoch-0000"
        folder.mkdir(parents=True)
        torch.manual_seed(seed)
        save_file(build_model(SMALL_DEEPVIT).state_dict(), folder / "model.safetensors")
        digests = {"model.safetensors": sha256_file(folder / "model.safetensors")}
        state = CheckpointState(epoch=0, step=0, best_metric=0.0, best_epoch=0, sha256=digests)
        write_json(folder / "state.json", state)
        for link in ("best", "last"):
            link_atomically(folder.parent / link, folder.name)
        info = RunInfo(
            name=name,
            recipe="digits-deepvit",
            model=SMALL_DEEPVIT,
            class_names=tuple("0123456789"),
            preprocessing=DIGITS_PREPROCESSING,
            data="digits",
            seed=seed,
        )
        write_json(path / "run.json", info)
        return path

    return make
