"""Which checkpoint a run goes on from, which epoch is best, and when training is done."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from epoch_row import epoch_row
from vitx.analyze.metrics.trajectory import checkpoints_by_step
from vitx.core.errors import FULL_DISK, InputError
from vitx.core.files import link_atomically, write_json
from vitx.core.run import RunFolder
from vitx.models import build
from vitx.train.loop import checkpoint
from vitx.train.loop.checkpoint import (
    TENSOR_FILES,
    CheckpointTensors,
    Metrics,
    best_row,
    is_finished,
    load_newest,
    newest_checkpoint,
    read_metrics,
    read_state,
    remove_unfinished_writes,
    save_epoch,
    save_initial,
    save_within_epoch,
    switch_links,
)
from vitx.train.recipes.optimization_settings import Selection


def tensors(value: float) -> CheckpointTensors:
    model, ema, optimizer = ({"weight": torch.full((2, 3), value + part / 10)} for part in range(3))
    return CheckpointTensors(model, ema, optimizer)


def save_step(run: RunFolder, history: list[Metrics], step: int) -> None:
    save_within_epoch(run, tensors(step), history, step, {"next_batch": step % 10}, {"batches": step % 10})


def value_of(run: RunFolder) -> float:
    loaded = load_newest(run)
    assert loaded is not None
    return float(loaded[0].model["weight"][0, 0])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_layers_that_share_a_weight_are_saved_as_two(run: RunFolder) -> None:
    """CoaT's; safetensors refuses tensors of the same memory."""
    shared = torch.arange(6.0).reshape(2, 3)
    parts = CheckpointTensors(*({"first": shared, "second": shared, "own": shared[:1] + 1} for _ in TENSOR_FILES))
    save_epoch(run, parts, [epoch_row(1)], {})
    loaded = load_newest(run)
    assert loaded is not None
    for part in loaded[0]:
        assert torch.equal(part["first"], shared)
        assert torch.equal(part["second"], shared)
        assert torch.equal(part["own"], shared[:1] + 1)


def test_nothing_saved_is_nothing_to_resume(run: RunFolder) -> None:
    assert newest_checkpoint(run) is None
    assert load_newest(run) is None


def test_a_step_of_the_first_epoch_is_resumed(run: RunFolder) -> None:
    save_step(run, [], 3)
    found = newest_checkpoint(run)
    assert found is not None
    folder, state = found
    assert folder.name == "step-00000003"
    assert (state.epoch, state.step, state.best_epoch, state.best_metric, state.metrics) == (0, 3, 0, 0.0, {})
    assert (state.rng, state.trainer) == ({"next_batch": 3}, {"batches": 3})


def test_every_third_epoch_is_kept_from_the_initial_weights_on(run: RunFolder) -> None:
    save_initial(run, tensors(0))
    history: list[Metrics] = []
    for epoch in range(1, 9):
        history = [*history, epoch_row(epoch, nll=abs(epoch - 4))]
        save_epoch(run, tensors(epoch), history, {}, keep_every=3)
        save_within_epoch(run, tensors(epoch), history, 10 * epoch + 5, {}, {}, keep_every=3)
    save_initial(run, tensors(9))  # of a resumed run, which has them already
    kept = {path.name for path in (run.path / "checkpoints").glob("epoch-*")}
    assert kept == {"epoch-0000", "epoch-0003", "epoch-0004", "epoch-0006", "epoch-0008"}  # 4 is the best, 8 the last
    found = [(state.epoch, state.step) for state, _ in checkpoints_by_step(run)]
    assert found == [(0, 0), (3, 30), (4, 40), (6, 60), (8, 80)]
    assert load_file(run.path / "checkpoints/epoch-0000/model.safetensors")["weight"][0, 0] == 0


def test_a_kill_while_one_is_removed_leaves_no_half_of_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be read as a checkpoint of the run."""

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:  # else a stage that is empty
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    history = [epoch_row(1, nll=2.0)]
    save_epoch(run, tensors(1), history, {})
    history.append(epoch_row(2, nll=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_epoch(run, tensors(2), history, {})
    assert [state.epoch for state, _ in checkpoints_by_step(run)] == [2]
    shutil.copytree(run.path / "checkpoints/epoch-0002", run.path / "checkpoints/epoch-0001")  # beside the half of it
    save_epoch(run, tensors(2), history, {})
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {"last", "best", "epoch-0002"}


def test_the_step_after_the_last_epoch_is_resumed_and_not_the_epoch(run: RunFolder) -> None:
    history = [epoch_row(1)]
    save_epoch(run, tensors(10), history, {})
    save_step(run, history, 14)
    assert value_of(run) == 14
    save_step(run, history, 16)
    assert value_of(run) == 16
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {
        *("last", "best", "resume"),
        *("epoch-0001", "step-00000016"),
    }


def test_the_epoch_is_resumed_when_it_is_newer_than_a_step_that_was_not_removed(run: RunFolder) -> None:
    """Killed between the links: `last` names the new epoch, and `resume` still names a step within it."""
    save_step(run, [], 8)
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    assert not (run.path / "checkpoints" / "resume").is_symlink(), "an epoch's end replaces the checkpoint within it"
    save_step(run, [], 8)
    assert value_of(run) == 10


def test_of_two_with_as_many_steps_the_finished_epoch_is_resumed(run: RunFolder) -> None:
    """A step checkpoint of the last batch has neither the evaluation nor the epoch's metrics."""
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    save_step(run, [], 10)
    found = newest_checkpoint(run)
    assert found is not None
    assert (found[0].name, found[1].epoch) == ("epoch-0001", 1)


@pytest.mark.parametrize("link", ["last", "resume"])
def test_a_link_that_leads_nowhere_is_named(run: RunFolder, link: str) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    save_step(run, [epoch_row(1)], 14)
    path = run.path / "checkpoints" / link
    path.unlink()
    path.symlink_to("epoch-0009")
    with pytest.raises(InputError, match=r"checkpoints/epoch-0009/state\.json does not exist"):
        load_newest(run)


@pytest.mark.parametrize("name", TENSOR_FILES)
def test_a_file_that_is_not_the_one_that_was_saved_is_named(run: RunFolder, name: str) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    save_file(tensors(11).model, run.path / "checkpoints" / "last" / name)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_newest(run)


def test_each_file_holds_its_own_tensors(run: RunFolder) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {"seed": 3}, {"scaler": 1})
    loaded = load_newest(run)
    assert loaded is not None
    found, state = loaded
    assert [sorted(set(part["weight"].flatten().tolist())) for part in found] == [
        pytest.approx([10.0]),
        pytest.approx([10.1]),
        pytest.approx([10.2]),
    ]
    assert (state.rng, state.trainer, state.metrics) == ({"seed": 3}, {"scaler": 1}, epoch_row(1))


def test_weights_may_be_read_by_whom_the_umask_lets(run: RunFolder) -> None:
    """safetensors writes files that nobody but their owner may read."""
    for epoch, mask in ((1, 0o022), (2, 0o027)):
        before = os.umask(mask)
        try:
            save_epoch(run, tensors(1), [epoch_row(number + 1) for number in range(epoch)], {}, {})
        finally:
            os.umask(before)
        saved = list((run.path / "checkpoints" / "last").glob("*.safetensors"))
        assert [path.stat().st_mode & 0o777 for path in saved] == [0o666 & ~mask] * 3


def test_the_best_epoch_is_linked_by_the_metric_that_was_asked_for(run: RunFolder) -> None:
    history: list[Metrics] = []
    for epoch, (top1, nll) in enumerate([(0.5, 0.9), (0.6, 0.7), (0.8, 0.8)], 1):
        history.append(epoch_row(epoch, top1=top1, nll=nll))
        save_epoch(run, tensors(epoch), history, {}, metric="nll")
    checkpoints = run.path / "checkpoints"
    assert (checkpoints / "best").readlink() == Path("epoch-0002")
    assert (checkpoints / "last").readlink() == Path("epoch-0003")
    loaded = load_newest(run)
    assert loaded is not None
    assert (loaded[1].best_epoch, loaded[1].best_metric, loaded[1].step) == (2, 0.7, 30)
    assert {path.name for path in checkpoints.iterdir()} == {"best", "last", "epoch-0002", "epoch-0003"}
    assert read_metrics(run.metrics_path, 3) == history


@pytest.mark.parametrize(
    ("rows", "metric", "best"),
    [
        ([epoch_row(1, top1=0.9), epoch_row(2, top1=0.9)], "top1", 1),
        ([epoch_row(1, top1=0.9, nll=0.5), epoch_row(2, top1=0.9, nll=0.4)], "top1", 2),
        ([epoch_row(1, ece=0.2, nll=0.5), epoch_row(2, ece=0.2, nll=0.4), epoch_row(3, ece=0.1, nll=9.0)], "ece", 3),
        ([epoch_row(1, ece=0.2, nll=0.5), epoch_row(2, ece=0.2, nll=0.4)], "ece", 2),
        ([epoch_row(1, nll=0.4, top1=0.1), epoch_row(2, nll=0.4, top1=0.9)], "nll", 1),
    ],
)
def test_ties_go_to_the_lowest_nll_then_to_the_first(rows: list[Metrics], metric: Any, best: int) -> None:
    assert best_row(rows, metric)["epoch"] == best


@pytest.mark.parametrize(
    ("top1", "epochs", "patience", "finished"),
    [
        ([], 1, 1, False),
        ([0.5], 2, 0, False),
        ([0.5, 0.6], 2, 0, True),
        ([0.5, 0.4], 9, 2, False),  # one epoch since the best
        ([0.5, 0.4, 0.4], 9, 2, True),
        ([0.5, 0.4, 0.6], 9, 2, False),  # the best is the last
        ([0.5, 0.5, 0.5], 9, 2, True),  # equal is not better
        ([0.5, 0.4, 0.3, 0.2], 9, 0, False),  # without patience all epochs are trained
    ],
)
def test_training_ends_after_its_epochs_or_its_patience(
    top1: list[float], epochs: int, patience: int, finished: bool
) -> None:
    history = [epoch_row(epoch, top1=value) for epoch, value in enumerate(top1, 1)]
    assert is_finished(history, epochs, Selection(patience=patience)) is finished


def test_a_step_keeps_the_best_of_the_epochs_before_it(run: RunFolder) -> None:
    history = [epoch_row(1, nll=0.5), epoch_row(2, nll=0.7)]
    save_within_epoch(run, tensors(1), history, 24, {}, {}, metric="nll")
    found = newest_checkpoint(run)
    assert found is not None
    state = found[1]
    assert (state.epoch, state.step, state.best_epoch, state.best_metric, state.metrics) == (
        2,
        24,
        1,
        0.5,
        epoch_row(2, nll=0.7),
    )


def test_an_epoch_without_a_trainers_state_has_an_empty_one(run: RunFolder) -> None:
    save_epoch(run, tensors(1), [epoch_row(1)], {})
    found = newest_checkpoint(run)
    assert found is not None
    assert (found[1].trainer, found[1].rng) == ({}, {})


def test_a_checkpoint_on_disk_holds_no_more_than_the_tensors(run: RunFolder) -> None:
    """A view is written as what it shows, and a parameter without its graph."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    save_epoch(run, CheckpointTensors({"t": weight.t()}, {"t": weight * 2}, {}), [epoch_row(1)], {})
    loaded = load_newest(run)
    assert loaded is not None
    assert loaded[0].model["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded[0].ema["t"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert loaded[0].optimizer == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Error: I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("Error: I/O error: File too large (os error 27)", errno.EFBIG),
        ("Error: something else", errno.EIO),
    ],
)
def test_a_disk_error_of_safetensors_is_the_systems(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, text: str, number: int
) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {})

    def fails(*_: object) -> None:
        raise SafetensorError(text)

    monkeypatch.setattr(build, "save_file", fails)
    with pytest.raises(OSError) as error:  # noqa: PT011 # its number is looked at
        save_epoch(run, tensors(20), [epoch_row(1), epoch_row(2)], {})
    assert error.value.errno == number
    # A full disk is told of the checkpoint, as the folder that it was written into is gone.
    assert str(error.value.filename).endswith("epoch-0002" if number in FULL_DISK else "model.safetensors")
    assert error.value.strerror
    assert value_of(run) == 10
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {"last", "best", "epoch-0001"}


def test_what_killed_writers_left_goes_and_nothing_else(run: RunFolder) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    save_step(run, [epoch_row(1)], 14)
    checkpoints = run.path / "checkpoints"
    (run.path / ".metrics.jsonl.x1").touch()
    for link in ("last", "best", "resume"):
        (checkpoints / f".{link}.123").symlink_to("epoch-0009")
    (run.path / ".notes").touch()
    before = {path.name for path in checkpoints.iterdir()}
    remove_unfinished_writes(run)
    assert {path.name for path in run.path.iterdir()} == {".notes", "metrics.jsonl", "checkpoints"}
    assert {path.name for path in checkpoints.iterdir()} == {name for name in before if not name.startswith(".")}
    assert value_of(run) == 14


def test_only_folders_without_a_link_are_removed(run: RunFolder) -> None:
    save_epoch(run, tensors(10), [epoch_row(1)], {})
    checkpoints = run.path / "checkpoints"
    (checkpoints / "epoch-0007").mkdir()
    (checkpoints / "epoch-0007" / "state.json").touch()
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / "elsewhere").symlink_to(run.path, target_is_directory=True)
    found = newest_checkpoint(run)
    assert found is not None
    switch_links(run, found[1])
    assert {path.name for path in checkpoints.iterdir()} == {"last", "best", "epoch-0001", "notes.txt", "elsewhere"}


def test_metrics_are_a_line_of_json_an_epoch_and_later_ones_are_left_out(run: RunFolder) -> None:
    history = [epoch_row(1, top1=0.25), epoch_row(2), epoch_row(3)]
    checkpoint.write_metrics(run, history)
    assert run.metrics_path.read_text() == "".join(json.dumps(each) + "\n" for each in history)
    assert read_metrics(run.metrics_path, 2) == history[:2]
    assert read_metrics(run.path / "none.jsonl", 0) == []
    with pytest.raises(
        InputError, match=r"metrics\.jsonl does not hold the epochs 1 to 4 of its checkpoint: restore it"
    ):
        read_metrics(run.metrics_path, 4)
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoint.write_metrics(run, [epoch_row(1, nll=float("nan"))])
    assert read_metrics(run.metrics_path, 3) == history, "a file that is not whole never appears"


LINE = json.dumps(epoch_row(1)).encode()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"not json", "JSON: Invalid JSON"),
        (b"[]", "JSON: Input should be"),
        (b'{"top1": 1}', "top5: Field required"),
        (b'{"epoch": "1"}', "top1: Field required"),
        (LINE[:-1], "JSON: Invalid JSON"),
        (LINE[:20] + b"\xf4" + LINE[21:], "JSON: Invalid JSON"),
        (LINE.replace(b'"nll"', b'"nln"', 1), "nll: Field required"),
        (LINE.replace(b'"top1": 0.5', b'"top1": "0.5"', 1), "top1: Input should be a valid number"),
        (LINE.replace(b'"losses": {', b'"losses": {"a": [],'), "losses.a: Input should be a valid number"),
        (LINE.replace(b'"seconds": 1.0', b'"seconds": NaN'), "seconds: Input should be a finite number"),
        (b"[" * 100_000, "JSON: Invalid JSON"),
    ],
)
def test_a_line_that_is_no_epoch_is_named(run: RunFolder, text: bytes, what: str) -> None:
    run.metrics_path.write_bytes(text + b"\n")
    said = rf"metrics\.jsonl holds a line that is not an epoch's metrics \({what}.*: restore it, or"
    with pytest.raises(InputError, match=said):
        read_metrics(run.metrics_path, 1)


def test_a_copy_without_its_links_is_not_trained_again(run: RunFolder) -> None:
    """As object stores, zip files and `cp -r -L` make copies."""
    for epoch in (1, 2):
        save_epoch(run, tensors(epoch), [epoch_row(each) for each in range(1, epoch + 1)], {})
    last = run.path / "checkpoints" / "last"
    last.unlink()
    with pytest.raises(InputError, match=r"checkpoints/last is missing: copy the run again with its links"):
        newest_checkpoint(run)
    shutil.copytree(run.path / "checkpoints" / "epoch-0002", last)
    with pytest.raises(InputError, match=r"checkpoints/last is no link: copy the run again with its links"):
        newest_checkpoint(run)


def test_a_checkpoint_is_beside_its_link(run: RunFolder, tmp_path: Path) -> None:
    for path, value in ((run.path, 1), (tmp_path / "other", 2)):
        save_epoch(RunFolder(path), tensors(value), [epoch_row(1)], {})
    link_atomically(run.path / "checkpoints" / "last", str(tmp_path / "other" / "checkpoints" / "epoch-0001"))
    assert value_of(run) == pytest.approx(1)


def test_every_file_has_a_digest_or_is_not_loaded(run: RunFolder) -> None:
    save_epoch(run, tensors(1), [epoch_row(1)], {})
    folder, state = read_state(run, "last")
    write_json(folder / "state.json", state.model_copy(update={"sha256": {}}))
    with pytest.raises(InputError, match=r"model\.safetensors is corrupt"):
        load_newest(run)
