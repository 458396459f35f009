"""The switches of the trainer: each does what it says, and what a network or machine does not support is refused."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cli_fixture import Vitx
from training_jobs import TINY, TINY_SETTINGS, VitxProcess, metrics_of, recipe_of, train_one
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.run import RunFolder
from vitx.models.public_checkpoint import save_weights
from vitx.train import train
from vitx.train.loop.checkpoint import best_row, load_newest
from vitx.train.loop.distributed.processes import ALONE
from vitx.train.loop.environment import RunEnvironment
from vitx.train.loop.sharpness import perturbed, untracked_batch_norm
from vitx.train.loop.trainer import Trainer
from vitx.train.recipes.recipe import Recipe
from vitx.train.report import write_report
from vitx.train.watch import states

PLAIN = 'model.kwargs.attention=["plain","talking-heads"]'  # without BatchNorm, whose statistics are those of one pass


def small(image_folder: Path, *overrides: str) -> Recipe:
    return recipe_of(*TINY, "workers=0", "epochs=2", "batch_size=12", *overrides).on_data(str(image_folder))


def trainer_of(recipe: Recipe, folder: Path) -> Trainer:
    return Trainer(recipe, RunFolder(folder), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)


def weights_after_a_step(recipe: Recipe, folder: Path) -> dict[str, Tensor]:
    trainer = trainer_of(recipe, folder)
    trainer.step(1, next(trainer.batches(1)))
    return trainer.model.state_dict()


@pytest.mark.parametrize(
    "override",
    ["optimizer.accumulate=3", "execution.grad_checkpointing=true", "execution.channels_last=true"],
)
def test_the_same_mathematics_in_another_way(image_folder: Path, tmp_path: Path, override: str) -> None:
    recipe = small(image_folder, PLAIN, "optimizer.name=sgd", "schedule.warmup_epochs=0")
    expected = weights_after_a_step(recipe, tmp_path)
    start = trainer_of(recipe, tmp_path).model.state_dict()
    found = weights_after_a_step(
        small(image_folder, PLAIN, "optimizer.name=sgd", "schedule.warmup_epochs=0", override), tmp_path
    )
    assert any(not torch.equal(value, start[name]) for name, value in expected.items())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_step_is_of_its_own_weights_in_half_precision_too(
    image_folder: Path, tmp_path: Path, accumulate: int
) -> None:
    """Inside the autocast that is around a whole training, torch keeps weights once cast for the steps to come."""
    ends = []
    for computed_again in ("false", "true"):
        settings = (f"execution.grad_checkpointing={computed_again}", f"optimizer.accumulate={accumulate}")
        recipe = small(image_folder, PLAIN, "execution.precision=bfloat16", *settings, "batch_size=4")
        trainer = trainer_of(recipe, tmp_path)
        with torch.autocast("cpu", enabled=False):
            for batch in trainer.batches(1):
                trainer.step(1, batch)
        ends.append(trainer.model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_computed_again_counts_no_batch_of_batch_norm(
    image_folder: Path, tmp_path: Path, accumulate: int
) -> None:
    """Re-Attention's BatchNorm: parameters alone would not show it, as a step takes the batch's own statistics."""
    settings = ("optimizer.name=sgd", f"optimizer.accumulate={accumulate}")
    expected = weights_after_a_step(small(image_folder, *settings), tmp_path)
    found = weights_after_a_step(small(image_folder, *settings, "execution.grad_checkpointing=true"), tmp_path)
    assert expected["blocks.1.attn.var_norm.num_batches_tracked"] == accumulate
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mixup.mixup=0.8", "cutmix.probability=0", "losses.mixing=0", "batch_size=11"), "this one has 11: set an ev"),
        (("losses.attention=0.1", "losses.attention_pairs=2"), "2 adjacent pairs .* but there are 1: lower losses"),
        (("losses.mixing=0.1", "model.kwargs.patch_drop_rate=0.25"), r"set model\.kwargs\.patch_drop_rate=0"),
    ],
)
def test_what_the_first_step_would_refuse_makes_no_run_folder(
    image_folder: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train_one(small(image_folder, *overrides), tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_a_set_smaller_than_a_batch_has_the_rate_of_its_own_batch(image_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(small(image_folder, "batch_size=512", "optimizer.lr_base_size=512"), tmp_path)
    images = len(trainer.train_images)
    assert trainer.data.batch_size == images < 512
    expected = trainer.recipe.optimizer.lr * images / 512
    assert trainer.optimizer.param_groups[0]["initial_lr"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_channels_last_resumes_with_the_same_bits(image_folder: Path, tmp_path: Path, name: str) -> None:
    """A fused optimizer walks through memory as it lies: moments with other strides met the wrong weights."""
    recipe = small(image_folder, "execution.channels_last=true", f"optimizer.name={name}", "optimizer.momentum=0.9")
    train_one(recipe, tmp_path / "whole", {})

    def stop(_epoch: int, _model: nn.Module) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", device="cpu", quiet=True, after_epoch=stop)
    train_one(recipe, tmp_path / "parts", {}, True)
    assert metrics_of(tmp_path / "whole")[-1]["losses"] == metrics_of(tmp_path / "parts")[-1]["losses"]
    states = [load_file(tmp_path / run / "checkpoints/last/model.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_a_run_folder_that_another_training_made_meanwhile_is_left_alone(image_folder: Path, tmp_path: Path) -> None:
    first, second = (trainer_of(small(image_folder), tmp_path / "run") for _ in range(2))
    (tmp_path / "run").mkdir()  # an empty one is taken
    first.open_run()
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    with pytest.raises(InputError, match="was made by another process in the meantime"):
        second._make_folder(RunEnvironment.read(tmp_path / "run"))
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_resumed_run_needs_its_initial_weights_no_more(image_folder: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    save_weights(trainer_of(small(image_folder), tmp_path).ema.module, weights)
    recipe = small(image_folder, f"model.initial_checkpoint={weights}")
    train_one(recipe.model_copy(update={"epochs": 1}), tmp_path / "run", {})
    weights.unlink()
    train_one(recipe.model_copy(update={"epochs": 1}), tmp_path / "run", {}, True)
    with pytest.raises(InputError, match="no checkpoint at"):
        train_one(recipe, tmp_path / "other", {})


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_trains_and_resumes_with_its_loss_scale(
    image_folder: Path, tmp_path: Path, precision: str
) -> None:
    recipe = small(image_folder, f"execution.precision={precision}")
    train_one(recipe, tmp_path / "run", {})
    loaded = load_newest(RunFolder(tmp_path / "run"))
    assert loaded is not None
    assert ("scaler" in loaded[1].trainer) is (precision == "float16")
    if precision == "float16":
        trainer = trainer_of(recipe, tmp_path / "run")
        trainer.open_run()
        assert trainer.stepper.scaler.state_dict() == loaded[1].trainer["scaler"]
    assert all(row["losses"]["total"] < 20 for row in metrics_of(tmp_path / "run"))


def test_sam_takes_the_gradient_at_the_point_uphill() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    curvature = torch.tensor([1.0, 10.0], dtype=torch.float64)
    weight.grad = (curvature * weight).detach()  # of curvature·w²/2: (3, 40)
    uphill = weight.detach() + 0.5 * weight.grad / weight.grad.norm()
    before = weight.detach().clone()
    with perturbed([weight], 0.5):
        torch.testing.assert_close(weight.detach(), uphill, rtol=0, atol=1e-9)
    assert torch.equal(weight.detach(), before)


def test_sam_moves_the_running_statistics_once(image_folder: Path, tmp_path: Path) -> None:
    found = weights_after_a_step(small(image_folder, "optimizer.sam_rho=0.05", "schedule.warmup_epochs=0"), tmp_path)
    plain = weights_after_a_step(small(image_folder, "schedule.warmup_epochs=0"), tmp_path)
    for name, value in plain.items():
        if "running" in name or "tracked" in name:
            assert torch.equal(found[name], value), name
    assert any(not torch.equal(found[name], value) for name, value in plain.items())
    norm = nn.BatchNorm1d(2)
    with untracked_batch_norm(norm):
        norm(torch.rand(4, 2))
    assert norm.num_batches_tracked == 0


# torch's compiler looks at the .grad of every tensor it is given, and warns of that itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_train_as_they_do_without(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced by the compiler's front end; its code generator takes half a minute.
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager"))
    settings = ("model.kwargs.depth=1", 'model.kwargs.attention="re-attention"', "schedule.warmup_epochs=0")
    expected = weights_after_a_step(small(image_folder, *settings), tmp_path)
    found = weights_after_a_step(small(image_folder, *settings, "execution.compile=true"), tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=3e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_machine_that_cannot_compile_is_said_before_there_is_a_run(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a C++ compiler the first step ended in torch's traceback, and left a run that could not be resumed."""

    def without_compiler(*_: object) -> Any:
        raise RuntimeError("No working C++ compiler found")

    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend=without_compiler))
    said = r"execution\.compile: torch cannot compile for cpu here \(.*\): install what it lacks"
    with pytest.raises(EnvironmentMissing, match=said):
        train(small(image_folder, "execution.compile=true"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_drop_path_rises_linearly_with_depth(image_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of("model.kwargs.drop_path_rate=0.5", "model.kwargs.depth=6").on_data(str(image_folder))
    blocks: Any = trainer_of(recipe, tmp_path).model.blocks
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_patience_stops_and_stays_stopped(image_folder: Path, tmp_path: Path) -> None:
    # At this learning rate only the averaged weights change, and only for some steps.
    recipe = small(image_folder, "epochs=20", "optimizer.lr=1e-30", "schedule.min_lr=0", "selection.patience=2")
    train_one(recipe, tmp_path / "run", {})
    history = metrics_of(tmp_path / "run")
    assert len(history) == best_row(history)["epoch"] + 2
    assert len(history) < 20
    said = f"{len(history)} of 20, none was better for selection.patience"
    assert [state.fields()["epochs done"] for state in states(RunFolder(tmp_path / "run"), lambda: None)] == [said]
    page = tmp_path / "page.html"
    assert write_report(RunFolder(tmp_path / "run"), page, device=torch.device("cpu"), quiet=True)["epochs"] == said
    assert said in page.read_text()
    train_one(recipe, tmp_path / "run", {}, resume=True)
    assert metrics_of(tmp_path / "run") == history


def test_the_best_epoch_is_that_of_the_metric() -> None:
    history = [
        {"epoch": 1, "top1": 0.9, "nll": 0.7, "ece": 0.1},
        {"epoch": 2, "top1": 0.8, "nll": 0.5, "ece": 0.3},
        {"epoch": 3, "top1": 0.7, "nll": 0.6, "ece": 0.1},
    ]
    assert [best_row(history, metric)["epoch"] for metric in ("top1", "nll", "ece")] == [1, 2, 3]


def test_sigterm_saves_the_step_and_resuming_ends_in_the_same_bits(
    start_vitx: Callable[..., VitxProcess], tmp_path: Path
) -> None:
    run = ("train", "digits-deepvit", "--set", "epochs=1", *TINY_SETTINGS, "--set", "checkpoint_steps=2")
    gate = tmp_path / "gate"
    gate.touch()
    stopped = start_vitx(*run, "--out", "stopped", held=(1, 5))
    resume = tmp_path / "stopped" / "checkpoints" / "resume"
    while not resume.is_symlink():
        stopped.require_running()
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    gate.unlink()
    code, err = stopped.wait()
    assert code == 0, err
    assert "stopped by SIGTERM, all is saved: resume with `vitx train digits-deepvit --out stopped --resume`" in err
    state = json.loads((resume / "state.json").read_text())
    assert 0 < state["step"] <= 6
    assert state["rng"] == {"seed": 0, "next_epoch": 1, "next_batch": state["step"]}
    for process in (start_vitx(*run, "--out", "alone"), start_vitx(*run, "--out", "stopped", "--resume")):
        code, err = process.wait()
        assert code == 0, err
    last = Path("checkpoints") / "last" / "ema.safetensors"
    assert (tmp_path / "alone" / last).read_bytes() == (tmp_path / "stopped" / last).read_bytes()
    assert not resume.exists()


def test_the_batch_of_a_loss_that_is_not_finite_is_kept(image_folder: Path, tmp_path: Path) -> None:
    recipe = small(image_folder, "batch_size=6", "epochs=3", "optimizer.clip=0")
    trainer = trainer_of(recipe, tmp_path / "run")
    trainer.open_run()
    good = trainer.step

    def step(epoch: int, batch: Any) -> None:
        if (epoch, batch.number) == (2, 1):
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(float("nan"))
        good(epoch, batch)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match=r"not finite at batch 1 in epoch 2: .* its images are in '.*failed-batch'"):
        trainer.train()
    kept = json.loads((tmp_path / "run" / "failed-batch" / "batch.json").read_text())
    batch = list(trainer.data.batches(2))[1]
    assert [row["label"] for row in kept["images"]] == batch.labels.tolist()
    assert (tmp_path / "run" / "failed-batch" / "images.png").is_file()
    loaded = load_newest(RunFolder(tmp_path / "run"))
    assert loaded is not None
    assert loaded[1].epoch == 1
    assert all(torch.isfinite(value).all() for value in loaded[0].model.values() if value.is_floating_point())


def test_a_full_disk_keeps_the_last_checkpoint(image_folder: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for the full disk: the same call fails in the same place."""
    import resource

    recipe = small(image_folder, "epochs=3", "checkpoint_steps=1", "batch_size=6")
    trainer = trainer_of(recipe, tmp_path / "run")
    trainer.open_run()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    good = trainer.step

    def step(epoch: int, batch: Any) -> None:
        if (epoch, batch.number) == (2, 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        good(epoch, batch)

    trainer.step = step  # type: ignore[method-assign]
    try:
        from vitx.train.loop.failures import explain_full_disk

        with (
            pytest.raises(EnvironmentMissing, match=r"cannot write '.*step-[0-9]+': File too large; .* --resume"),
            explain_full_disk(trainer.run),
        ):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loaded = load_newest(trainer.run)
    assert loaded is not None
    assert (loaded[1].epoch, loaded[1].step) == (1, 4)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"last", "best", "resume", "epoch-0001", "step-00000004"}
    train_one(recipe, tmp_path / "run", {}, True)
    train_one(recipe, tmp_path / "alone", {})
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "alone")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("execution.precision=float16", "optimizer.sam_rho=0.1"), "sam_rho needs unscaled gradients"),
        (("execution.parallel=fsdp", "optimizer.sam_rho=0.1"), r"execution\.parallel=fsdp goes without"),
        (("losses.attention=0.1", "execution.grad_checkpointing=true"), r"set losses\.attention_maps=softmax"),
        (("execution.parallel=fsdp", "execution.channels_last=true"), r"set execution\.channels_last=false"),
        (("model.kwargs.pretrained=true",), r"it follows from model\.initial_checkpoint=timm"),
    ],
)
def test_contradictions_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of(*overrides)


def test_softmax_maps_are_compared_in_blocks_that_are_computed_again(image_folder: Path, tmp_path: Path) -> None:
    maps = ("losses.attention=0.1", "losses.attention_maps=softmax", "optimizer.name=sgd", "schedule.warmup_epochs=0")
    expected = weights_after_a_step(small(image_folder, PLAIN, *maps), tmp_path)
    found = weights_after_a_step(small(image_folder, PLAIN, *maps, "execution.grad_checkpointing=true"), tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_weights_and_biases_that_is_not_installed_is_named(
    vitx: Vitx, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python keeps for a module that cannot be imported
    arguments = ("--data", image_folder, "--out", tmp_path / "run", "--set", "epochs=1", *TINY_SETTINGS)
    code, _, err = vitx("train", "digits-deepvit", *arguments, "--wandb", "project")
    assert code == 3
    assert "this needs the package 'wandb', which is not installed" in err
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_that_refuses_is_one_error(
    vitx: Vitx, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Exception):
        pass

    def refuse(**settings: Any) -> None:
        raise Refused("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=Refused, init=refuse))
    arguments = ("--data", image_folder, "--out", tmp_path / "run", "--set", "epochs=1", *TINY_SETTINGS)
    code, _, err = vitx("train", "digits-deepvit", *arguments, "--wandb", "project")
    assert code == 3
    assert "Weights & Biases: No API key configured; WANDB_MODE=offline needs no key and no network" in err
