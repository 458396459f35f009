"""Studies at minimal size: those that are continued, runs that were killed, and what is refused."""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import training_jobs
from cli_fixture import Vitx
from server_process import HANG
from training_jobs import metrics_of
from vitx.core.errors import InputError
from vitx.train import train
from vitx.train.recipes.recipe import apply_overrides
from vitx.train.recipes.registry import get_recipe, resolve_recipe
from vitx.train.study.result import StudyResult, Variant
from vitx.train.study.study import Study, compare
from vitx.train.study.trials import Runner, Trial
from vitx.train.study.variants import STUDIES, depth_variants

TINY = (
    "model.kwargs.embed_dim=8",
    "model.kwargs.num_heads=2",
    "model.kwargs.patch_size=8",
    "batch_size=6",
    "workers=0",
    "cutmix.probability=0",
    "losses.mixing=0",
    "losses.contrastive=0",
)
EPOCHS = 8


@pytest.mark.parametrize("kind", ["losses", "methods", "talking-heads", "finetune", "kernel-size", "precision"])
def test_every_study_trains_at_minimal_size(
    kind: str, vitx: Vitx, tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rows in this process; the paper's numbers and what was trained stand in the result."""

    def train_here(runner: Runner, todo: list[Trial]) -> Iterator[tuple[Trial, None]]:
        for trial in todo:
            train(trial.resolved(), trial.folder(runner.study), device="cpu", quiet=True)
            yield trial, None

    settings: tuple[str, ...] = (*TINY[:4], "workers=0", "epochs=1", "schedule.warmup_epochs=0")
    if kind == "finetune":
        small = [*settings, "model.kwargs.depth=1"]
        train(resolve_recipe("digits-deit", data=str(image_folder), overrides=small), tmp_path / "first", quiet=True)
        settings = (*settings, f"model.initial_checkpoint={tmp_path / 'first'}")
    monkeypatch.setattr(Runner, "run", train_here)
    if kind != "kernel-size":  # 12 and 24 blocks are one
        whole = Trial.resolved
        monkeypatch.setattr(Trial, "resolved", lambda trial: apply_overrides(whole(trial), ["model.kwargs.depth=1"]))
    words = [word for setting in settings for word in ("--set", setting)]
    chosen = ("--data", image_folder, "--seeds", "4", "--out", tmp_path / "study", *words)
    code, printed, said = vitx("study", kind, *chosen, "--json", "--quiet", "--device", "cpu")
    assert code == 0, said
    result = StudyResult.model_validate_json(printed)
    base = apply_overrides(get_recipe("digits-deit"), [*settings])
    assert [(row.name, row.published_top1) for row in result.rows] == [
        (variant.name, variant.published)
        for variant in STUDIES[kind].variants(base)  # type: ignore[index]
    ]
    assert result.paper == STUDIES[kind].paper  # type: ignore[index]
    assert result.here.startswith("deit_digits, weight_init=jax")
    pixels = 48 if kind == "finetune" else 32
    assert f"18 images of 3 classes, {pixels} px, 1 epoch at batch 6, 1 seed" in result.here
    assert (tmp_path / "study" / "study.png").is_file()


def test_a_study_ends_where_its_images_change(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run opens them itself, days after the study perhaps, and its row would be compared with those before."""
    image = image_folder / "train" / "class-0" / "0.png"

    def train_here(runner: Runner, todo: list[Trial]) -> Iterator[tuple[Trial, None]]:
        for trial in todo:
            train(trial.resolved(), trial.folder(runner.study), device="cpu", quiet=True)
            yield trial, None
            shutil.copy(image, image.with_name("later.png"))

    monkeypatch.setattr(Runner, "run", train_here)
    settings, out = (*TINY, "epochs=1"), tmp_path / "study"
    study = Study("depth", "digits-deit", out, (4,), str(image_folder), settings, device="cpu", quiet=True)
    with pytest.raises(InputError, match=r"1-talking-heads-seed4': it was begun on 19 images of 3 .* \(18 of 3\)"):
        compare(study, depth_variants([1]))
    result = StudyResult.model_validate_json((out / "study.json").read_bytes())
    assert [run.variant for run in result.runs] == ["1-plain"]


def test_fine_tuning_begins_with_weights(vitx: Vitx, tmp_path: Path) -> None:
    code, _, said = vitx("study", "finetune", "--out", tmp_path / "study")
    assert (code, said.count("\n")) == (2, 1)
    assert "begins with weights: give --set model.initial_checkpoint=RUN" in said
    code, _, said = vitx("study", "finetune", "--out", tmp_path / "study", "--set", "model.initial_checkpoint=nowhere")
    assert (code, said.count("\n"), "nowhere" in said) == (2, 1, True)  # before any process is started
    assert not (tmp_path / "study").exists()


def tiny_study(out: Path, images: Path) -> Study:
    return Study(
        "depth",
        "digits-deit",
        out,
        (4,),
        str(images),
        (*TINY, f"epochs={EPOCHS}", "selection.metric=nll"),
        device="cpu",
    )


def test_the_networks_are_those_of_the_device(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU `photos` is a larger network, unless the study is asked for on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resolved = [resolve_recipe("photos", data=str(image_folder), device=device) for device in ("cpu", "cuda")]
    for device, recipe in zip(("cpu", "cuda"), resolved, strict=True):
        study = Study("depth", "photos", tmp_path / "study", (0,), str(image_folder), device=device)
        [trial] = study.trials([Variant("as it is", (), {})])
        assert study.base == trial.resolved() == recipe
    assert resolved[0].model != resolved[1].model


def test_a_study_that_is_killed_goes_on(tmp_path: Path, image_folder: Path) -> None:
    study, variants = tiny_study(tmp_path / "study", image_folder), depth_variants((1,))[:1]
    folder = study.out / "runs" / "1-plain-seed4"
    killed = training_jobs.context().Process(target=training_jobs.run_study, args=(study, variants))
    killed.start()
    deadline = time.monotonic() + HANG
    while not (folder / "metrics.jsonl").is_file():
        assert killed.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.join()
    with (study.out / ".lock").open() as lock:  # free when the run, which the kernel asked to stop, has saved all
        fcntl.flock(lock, fcntl.LOCK_EX)
    done, begun = metrics_of(folder), (folder / "run.json").stat().st_mtime_ns
    assert done

    study.run(variants)
    assert not study.failed
    history = metrics_of(folder)
    assert history[: len(done)] == done
    assert [row["epoch"] for row in history] == list(range(1, EPOCHS + 1))
    assert (folder / "run.json").stat().st_mtime_ns == begun
    (score,) = study.scores.values()
    assert (score.top1, score.nll) == (history[-1]["top1"], history[-1]["nll"])
    assert score.best_top1 == min(history, key=lambda row: row["nll"])["top1"]
    assert list(score.cos_sim) == history[-1]["cos_sim"]
    assert list(score.loss_by_epoch) == [row["losses"]["total"] for row in history]
    assert list(score.top1_by_epoch) == [row["top1"] for row in history]


def test_finished_runs_are_kept_and_other_ones_refused(vitx: Vitx, tmp_path: Path, image_folder: Path) -> None:
    study, variants = tiny_study(tmp_path / "study", image_folder), depth_variants((1,))
    for trial in study.trials(variants):
        train(trial.resolved(), trial.folder(study.out), device="cpu", quiet=True)
    written = {path: path.stat().st_mtime_ns for path in study.out.glob("runs/*/*")}
    settings = (part for setting in study.overrides for part in ("--set", setting))
    chosen = ("--data", image_folder, "--seeds", "4", "--out", study.out, *settings)
    command = ("study", "depth", "--depths", 1, *chosen)

    code, printed, said = vitx(*command, "--json")
    assert code == 0, said
    result = StudyResult.model_validate_json(printed)
    assert result == StudyResult.model_validate_json((study.out / "study.json").read_text())
    assert (study.out / "study.png").read_bytes().startswith(b"\x89PNG")
    assert [row.name for row in result.rows] == ["1-plain", "1-talking-heads", "1-re-attention"]
    assert (result.classes, result.images) == (3, {"train": 18, "val": 6})
    (image_folder / "train" / "beside.png").touch()  # another image that is left out
    code, printed, _ = vitx(*command)
    assert code == 0
    assert "re-attention" in printed
    assert vitx(*command, "--set", "workers=3")[0] == 0  # `photos` has one for each core, and this machine has more
    assert written == {path: path.stat().st_mtime_ns for path in study.out.glob("runs/*/*")}

    first = study.out / "runs" / "1-plain-seed4"
    for change, message in (
        ("epochs=4", f"epochs is {EPOCHS} in the run but 4 was asked for"),
        ("model.kwargs.mlp_ratio=2", "model.kwargs.mlp_ratio is absent in the run but 2 was asked for"),
    ):
        code, _, said = vitx(*command, "--set", change)
        assert (code, said) == (2, f"error: cannot go on with '{first}': {message}; choose another --out\n")
    code, _, said = vitx("study", "ablation", *chosen)
    assert (code, said) == (2, f"error: '{study.out}' holds a study of depth, not of ablation: choose another --out\n")
    for link, name in (("last", "ema.safetensors"), ("best", "model.safetensors")):
        weights = (first / "checkpoints" / link).resolve() / name
        whole = weights.read_bytes()
        for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            weights.write_bytes(damaged)
            code, _, said = vitx(*command)
            assert code == 2
            assert f"{name} is corrupt: sha256" in said
            assert f"; without the folder '{first}' that run is trained again\n" in said
        weights.write_bytes(whole)
    (image_folder / "val" / "class-2" / "0.png").unlink()
    code, _, said = vitx(*command)
    assert code == 2
    assert (
        f"'{first}': it was begun on 18 images of 3 classes, and this study on other ones of '{image_folder}'" in said
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ablation", "--recipe", "digits-dein"), "unknown recipe 'digits-dein': did you mean digits-deit"),
        (("ablation", "--seeds", ""), "--seeds '': expected whole numbers from 0 on"),
        (("ablation", "--seeds", "0,x"), "--seeds '0,x': expected whole numbers from 0 on"),
        (("ablation", "--seeds", "1,1"), "--seeds 1,1: each only once"),
        (("ablation", "--jobs", "0"), "--jobs 0: expected at least 1"),
        (("ablation", "--set", "seed=3"), "--set seed=3: a study has --seeds instead"),
        (("ablation", "--set", "epoch=3"), "unknown setting 'epoch': did you mean epochs"),
        (
            ("ablation", "--set", "cutmix.probability=0", "--set", "losses.mixing=0"),
            "losses.mixing needs images of mixed",
        ),
        (("ablation", "--recipe", "digits-alternet"), "model 'alternet_18_cifar' does not give its patch tokens"),
        (("ablation", "--depths", "6"), "--depths is of `vitx study depth`, not of ablation"),
        *(
            ((kind, "--set", setting), f"--set {setting} has no effect: every row of the study has a ")
            for kind, setting in (
                ("losses", "model.kwargs.depth=4"),
                ("losses", "losses.contrastive=2"),
                ("depth", "model.kwargs.attention=plain"),
                ("precision", "execution.precision=float32"),
            )
        ),
        (("depth", "--depths", "0"), "--depths '0': expected whole numbers from 1 on"),
        (("depth", "--recipe", "digits-alternet"), "model 'alternet_18_cifar' does not take these arguments"),
        (("ablation", "--data", "/nowhere"), "no data at '/nowhere'"),
    ],
)
def test_bad_input_is_one_error(vitx: Vitx, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, printed, said = vitx("study", *arguments, "--out", tmp_path / "study")
    assert (code, printed) == (2, "")
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_classes_that_differ_between_the_splits_are_refused(vitx: Vitx, tmp_path: Path, image_folder: Path) -> None:
    (image_folder / "val" / "class-2").rename(image_folder / "val" / "class-3")
    code, _, said = vitx("study", "ablation", "--data", image_folder, "--out", tmp_path / "study")
    assert code == 2
    assert "has no folder for 'class-2'" in said


def test_a_folder_of_something_else_is_left_alone(vitx: Vitx, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, said = vitx("study", "ablation", "--out", tmp_path)
    assert (code, said) == (2, f"error: '{tmp_path}' holds something that is no study: choose another --out\n")
    code, _, said = vitx("study", "ablation", "--out", "s3://bucket/study")
    assert (code, "error: 's3://bucket/study' is a URL: expected" in said) == (2, True)
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == '["thesis.tex"]'
