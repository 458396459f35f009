"""torchrun on two nodes, one of which dies: the run continues, and ends with the losses of one process."""

from pathlib import Path

import pytest

from network_nodes import Node, NotPermitted, two_namespaces, wait_for
from server_process import HANG
from training_jobs import TINY, metrics_of, recipe_of, train_one

QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"  # less waiting than the benchmark
EPOCHS = 20  # of two steps: enough for a kill in the midst of them
SETTINGS = (*TINY, f"epochs={EPOCHS}", "batch_size=8", "checkpoint_steps=1", "workers=0")


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, image_folder: Path) -> None:
    run = tmp_path / "run"
    overrides = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = (
        "train",
        "digits-deepvit",
        "--data",
        str(image_folder),
        "--out",
        str(run),
        "--resume",
        "-q",
        *overrides,
    )
    try:
        with (
            two_namespaces() as names,
            Node(names, 0, arguments, tmp_path / "first.log", QUICK) as first,
            Node(names, 1, arguments, tmp_path / "second.log", QUICK) as second,
        ):
            wait_for(run, first, lambda step, epoch, count: epoch > 1 and count == 2)
            second.kill()
            train_one(recipe_of(*SETTINGS).on_data(str(image_folder)), tmp_path / "alone", {})
            first.process.wait(HANG)
    except NotPermitted as reason:
        pytest.skip(str(reason))
    text = (tmp_path / "first.log").read_text()
    assert first.process.returncode == 0, text
    assert "error: another process has died or cannot be reached" in text
    expected, found = metrics_of(tmp_path / "alone"), metrics_of(run)
    assert len(expected) == len(found) == EPOCHS
    for before, after in zip(expected, found, strict=True):
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-4)
