"""What a trainer is built of, with each argument in its place, and the order in which a run is opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from training_jobs import recipe_of
from vitx.core.errors import InputError
from vitx.core.run import ModelSpec, RunFolder
from vitx.train.loop import trainer as module
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.inputs.training_data import WEIGHTS, seed_of
from vitx.train.loop.resuming import VISIBILITY_TIMEOUT
from vitx.train.loop.step import EpochLog
from vitx.train.loop.trainer import Trainer

CPU = torch.device("cpu")
SPEC = ModelSpec(name="deit_digits", num_classes=2, kwargs={"depth": 2})


class Network(nn.Module):
    """Records whether it was told to return the logits of both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.distilled: list[bool] = []

    def set_distilled_training(self, enable: bool) -> None:
        self.distilled.append(enable)


class Together(Processes):
    """Process `rank` of two that need not wait for each other."""

    def barrier(self) -> None:
        pass

    def agreed(self, read: Any, error: str, timeout: float = 0.0) -> Any:
        return read()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Stand-ins for all that a trainer builds; what each was called with."""
    found: dict[str, list[Any]] = {}

    def stand_in(name: str, result: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            found.setdefault(name, []).append((given, named))
            return result(*given) if callable(result) else result

        monkeypatch.setattr(module, name, call)

    def images(data: str) -> Any:
        splits = ("train", "val")
        known = {"skipped": (), "class_names": ("a", "b"), "by_hash": False}
        return [SimpleNamespace(name=f"{split} of {data}", **known) for split in splits]

    network = Network()
    stand_in("open_splits", images)
    stand_in("TrainingData", SimpleNamespace(steps=4, batch_size=12))
    stand_in("model_spec", SPEC)
    stand_in("build_network", lambda recipe, spec: network)
    stand_in("load_initial_weights", None)
    stand_in("apply_execution", lambda model, *_: model)
    stand_in("load_teacher", None)
    stand_in("Objective", "objective")
    stand_in("parallelize", "parallel objective")
    stand_in("shard_module", None)
    stand_in("build_optimizer", "optimizer")
    stand_in("build_schedule", "schedule")
    stand_in("Prefetcher", "prefetcher")
    stand_in("Stepper", "stepper")
    stand_in("ModelEmaV3", SimpleNamespace(module="averaged"))
    found["network"] = [network]
    return found


def built(*overrides: str, processes: Processes = ALONE, skip_bad: bool = False) -> Any:
    recipe = recipe_of("seed=5", "epochs=7", "batch_size=12", "ema_decay=0.75", *overrides)
    return Trainer(recipe, RunFolder("RUN"), CPU, processes, skip_bad=skip_bad, quiet=True)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_trainer_is_built_of_its_recipe(asked: dict[str, list[Any]], skip_bad: bool) -> None:
    torch.manual_seed(99)
    trainer = built("execution.channels_last=true", skip_bad=skip_bad)
    recipe, (network,) = trainer.recipe, asked.pop("network")
    assert torch.initial_seed() == seed_of(5, WEIGHTS)
    train, val = trainer.train_images, trainer.val_images
    assert (train.name, val.name) == (f"train of {recipe.data}", f"val of {recipe.data}")
    schedule = {"epochs": 7, "steps": 4}
    expected: dict[str, list[Any]] = {
        "open_splits": [((recipe.data,), {"skip_bad": skip_bad, "check_size": recipe.preprocessing.check_size})],
        "TrainingData": [((train, recipe.preprocessing, recipe.augmentation), {"batch_size": 12, "seed": 5})],
        "model_spec": [((recipe, 2), {})],
        "build_network": [((recipe, SPEC), {})],
        "ModelEmaV3": [((network,), {"decay": 0.75, "use_warmup": True, "foreach": True})],
        "apply_execution": [((network, recipe.model.name, recipe.execution, CPU), {"processes": 1})],
        "load_teacher": [((recipe.distillation, recipe.preprocessing, ("a", "b")), {})],
        "Objective": [((network, recipe, 2, None), {})],
        "parallelize": [(("objective", recipe.execution.parallel, ALONE, CPU), {})],
        "build_optimizer": [((network, recipe.optimizer, 12), {})],
        "build_schedule": [(("optimizer", recipe.schedule), schedule)],
        "Prefetcher": [((recipe.preprocessing, CPU), {"channels_last": True})],
        "Stepper": [(("parallel objective", network, "optimizer", recipe, 2, "prefetcher", ALONE), {})],
    }
    assert asked == expected
    assert (trainer.run.path, trainer.device, trainer.processes, trainer.quiet) == (Path("RUN"), CPU, ALONE, True)
    assert (trainer.model, trainer.ema.module, trainer.objective) == (network, "averaged", "parallel objective")
    assert (trainer.optimizer, trainer.schedule, trainer.stepper) == ("optimizer", "schedule", "stepper")
    assert (trainer.history, trainer.batches_done, trainer.prefetcher) == ([], 0, "prefetcher")
    assert isinstance(trainer.log, EpochLog)
    assert len(trainer.log.checked_totals) == 4
    assert network.distilled == [], "no teacher"


@pytest.mark.parametrize(("parallel", "count", "sharded"), [("fsdp", 1, False), ("ddp", 2, False), ("fsdp", 2, True)])
def test_averages_are_sharded_with_the_network(
    asked: dict[str, list[Any]], parallel: str, count: int, sharded: bool
) -> None:
    built(f"execution.parallel={parallel}", processes=Together(0, count))
    assert asked["ModelEmaV3"][0][1]["foreach"] is not sharded
    assert asked.get("shard_module", []) == ([(("averaged", CPU), {})] if sharded else [])
    assert asked["apply_execution"][0][1] == {"processes": count}


def test_a_checkpoint_to_start_from_and_a_teacher(asked: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    (network,) = asked["network"]
    moved: list[Any] = []
    teacher = SimpleNamespace(to=moved.append, sha256="of its weights")
    monkeypatch.setattr(module, "load_teacher", lambda *given: teacher)
    trainer = built("model.initial_checkpoint=weights.safetensors")
    assert asked["load_initial_weights"] == [((network, SPEC, "weights.safetensors"), {"quiet": True})]
    assert asked["Objective"] == [((network, trainer.recipe, 2, teacher), {})]
    assert moved == [CPU]
    assert trainer.teacher_sha256 == "of its weights"
    assert network.distilled == [True]
    monkeypatch.setattr(module, "apply_execution", lambda *given, **named: nn.Linear(1, 1))
    built()  # a network of one head has no such method


@pytest.mark.parametrize(("count", "accumulate", "refused"), [(2, 3, False), (1, 4, True), (4, 1, True), (4, 2, True)])
def test_a_batch_has_to_be_cut_into_equal_parts(
    asked: dict[str, list[Any]], count: int, accumulate: int, refused: bool
) -> None:
    if not refused:
        built(f"optimizer.accumulate={accumulate}", processes=Together(0, count))
        return
    with pytest.raises(InputError, match=f"cannot be cut into {count * accumulate} parts of whole CutMix pairs"):
        built(f"optimizer.accumulate={accumulate}", processes=Together(0, count))
    assert "build_network" not in asked, "before anything is built"


class Images(str):
    batch_size = 12


def opened(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, rank: int = 0, count: int = 1) -> Any:
    trainer: Any = object.__new__(Trainer)
    environment = SimpleNamespace(data="data")
    monkeypatch.setattr(module, "RunEnvironment", SimpleNamespace(now=lambda *given, **named: environment))
    trainer.__dict__.update(
        recipe=recipe_of("seed=5", *overrides),
        run=RunFolder(path),
        processes=Together(rank, count),
        device=CPU,
        quiet=False,
        spec=SPEC,
        train_images=SimpleNamespace(class_names=("a", "b"), by_hash=False),
        val_images="val",
        data=Images("data"),
    )
    return trainer


def test_a_new_run_has_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr(module, "write_json", lambda path, value: written.append((path.name, value)) or path.touch())  # type: ignore[func-returns-value]
    monkeypatch.setattr(module, "first_batch", lambda data: f"picture of {data}".encode())
    trainer = opened(tmp_path / "runs" / "mine", monkeypatch)
    trainer._make_folder("environment")
    assert [name for name, _ in written] == ["recipe.json", "environment.json", "run.json"]
    assert written[:2] == [("recipe.json", trainer.recipe), ("environment.json", "environment")]
    info = written[2][1]
    assert (info.name, info.seed, info.data) == ("mine", 5, trainer.recipe.data)
    assert (info.recipe, info.model, info.class_names) == (trainer.recipe.name, SPEC, ("a", "b"))
    assert info.preprocessing == trainer.recipe.preprocessing
    assert (trainer.run.path / "first-batch.png").read_bytes() == b"picture of data"
    names = ["environment.json", "first-batch.png", "recipe.json", "run.json"]
    assert sorted(path.name for path in trainer.run.path.iterdir()) == names


@pytest.mark.parametrize(("rank", "made"), [(0, ["environment"]), (1, [])])
def test_a_new_run_is_made_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, made: list[str]
) -> None:
    trainer = opened(tmp_path / "mine", monkeypatch, rank=rank, count=2)
    asked: list[Any] = []
    now = SimpleNamespace(data="data", teacher="weights")
    monkeypatch.setattr(
        module,
        "RunEnvironment",
        SimpleNamespace(now=lambda *given, **named: asked.append((given, named)) or now),  # type: ignore[func-returns-value]
    )
    folders: list[str] = []
    agreed: list[Any] = []
    trainer._make_folder = lambda environment: folders.append("environment" if environment is now else "other")
    trainer._restore = lambda: pytest.fail("nothing to restore")
    object.__setattr__(trainer.processes, "agreed", lambda read, error: agreed.append((read(), error)))
    trainer.open_run()
    assert folders == made
    assert asked == [((CPU, trainer.train_images, "val"), {"processes": 2, "teacher": ""})]
    said = "the processes see other images than each other, or another teacher: copy the same to each node"
    assert agreed == [(("data", "weights"), said)]


@pytest.mark.parametrize("quiet", [False, True])
def test_an_old_run_is_resumed_and_what_differs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    trainer = opened(tmp_path, monkeypatch, "optimizer.lr=0.5")
    trainer.quiet, done = quiet, list[Any]()
    begun = SimpleNamespace(
        check_same_data=lambda other: done.append(("data", other)),
        differences=lambda other: [f"with {other.data}: the result may differ"],
    )
    now = SimpleNamespace(data="other threads", teacher="")
    environment = SimpleNamespace(now=lambda *_, **__: now, read=lambda path: done.append(path) or begun)  # type: ignore[func-returns-value]
    monkeypatch.setattr(module, "RunEnvironment", environment)
    monkeypatch.setattr(RunFolder, "exists", lambda self: True)
    monkeypatch.setattr(module, "read_recipe", {tmp_path: recipe_of("seed=5", "optimizer.lr=0.25")}.__getitem__)
    monkeypatch.setattr(
        module, "changed_settings", lambda before, after: [f"lr {before.optimizer.lr} as {after.optimizer.lr}"]
    )
    trainer._restore = lambda: done.append("restored")
    trainer.open_run()
    assert done == [tmp_path, ("data", now), "restored"]
    lines = capsys.readouterr().err.splitlines()
    if quiet:
        assert lines == []
        return
    assert lines == [
        "resumed with other threads: the result may differ",
        "resumed lr 0.25 as 0.5",
    ]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_opened_in_this_order(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, resume: bool, rank: int
) -> None:
    done: list[Any] = []
    processes = Together(rank, 2)
    object.__setattr__(processes, "barrier", lambda: done.append("barrier"))

    class Lock:
        def __init__(self, folder: RunFolder) -> None:
            done.append(("lock of", str(folder.path)))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("unlocked")

        def acquire(self, timeout: float = -1.0) -> None:
            done.append(("acquire", timeout))

    @contextmanager
    def entered(name: str, value: Any) -> Iterator[Any]:
        done.append(name)
        yield value

    class Stand:
        def __init__(self, *given: Any, **named: Any) -> None:
            done.append(("trainer", given[2:], named))

        def open_run(self) -> None:
            done.append("open")

        def train(self, *given: Any) -> str:
            done.append(("train", given))
            return "result"

    monkeypatch.setattr(module, "require_wandb", lambda project: done.append("wandb"))
    monkeypatch.setattr(
        module,
        "device_to_train_on",
        lambda device, deterministic: entered(f"{device}, deterministic {deterministic}", f"chosen {device}"),
    )
    monkeypatch.setattr(module, "join_processes", lambda device: entered(f"join on {device}", processes))
    monkeypatch.setattr(module, "explain_lost_process", lambda folder: entered(f"lost {folder.path}", None))
    monkeypatch.setattr(module, "explain_full_disk", lambda folder: entered(f"disk {folder.path}", None))
    monkeypatch.setattr(module, "RunLock", Lock)
    monkeypatch.setattr(module, "timeout_under_torchrun", lambda seconds: 2 * seconds)
    recipe = recipe_of(f"execution.deterministic={str(deterministic).lower()}")

    def agree(who: Any, folder: RunFolder, what: Any) -> None:
        done.append(("agree", who is processes, str(folder.path), what is recipe))

    monkeypatch.setattr(module, "check_processes_agree", agree)
    monkeypatch.setattr(
        module, "check_run_folder", lambda folder, what, resume: done.append(("folder", what is recipe, resume))
    )
    monkeypatch.setattr(module, "Trainer", Stand)
    found: Any = module.train(
        recipe, "RUN", resume=resume, skip_bad=True, device="cpu", wandb="project", after_epoch=print
    )
    assert found == "result"
    writes = rank == 0
    assert done == [
        "wandb",
        *(f"cpu, deterministic {deterministic}", "join on chosen cpu", "lost RUN", ("lock of", "RUN")),
        *([("acquire", 2 * VISIBILITY_TIMEOUT)] if writes and resume else []),
        *("barrier", ("agree", True, "RUN", True), ("folder", True, resume), "barrier"),
        ("trainer", ("chosen cpu", processes), {"skip_bad": True, "initial_weights": True, "quiet": not writes}),
        *("disk RUN", "open"),
        *([("acquire", -1.0)] if writes else []),
        *(("train", ("project", print)), "unlocked"),
    ]
