"""The loop around the steps, with stand-ins for network, data and disk: what is done when, and with which numbers."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from training_jobs import recipe_of
from vitx.core.errors import CheckFailed
from vitx.core.probabilities import wilson_interval
from vitx.core.run import RunFolder
from vitx.train.loop import trainer as module
from vitx.train.loop.checkpoint import CheckpointTensors
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.evaluation import Evaluation
from vitx.train.loop.interruption import StopRequest, TrainingStopped
from vitx.train.loop.optimization import OptimizerState
from vitx.train.loop.result import TrainingResult, describe_epoch
from vitx.train.loop.step import EpochLog
from vitx.train.loop.trainer import Trainer

CPU = torch.device("cpu")
ROW: dict[str, Any] = {
    "epoch": 1,
    "step": 4,
    "lr": 0.001234,
    "losses": {"classification": 1.5, "total": 2.25},
    "top1": 0.5,
    "nll": 1.25,
    "ece": 0.1,
    "brier": 0.2,
    "cos_sim": [0.1],
    "attention_std": [0.2],
    "seconds": 1.26,
}


def bare(*overrides: str, processes: Processes = ALONE, steps: int = 4, **attributes: Any) -> Any:
    """A trainer that nothing was built for."""
    trainer: Any = object.__new__(Trainer)
    model = nn.Linear(2, 2)
    made: dict[str, Any] = {
        "recipe": recipe_of(*overrides),
        "processes": processes,
        "device": CPU,
        "quiet": True,
        "history": [],
        "batches_done": 0,
        "model": model,
        "objective": model,
        "ema": SimpleNamespace(module=nn.Linear(2, 2), update=lambda *given, **named: None),
        "data": SimpleNamespace(steps=steps, batch_size=5, calibration_batches=lambda preprocessing: ["some images"]),
        "schedule": SimpleNamespace(step_update=lambda step: None),
        "log": EpochLog(steps, CPU),
        "stage": recipe_of(*overrides).stage(1),
        "run": SimpleNamespace(path="RUN"),
        "optimizer": SimpleNamespace(param_groups=[{"lr": 0.25}, {"lr": 0.5}, {"lr": 0.125}]),
        "stepper": SimpleNamespace(scaler=SimpleNamespace(is_enabled=lambda: False)),
        "val_images": range(4),
        "_new_step_log": lambda: nullcontext(),
    }
    trainer.__dict__.update({**made, **attributes})
    return trainer


class Two(Processes):
    """Process `rank` of two; the other has `other` where this one has a value."""

    def __init__(self, other: Any, rank: int = 0) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "other", other)

    def gather(self, value: Any) -> list[Any]:
        other = self.other  # type: ignore[attr-defined]
        return [value, other] if self.rank == 0 else [other, value]

    def barrier(self) -> None:
        pass


def test_the_summary_of_a_run_is_that_of_its_best_epoch() -> None:
    history = [
        {**ROW, "epoch": 1, "top1": 0.75, "nll": 1.0, "seconds": 1.26},
        {**ROW, "epoch": 2, "top1": 0.5, "nll": 0.5, "seconds": 2.03},
    ]
    result = TrainingResult(RunFolder("somewhere"), history, 0, 4)
    found = result.summary("top1")
    assert found == {
        "run": "somewhere",
        "epochs": 2,
        "best_epoch": 1,
        "top1": 0.75,
        "nll": 1.0,
        "ece": 0.1,
        "cos_sim": [0.1],
        "attention_std": [0.2],
        "images": 4,
        "top1_interval": wilson_interval(3, 4),
        "last_top1": 0.5,
        "seconds": 3.3,
    }
    assert result.summary("nll")["best_epoch"] == 2


def test_an_epoch_in_one_line() -> None:
    assert describe_epoch(ROW, 12) == (
        "epoch 1/12: top-1 50.00% NLL 1.2500 (classification 1.500 total 2.250) lr 0.0012 1.3 s"
    )


class Steps:
    """Stands in for the batches and steps of an epoch."""

    def __init__(self, trainer: Any, first: int = 0) -> None:
        self.taken: list[int] = []
        self.trainer, self.first = trainer, first
        trainer.batches = self.batches
        trainer.step = self.step

    def batches(self, epoch: int) -> Iterator[Any]:
        for number in range(self.first, self.trainer.data.steps):
            yield SimpleNamespace(number=number)

    def step(self, epoch: int, batch: Any) -> None:
        assert self.trainer.model.training
        self.taken.append(batch.number)
        self.trainer.log.add(batch.number, {"total": torch.tensor(2.0 + batch.number)}, torch.tensor(1.0))


def test_an_epoch_takes_all_steps_and_means_their_losses() -> None:
    trainer = bare()
    trainer.model.eval()
    steps = Steps(trainer)
    trainer.log.add(3, {"total": torch.tensor(100.0)}, torch.tensor(1.0))
    assert trainer._optimize(1, StopRequest()) == {"total": (100 + 2 + 3 + 4 + 5) / 4}
    assert steps.taken == [0, 1, 2, 3]
    assert trainer.batches_done == 4, "until the epoch is evaluated too"
    both = bare(processes=Two({"total": 6.0}))
    both._check_finite = lambda epoch: None
    both._stop_signal = lambda request: 0
    Steps(both)
    assert both._optimize(1, StopRequest()) == {"total": (2 + 3 + 4 + 5 + 6) / 8}


@pytest.mark.parametrize(("checkpoint_steps", "saved"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (6, [])])
def test_checkpoints_within_an_epoch_come_every_so_many_steps(checkpoint_steps: int, saved: list[int]) -> None:
    """Not after the last step, which ends the epoch and is saved as that."""
    trainer = bare(f"checkpoint_steps={checkpoint_steps}", steps=6)
    Steps(trainer)
    found: list[Any] = []
    trainer._save_within_epoch = lambda epoch: found.append((epoch, trainer.batches_done))
    trainer._optimize(3, StopRequest())
    assert found == [(3, number) for number in saved]


@pytest.mark.parametrize(("count", "stopped_after"), [(1, 3), (2, 8)])
def test_a_signal_stops_after_the_step_under_way(count: int, stopped_after: int) -> None:
    """Several processes exchange it every eighth step."""
    request = StopRequest()
    trainer = bare(steps=20, processes=ALONE if count == 1 else Two(0))
    steps = Steps(trainer)
    saved: list[int] = []
    trainer._save_within_epoch = saved.append
    take = steps.step

    def step(epoch: int, batch: Any) -> None:
        take(epoch, batch)
        if batch.number == 2:
            request.signal = int(signal.SIGTERM)

    trainer.step = step
    with pytest.raises(TrainingStopped, match="stopped by SIGTERM"):
        trainer._optimize(5, request)
    assert (len(steps.taken), saved, trainer.batches_done) == (stopped_after, [5], stopped_after)


def test_a_signal_of_any_process_is_one_for_all() -> None:
    for own, other, expected in ((0, 0, 0), (15, 0, 15), (0, 2, 2)):
        assert bare(processes=Two(other))._stop_signal(SimpleNamespace(signal=own)) == expected


def test_losses_are_checked_every_fifty_steps_and_at_the_end() -> None:
    trainer = bare(steps=120)
    Steps(trainer)
    checked: list[int] = []
    trainer._check_finite = lambda epoch: checked.append(trainer.batches_done)
    trainer._optimize(1, StopRequest())
    assert checked == [50, 100, 120]


def test_the_bar_is_moved_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    clock = iter([10.0, 10.0, 10.05, 10.0999, 10.2, 10.2, 10.3001, 10.3001])

    @contextmanager
    def bar(title: str, total: int, *, quiet: bool = False) -> Iterator[Any]:
        shown.append((title, total, quiet))
        yield SimpleNamespace(update=lambda *moved: shown.append(moved))

    monkeypatch.setattr(module, "progress", bar)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer = bare("epochs=7", steps=5)
    trainer.step_log = SimpleNamespace(note="loss 2", begin_epoch=lambda: None)
    Steps(trainer)
    trainer._optimize(2, StopRequest())
    assert shown == [("epoch 2/7", 5, True), (1, "loss 2"), (4, "loss 2"), (5, "loss 2")]


def test_a_loss_that_is_not_finite_names_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(module, "save_failed_batch", lambda *given: saved.append(given) or "RUN/failed")  # type: ignore[func-returns-value]
    trainer = bare("optimizer.lr=0.004", "optimizer.clip=2")
    trainer._check_finite(3)
    trainer.log.add(2, {}, torch.tensor(math.nan))
    with pytest.raises(CheckFailed) as failed:
        trainer._check_finite(3)
    assert str(failed.value) == (
        "the loss or its gradient is not finite at batch 2 in epoch 3: lower optimizer.lr (0.004) or optimizer.clip "
        "(2); its images are in 'RUN/failed', and what was saved before is kept"
    )
    assert saved == [(trainer.run, trainer.data, 3, 2)]
    trainer.processes = Two([1], rank=1)
    with pytest.raises(CheckFailed, match=r"at batch 1 in epoch 3: .* its images are in ''"):
        trainer._check_finite(3)
    assert len(saved) == 1, "one process writes"
    trainer.log = EpochLog(4, CPU)
    with pytest.raises(CheckFailed, match="at batch 1 in epoch 3"):
        trainer._check_finite(3)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is saved, with plain words in place of tensors."""
    saved: list[Any] = []
    monkeypatch.setattr(module, "optimizer_state", lambda optimizer, model: OptimizerState({"o": 1}, {"n": 2}))  # type: ignore[dict-item]
    monkeypatch.setattr(module, "gathered_state", lambda model: {"of": model})
    for name in ("save_epoch", "save_within_epoch"):
        monkeypatch.setattr(module, name, lambda *given, name=name, **named: saved.append((name, list(given), named)))
    return saved


def test_what_a_checkpoint_holds(state: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 12.5))
    trainer = bare("seed=7", "selection.metric=nll", "keep_every=5", history=[ROW], batches_done=3, started=10.0)
    trainer.log.add(0, {"total": torch.tensor(2.0)}, torch.tensor(1.0))
    tensors = CheckpointTensors({"of": trainer.model}, {"of": trainer.ema.module}, {"o": 1})  # type: ignore[dict-item]
    trainer._save()
    trainer._save_within_epoch(2)
    assert state == [
        (
            "save_epoch",
            [trainer.run, tensors, [ROW], {"seed": 7, "next_epoch": 2}, {"optimizer": {"n": 2}}],
            {"metric": "nll", "keep_every": 5},
        ),
        (
            "save_within_epoch",
            [
                *(trainer.run, tensors, [ROW], 4 + 3, {"seed": 7, "next_epoch": 2, "next_batch": 3}),
                {"optimizer": {"n": 2}, "batches": 3, "losses": [{"total": 2.0}], "seconds": 2.5},
            ],
            {"metric": "nll", "keep_every": 5},
        ),
    ]
    scaler = SimpleNamespace(is_enabled=lambda: True, state_dict=lambda: {"scale": 2})
    trainer.stepper = SimpleNamespace(scaler=scaler)
    assert trainer._state()[1] == {"optimizer": {"n": 2}, "scaler": {"scale": 2}}
    state.clear()
    trainer.processes = Two({"total": 1.0}, rank=1)
    trainer._check_finite = lambda epoch: None
    trainer._save()
    trainer._save_within_epoch(2)
    assert state == [], "the first process writes"
    checked: list[int] = []
    trainer.processes = ALONE
    trainer._check_finite = checked.append
    trainer._save_within_epoch(2)
    assert checked == [2]


@pytest.mark.parametrize("batches", [0, 3])
def test_the_progress_of_an_epoch_comes_back(batches: int) -> None:
    trainer = bare()
    saved = {"batches": batches, "losses": [{"total": 2.5}], "seconds": 1.5} if batches else {}
    trainer._restore_epoch_progress(SimpleNamespace(trainer=saved))
    assert (trainer.batches_done, trainer.seconds_before) == (batches, 1.5 if batches else 0)
    assert trainer.log.totals() == ({"total": 2.5} if batches else {})
    assert len(trainer.log.checked_totals) == 4
    second = bare(processes=Processes(1, 2))
    both = {"batches": 1, "losses": [{"total": 2.5}, {"total": 4.5}]}  # of an older version, without seconds
    second._restore_epoch_progress(SimpleNamespace(trainer=both))
    assert (second.log.totals(), second.seconds_before) == ({"total": 4.5}, 0)


@pytest.mark.parametrize(("loaded", "batches"), [(False, 0), (True, 0), (True, 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_restored(monkeypatch: pytest.MonkeyPatch, loaded: bool, batches: int, rank: int) -> None:
    done: list[Any] = []
    tensors = CheckpointTensors("model", "ema", "optimizer")  # type: ignore[arg-type]
    losses = {"batches": batches, "losses": [{}, {}]} if batches else {}
    state = SimpleNamespace(epoch=3, trainer={"optimizer": {"n": 2}, "scaler": {"scale": 8}, **losses})
    scaler = SimpleNamespace(is_enabled=lambda: True, load_state_dict=lambda value: done.append(("scaler", value)))
    run = SimpleNamespace(path="RUN", metrics_path="METRICS")
    trainer = bare("keep_every=5", processes=Two(None, rank), run=run, stepper=SimpleNamespace(scaler=scaler))
    monkeypatch.setattr(module, "load_newest", lambda run: (tensors, state) if loaded else None)
    monkeypatch.setattr(module, "read_metrics", lambda path, epochs: [path, epochs])
    for name in (
        "remove_unfinished_writes",
        "write_metrics",
        "switch_links",
        "load_gathered_state",
        "restore_optimizer",
    ):
        monkeypatch.setattr(module, name, lambda *given, name=name: done.append((name, *given)))
    trainer._restore()
    writes = [("remove_unfinished_writes", run)] if rank == 0 else []
    if not loaded:
        assert done == [*writes, *([("write_metrics", run, [])] if rank == 0 else [])]
        return
    links = [("switch_links", run, state, 5)] if not batches else []
    assert done == [
        *writes,
        ("load_gathered_state", trainer.model, "model"),
        ("load_gathered_state", trainer.ema.module, "ema"),
        ("restore_optimizer", trainer.optimizer, trainer.model, OptimizerState("optimizer", {"n": 2})),  # type: ignore[arg-type]
        ("scaler", {"scale": 8}),
        *([("write_metrics", run, ["METRICS", 3]), *links] if rank == 0 else []),
    ]
    assert (trainer.history, trainer.batches_done) == (["METRICS", 3], batches)


def test_epochs_are_trained_saved_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = SimpleNamespace(path=Path("RUN"))
    trainer = bare("epochs=4", "selection.patience=2", quiet=False, run=run, history=[{**ROW, "top1": 0.1}])
    done: list[Any] = []
    best = {2: 0.75, 3: 0.5, 4: 0.5}
    trainer._epoch = lambda epoch, request: {**ROW, "epoch": epoch, "top1": best[epoch]}
    trainer._save = lambda: done.append(("saved", len(trainer.history)))

    @contextmanager
    def writer() -> Iterator[Any]:
        yield lambda row: done.append(("written", row["epoch"]))
        done.append("closed")

    trainer._metric_writers = lambda number, wandb: [writer()] if (number, wandb) == (1, "project") else []
    result = trainer.train("project", lambda epoch, network: done.append((epoch, network is trainer.ema.module)))
    assert done == [
        *(("written", 1), (1, True)),  # again, in case a kill came before it was
        *(("saved", 2), ("written", 2), (2, True)),
        *(("saved", 3), ("written", 3), (3, True)),
        *(("saved", 4), ("written", 4), (4, True)),
        "closed",
    ]
    assert (result.run, [row["epoch"] for row in result.history], result.resumed_from) == (trainer.run, [1, 2, 3, 4], 1)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"epoch {i}/4" for i in (2, 3, 4)
    ]
    done.clear()
    within = bare("epochs=2", history=[ROW], batches_done=2)
    within._epoch, within._save, within._metric_writers = trainer._epoch, lambda: None, lambda *_: []
    within.train(None, lambda epoch, network: done.append(epoch))
    assert done == [2], "weights within an epoch are not those of its start"
    done.clear()
    silent = bare("epochs=1")
    silent._epoch, silent._save, silent._metric_writers = lambda epoch, request: ROW, lambda: None, lambda *_: []
    silent.train()
    assert capsys.readouterr().err == ""
    assert trainer.train().resumed_from == 4
    assert done == [], "nothing is left to train"
    second = bare("epochs=1", processes=Two(0, rank=1))
    second._epoch, second._save = lambda epoch, request: ROW, lambda: None
    second.train(None, lambda epoch, network: pytest.fail("one process calls back"))


@pytest.mark.parametrize(("epochs", "stopped"), [(1, False), (2, True)])
def test_a_signal_between_two_epochs_stops_unless_all_is_done(epochs: int, stopped: bool) -> None:
    trainer = bare(f"epochs={epochs}")
    trainer._metric_writers = lambda number, wandb: []
    trainer._save = lambda: None

    def epoch(number: int, request: StopRequest) -> Any:
        request.signal = int(signal.SIGINT)
        return ROW

    trainer._epoch = epoch
    if stopped:
        with pytest.raises(TrainingStopped, match="stopped by SIGINT"):
            trainer.train()
    else:
        assert len(trainer.train().history) == 1


def test_metrics_are_written_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(module, "tensorboard_writer", lambda *given: ("board", *given))
    monkeypatch.setattr(module, "wandb_writer", lambda *given: ("wandb", *given))
    trainer = bare(run=RunFolder(tmp_path))
    board = ("board", tmp_path / "tensorboard", 3)
    assert list(trainer._metric_writers(3, None)) == [board]
    recipe = trainer.recipe.model_dump(mode="json")
    assert list(trainer._metric_writers(3, "project")) == [board, ("wandb", "project", tmp_path, recipe)]
    assert list(bare(processes=Two(0, rank=1))._metric_writers(3, "project")) == []


def test_the_row_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    values = Evaluation(0.5, 0.75, 1.25, 0.1, 0.2, [0.1], [0.2])
    raw = Evaluation(0.25, 0.375, 2.0, 0.5, 0.75, [0.3], [0.4])
    clock = iter([10.0, 12.34567])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(module, "measure_batch_norm", lambda *given: asked.append(given))
    monkeypatch.setattr(module, "Prefetcher", lambda *given: SimpleNamespace(images=lambda found: (given, found)))
    trainer = bare("batch_size=6", val_images="images", seconds_before=60.0, batches_done=4)  # a resumed epoch
    trainer.log.add(3, {"total": torch.tensor(100.0)}, torch.tensor(1.0))

    def evaluated(*given: Any, **named: Any) -> Evaluation:
        *others, stop_asked = given
        asked.append((*others, stop_asked(), named))
        return raw if given[0] is trainer.model else values

    monkeypatch.setattr(module, "evaluate", evaluated)
    trainer._optimize = lambda epoch, request: {"total": float(epoch)}
    assert trainer._epoch(3, StopRequest()) == {
        "epoch": 3,
        "step": 12,
        "lr": 0.5,
        "losses": {"total": 3.0},
        "seconds": 62.346,
        "top1": 0.5,
        "top5": 0.75,
        "nll": 1.25,
        "ece": 0.1,
        "brier": 0.2,
        "cos_sim": [0.1],
        "attention_std": [0.2],
        "raw": {"top1": 0.25, "top5": 0.375, "nll": 2.0, "ece": 0.5, "brier": 0.75},
    }
    assert trainer.seconds_before == trainer.batches_done == 0, "the next epoch begins anew"
    assert (trainer.log.sums, len(trainer.log.checked_totals)) == ({}, 4)
    network = trainer.ema.module
    assert asked == [
        ([network], ((trainer.recipe.preprocessing, CPU), ["some images"])),
        (network, "images", trainer.recipe.preprocessing, 6, CPU, ALONE, 0, {"quiet": True}),
        (trainer.model, "images", trainer.recipe.preprocessing, 6, CPU, ALONE, 0, {"quiet": True}),
    ]


def test_a_step_has_the_number_of_the_whole_run() -> None:
    done: list[Any] = []
    trainer = bare(
        schedule=SimpleNamespace(step_update=lambda step: done.append(("rate", step))),
        stepper=lambda epoch, batch: done.append(("step", epoch, batch.number)) or ({"total": torch.tensor(1.5)}, 7.0),  # type: ignore[func-returns-value]
        ema=SimpleNamespace(update=lambda model, step: done.append(("average", model is trainer.model, step))),  # type: ignore[has-type]
    )
    trainer.step(3, SimpleNamespace(number=1))
    assert done == [("rate", 9), ("step", 3, 1), ("average", True, 10)]
    assert trainer.log.totals() == {"total": 1.5}
    assert trainer.log.checked_totals.tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize(("workers", "ahead"), [(0, False), (1, True), (3, True)])
def test_batches_are_prepared_ahead_by_workers_alone(workers: int, ahead: bool) -> None:
    asked: list[Any] = []
    data = SimpleNamespace(batches=lambda *given, **named: asked.append((given, named)) or "batches")  # type: ignore[func-returns-value]
    prefetcher = SimpleNamespace(batches=lambda *given, **named: asked.append((given, named)) or "prepared")  # type: ignore[func-returns-value]
    trainer = bare(f"workers={workers}", data=data, prefetcher=prefetcher, batches_done=2, processes=Processes(1, 2))
    assert trainer.batches(3) == "prepared"
    assert asked == [
        ((3, workers), {"first": 2, "part": Processes(1, 2).batch_part}),
        (("batches",), {"ahead": ahead}),
    ]
