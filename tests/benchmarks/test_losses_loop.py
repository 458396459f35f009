"""The loop that benchmarks/train/losses.py measures takes every step of every epoch."""

from pathlib import Path

import pytest
import torch
from losses import take_epoch

from training_jobs import TINY, recipe_of
from vitx.core.run import RunFolder
from vitx.train.loop.distributed.processes import Processes
from vitx.train.loop.trainer import Trainer


def test_each_epoch_has_all_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(*TINY, "batch_size=400", "workers=0")
    trainer = Trainer(recipe, RunFolder(tmp_path), torch.device("cpu"), Processes(), skip_bad=False, quiet=True)
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(trainer, "step", lambda epoch, batch: taken.append((epoch, batch.number)))
    for epoch in (1, 2, 3):
        take_epoch(trainer, epoch)
    assert trainer.data.steps == 3
    assert taken == [(epoch, number) for epoch in (1, 2, 3) for number in range(3)]
