"""What `vitx train` writes, prints and refuses."""

import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli_fixture import Vitx
from training_jobs import TINY, TINY_SETTINGS, metrics_of, recipe_of
from vitx.analyze.between_epochs import analysis_between_epochs
from vitx.core.errors import InputError
from vitx.core.files import read_record, write_json
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.models import load_run_model
from vitx.train.loop.determinism import own_generators
from vitx.train.loop.environment import RunEnvironment
from vitx.train.loop.evaluation import evaluate
from vitx.train.loop.trainer import train
from vitx.train.recipes.recipe import Recipe
from vitx.train.recipes.registry import RECIPES

PLAIN_LOSSES = ("--set", "losses.mixing=0", "--set", "losses.contrastive=0", "--set", "cutmix.probability=0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs."""
    from vitx.train import resolve_recipe, train

    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = resolve_recipe("digits-deepvit", overrides=[*TINY_SETTINGS[1::2], "epochs=2", "losses.cosine=0.1"])
    train(recipe, folder, device="cpu", quiet=True)
    return folder


@pytest.mark.parametrize("program", ["/usr/bin/vitx", "/site-packages/vitx/__main__.py"])
def test_the_command_is_written_as_it_can_be_typed(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "digits-deepvit", "--out", "my run"])
    images = open_images("digits", "val")
    environment = RunEnvironment.now(torch.device("cpu"), images, images)
    assert environment.command == "vitx train digits-deepvit --out 'my run'"


def test_the_run_folder_holds_what_its_specification_says(finished: Path) -> None:
    run = RunFolder.open(finished)
    assert {path.name for path in finished.iterdir()} == {
        "run.json",
        "recipe.json",
        "environment.json",
        "first-batch.png",
        "metrics.jsonl",
        "progress.json",
        "checkpoints",
        "tensorboard",
        "lock",
    }
    assert run.info.class_names == tuple("0123456789")
    assert run.info.model.kwargs["patch_head"] is True
    assert run.info.model.kwargs["img_size"] == run.info.preprocessing.image_size == 32
    recipe = read_record(finished / "recipe.json", Recipe)
    assert (recipe.name, recipe.epochs, recipe.losses.cosine) == ("digits-deepvit", 2, 0.1)
    environment = read_record(finished / "environment.json", RunEnvironment)
    assert environment.data["val"].images == 360
    assert environment.command
    assert len(environment.commit.removesuffix("+changes")) in (0, 40)
    with Image.open(finished / "first-batch.png") as sheet:
        assert sheet.size == (4 * 32, 4 * 32)
    folder, state = run.checkpoint("last")
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "ema.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    assert (state.epoch, state.step) == (2, 22)
    assert (finished / "checkpoints" / "best").readlink() == Path(f"epoch-{state.best_epoch:04d}")


def test_every_epoch_has_one_line_of_metrics(finished: Path) -> None:
    rows = metrics_of(finished)
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["losses"].keys() == {"classification", "cosine", "contrastive", "mixing", "total"}
        weighted = row["losses"]["classification"] + 0.1 * row["losses"]["cosine"]
        weighted += row["losses"]["contrastive"] + row["losses"]["mixing"]
        assert row["losses"]["total"] == pytest.approx(weighted, rel=1e-5)
        assert len(row["cos_sim"]) == len(row["attention_std"]) == 2
        assert 0 <= row["top1"] <= 1
        assert row["nll"] > 0


def test_the_metrics_are_those_of_the_weights_on_disk(finished: Path) -> None:
    run = RunFolder.open(finished)
    for which in ("best", "last"):
        model, state = load_run_model(run, which)
        found = evaluate(model, open_images("digits", "val"), run.info.preprocessing, 128, torch.device("cpu"))
        assert found.top1 == state.metrics["top1"]
        assert found.nll == pytest.approx(state.metrics["nll"], rel=1e-6)


def test_analyses_between_epochs_change_nothing(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    settings = [*TINY_SETTINGS, "--set", "epochs=2", "--set", "losses.cosine=0.1"]
    arguments = ("train", "digits-deepvit", "--out", tmp_path / "run", *settings, "--device", "cpu")
    code, _, said = vitx(*arguments, "--analysis-every", 2)
    assert code == 0, said
    assert re.search(r"analysis of epoch 2: \d+\.\d s", said)
    assert "analysis of epoch 1" not in said
    report = json.loads((tmp_path / "run" / "analysis" / "epoch-0002.json").read_text())
    assert report["images"] == 128
    assert {"over-smoothing", "fourier", "lesions"} <= set(report["metrics"])
    weights = [RunFolder.open(run).checkpoint("last")[1].sha256 for run in (finished, tmp_path / "run")]
    assert weights[0] == weights[1]
    after_epoch = analysis_between_epochs(tmp_path / "run", 2, skip_bad=False, quiet=True)
    after_epoch(2, torch.nn.Identity())  # at a resume: it is there already
    assert json.loads((tmp_path / "run" / "analysis" / "epoch-0002.json").read_text()) == report


def test_a_finished_run_says_so(vitx: Vitx, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    code, out, err = vitx("train", "digits-deepvit", "--out", finished, "--resume")
    assert code == 0
    assert "has finished its 2 epochs: nothing is left to train" in err
    assert "top-1" in out
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_other_threads_are_told(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    environment = read_record(run / "environment.json", RunEnvironment)
    write_json(run / "environment.json", environment.model_copy(update={"threads": 99}))
    code, _, err = vitx("train", "digits-deepvit", "--out", run, "--resume")
    assert code == 0
    assert f"resumed with threads {environment.threads}, begun with 99: the result may differ in its last bits" in err


def test_json_holds_the_result(vitx: Vitx, finished: Path) -> None:
    code, out, err = vitx("train", "digits-deepvit", "--out", finished, "--resume", "--json", "-q")
    summary = json.loads(out)
    assert (code, err, summary["epochs"]) == (0, "", 2)
    assert summary["top1"] == max(row["top1"] for row in metrics_of(finished))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exists: pass --resume to go on with it, or another --out"),
        (("--resume", "--set", "epochs=3"), "cannot resume .*: epochs is 2 in the run but 3 was asked for"),
        (("--resume", "--set", "seed=5"), "seed is 0 in the run but 5 was asked for"),
        (("--resume", "--data", "elsewhere"), "data is digits in the run but .*elsewhere was asked for"),
    ],
)
def test_a_run_that_is_there_is_not_overwritten(
    vitx: Vitx, finished: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = vitx("train", "digits-deepvit", "--out", finished, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err), err


def test_another_recipe_cannot_resume(vitx: Vitx, finished: Path) -> None:
    code, _, err = vitx("train", "digits-deit", "--out", finished, "--resume")
    assert code == 2
    assert "name is digits-deepvit in the run but digits-deit was asked for" in err


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "optimizer.safetensors"])
def test_a_corrupt_checkpoint_is_named(vitx: Vitx, finished: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    path = (run / "checkpoints" / "last").resolve() / name
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    code, _, err = vitx("train", "digits-deepvit", "--out", run, "--resume")
    assert code == 2
    assert f"{name} is corrupt: sha256" in err


def test_metrics_that_lack_an_epoch_stop_a_resume(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[1] + "\n")
    code, _, err = vitx("train", "digits-deepvit", "--out", run, "--resume")
    assert code == 2
    assert "metrics.jsonl does not hold the epochs 1 to 2" in err


def test_a_folder_that_is_no_run_is_left_alone(vitx: Vitx, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    code, _, err = vitx("train", "digits-deit", "--out", tmp_path / "notes", "--resume")
    assert code == 2
    assert "is not a run: it has no run.json" in err
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_a_folder_of_images_trains(vitx: Vitx, image_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("--set", "epochs=1", *TINY_SETTINGS)
    code, out, err = vitx("train", "digits-deepvit", "--data", image_folder, "--out", run, "--json", *settings)
    assert code == 0, err
    assert json.loads(out)["epochs"] == 1
    info = RunFolder.open(run).info
    assert info.class_names == ("class-0", "class-1", "class-2")
    assert info.model.num_classes == 3
    assert info.data == str(image_folder)
    assert RunFolder.open(run).checkpoint("last")[1].step == 1, "18 images are one batch"

    (image_folder / "train" / "class-0" / "0.png").unlink()
    code, _, err = vitx("train", "digits-deepvit", "--out", run, "--resume")
    assert code == 2
    assert "the train images changed since the run began (18 then, 17 now)" in err


@pytest.mark.parametrize(
    ("name", "refused", "settings", "losses"),
    [
        ("resnet10t", "does not give its patch tokens", PLAIN_LOSSES, set()),
        (
            "vit_tiny_patch16_224",
            "has no classifier of patches",
            ("--set", "losses.mixing=0", "--set", "losses.cosine=0.3", "--set", "losses.contrastive=1"),
            {"cosine", "contrastive"},
        ),
    ],
)
def test_a_model_of_timm_trains_with_the_losses_that_it_has(
    vitx: Vitx, image_folder: Path, tmp_path: Path, name: str, refused: str, settings: tuple[str, ...], losses: set[str]
) -> None:
    chosen = ("--set", f"model.name={name}", "--set", "epochs=1")
    arguments = ("train", "digits-deit", "--data", image_folder, "--out", tmp_path / "run", *chosen)
    code, _, err = vitx(*arguments)
    assert code == 2
    assert f"model '{name}' {refused}" in err
    assert not (tmp_path / "run").exists()
    code, _, err = vitx(*arguments, *settings)
    assert code == 0, err
    assert metrics_of(tmp_path / "run")[0]["losses"].keys() == {"classification", "total"} | losses


def test_an_unreadable_image_is_named_or_counted(vitx: Vitx, image_folder: Path, tmp_path: Path) -> None:
    bad = image_folder / "train" / "class-1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    small = ("--set", "epochs=1", "--set", "model.kwargs.depth=2")
    arguments = ("train", "digits-deit", "--data", image_folder, "--out", tmp_path / "run", *small)
    code, _, err = vitx(*arguments)
    assert code == 2
    assert f"unreadable image {bad}" in err
    assert "--skip-bad" in err
    assert not (tmp_path / "run").exists()
    code, _, err = vitx(*arguments, "--skip-bad")
    assert code == 0, err
    assert f"left out 1 image: {bad}" in err
    environment = read_record(tmp_path / "run" / "environment.json", RunEnvironment)
    assert environment.data["train"].images == 17
    assert len(environment.data["train"].skipped) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("", "no data at"),
        ("val/class-2", "val has no folder for 'class-2', which"),
        ("train", "train does not exist: expected train/ and val/"),
    ],
)
def test_missing_data_is_named(vitx: Vitx, image_folder: Path, tmp_path: Path, damage: str, message: str) -> None:
    shutil.rmtree(image_folder / damage)
    code, _, err = vitx("train", "digits-deit", "--data", image_folder, "--out", tmp_path / "run")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits-depvit",), "unknown recipe 'digits-depvit': did you mean digits-deepvit"),
        (("digits-deit", "--set", "optimizer.rate=1"), "unknown setting 'optimizer.rate'"),
        (("digits-deit", "--set", "model.name=deit_digit"), "unknown model 'deit_digit': did you mean deit_digits"),
        (("digits-deit", "--set", "model.kwargs.depht=3"), "does not take these arguments: "),
        (("digits-deit", "--set", "model.kwargs.class_token=false"), "Token pooling needs the class token"),
        (("digits-deit", "--set", "model.kwargs.embed_layer=x"), "does not take these arguments: "),
        (
            ("digits-deit", "--set", "model.kwargs.drop_path_rate=1.5"),
            "drop_path_rate is 1.5: expected a number from 0",
        ),
        (("digits-deit", "--set", "model.kwargs.in_chans=1"), "model.kwargs.in_chans is no argument of a network for"),
        (("digits-deit", "--set", "model.kwargs.features_only=true"), "features_only is no argument of a network for"),
        (("digits-deit", "--set", "model.kwargs.checkpoint_path=x"), "checkpoint_path is no argument of a network for"),
        (("digits-deit", "--set", "model.kwargs.pretrained_cfg=x"), "pretrained_cfg is no argument of a network for"),
        (("digits-deit", "--set", "schedule.kwargs.decay_epochs=3"), "schedule.kwargs.decay_epochs has no effect with"),
        (
            ("digits-deit", "--set", "distillation.weight=0.3"),
            "distillation.weight has no effect without distillation.",
        ),
        (("digits-deit", "--set", "preprocessing.image_size=33"), "img_size 33 is not divisible by patch_size 4"),
        (("digits-deit", "--set", "workers=1000000"), "workers: given '1000000', expected: less than or equal to 1024"),
        (("digits-deit", "--set", "augmentation.padding=1000000000"), "expected: less than or equal to 1024"),
        (("digits-deit", "--set", "augmentation.repeats=1000000000"), "expected: less than or equal to 1000"),
        (("digits-deit", "--set", "preprocessing.crop_fraction=1e-9"), "expected: greater than or equal to 0.01"),
        (
            ("photos", "--data", "digits", "--set", "model.name=crossvit_9_240"),
            "model 'crossvit_9_240' fails on an image of 32 px: ",
        ),
    ],
)
def test_a_wrong_request_writes_nothing(vitx: Vitx, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = vitx("train", *arguments, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_rate_is_compared_with_that_of_the_images_there_are(image_folder: Path, tmp_path: Path) -> None:
    """18 images are a batch of 18: the rate that 512 give would not fall to min_lr but rise."""
    scaled = ("optimizer.lr=0.01", "optimizer.lr_base_size=512", "batch_size=512", "schedule.min_lr=0.001")
    recipe = recipe_of(*TINY, *scaled).on_data(str(image_folder))
    with pytest.raises(InputError, match=r"schedule\.min_lr 0\.001 is above the learning rate 0\.000351562: lower it$"):
        train(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(vitx: Vitx, tmp_path: Path) -> None:
    settings = ("--set", "optimizer.lr=1e30", "--set", "optimizer.clip=0", "--set", "epochs=1", *TINY_SETTINGS)
    code, _, err = vitx("train", "digits-deepvit", "--out", tmp_path / "run", *settings)
    assert code == 1
    assert "in epoch 1: lower optimizer.lr (1e+30)" in err
    code, _, err = vitx("watch", tmp_path / "run")
    assert code == 1
    assert "ended before its last epoch: the loss or its gradient is not finite at batch " in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_recipes_are_listed(vitx: Vitx) -> None:
    code, out, _ = vitx("recipes", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == sorted(RECIPES)


def test_a_process_trains_one_run_at_a_time_and_keeps_its_generators(tmp_path: Path) -> None:
    recipe = recipe_of(*TINY, "epochs=1", "workers=0")
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"], torch.get_rng_state()
    train(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    with own_generators(torch.device("cpu")), pytest.raises(InputError, match="another thread of this process trains"):
        train(recipe, tmp_path / "other", device="cpu", quiet=True)
    assert not (tmp_path / "other").exists()
