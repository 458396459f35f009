"""Two processes that train one network compute what one process does with the whole batch."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server_process import free_port
from training_jobs import (
    TINY,
    losses_of_ten_steps,
    metrics_of,
    recipe_of,
    start_all,
    train_one,
    train_one_of,
)
from vitx.core.errors import InputError
from vitx.train.loop.distributed.processes import launcher

SMALL = (*TINY, "epochs=1", "batch_size=32")


def losses(count: int, folder: Path, *overrides: str) -> Tensor:
    """The loss of ten steps, the mean over `count` processes."""
    folder.mkdir()
    start_all(losses_of_ten_steps, count, count, free_port(), recipe_of(*SMALL, *overrides), folder)
    return torch.stack([torch.load(folder / f"{rank}.pt") for rank in range(count)]).mean(dim=0)


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """The loss of ten steps of one process, computed once for the same overrides."""
    return functools.cache(lambda *overrides: losses(1, tmp_path_factory.mktemp("alone") / "one", *overrides))


# Re-Attention with CutMix, every token loss and clipping; whole passes and accumulated ones.
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.accumulate=2", 'model.kwargs.attention=["plain","talking-heads"]'),
        ("execution.parallel=fsdp",),
    ],
    ids=["ddp", "accumulated", "fsdp"],
)
def test_ten_steps_of_two_processes_are_those_of_one(
    tmp_path: Path, losses_of_one: Callable[..., Tensor], overrides: tuple[str, ...]
) -> None:
    alone = [text for text in overrides if not text.startswith(("execution", "optimizer"))]
    expected = losses_of_one(*alone)
    found = losses(2, tmp_path / "two", *overrides)
    assert expected[0] != expected[9]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_run_of_two_processes_is_written_once_and_resumes(tmp_path: Path, image_folder: Path) -> None:
    """All of `train`: each process evaluates a part, one writes, both resume from its checkpoint."""
    small = recipe_of(*TINY, "epochs=2", "batch_size=8", "checkpoint_steps=1").on_data(str(image_folder))
    train_one(small, tmp_path / "one", {})
    start_all(train_one_of, 2, 2, free_port(), small, tmp_path / "two")
    before = (tmp_path / "two" / "metrics.jsonl").read_bytes()
    one, two = (metrics_of(tmp_path / run)[1] for run in ("one", "two"))
    assert one.keys() == two.keys()
    assert two["top1"] == one["top1"]
    for name in ("nll", "cos_sim", "losses"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)
    start_all(train_one_of, 2, 2, free_port(), small, tmp_path / "two", True)
    assert (tmp_path / "two" / "metrics.jsonl").read_bytes() == before


def test_fsdp_alone_and_unequal_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"execution\.parallel=fsdp .* start them with torchrun"):
        train_one(recipe_of(*SMALL, "execution.parallel=fsdp"), tmp_path / "run", {})
    with pytest.raises(InputError, match="a batch of 32 images cannot be cut into 3 parts"):
        train_one(recipe_of(*SMALL, "optimizer.accumulate=3"), tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "started"),
    [
        ({}, "vitx"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc-per-node 2 -m vitx"),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            "torchrun --nnodes 2 --nproc-per-node 4 -m vitx",
        ),
    ],
)
def test_a_run_is_resumed_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], started: str
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert " ".join(launcher()) == started
