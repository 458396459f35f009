"""Studies: the table against numpy, studies that are continued, runs that are killed, fail or are stopped."""

import fcntl
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training_jobs
from cli_fixture import Vitx
from epoch_row import epoch_row
from server_process import HANG
from training_jobs import metrics_of
from vitx.core.errors import InputError
from vitx.core.panels import png
from vitx.train import train
from vitx.train.loop.interruption import TrainingStopped
from vitx.train.recipes.recipe import apply_overrides
from vitx.train.recipes.registry import RECIPES, get_recipe, resolve_recipe
from vitx.train.study.result import MeanStd, Score, StudyResult, Variant, last_layers, rows_of
from vitx.train.study.study import Study
from vitx.train.study.study_figures import draw_study
from vitx.train.study.trials import Runner, Trial
from vitx.train.study.variants import PUBLISHED, STUDIES, ablation_variants, depth_variants

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
VARIANTS = [Variant("none", ("losses.cosine=0",), {"cosine": 0.0}), Variant("cosine", (), {"cosine": 1.0}, 82.0)]


def scores(rng: np.random.Generator, blocks: int, seeds: int = 3) -> list[Score]:
    return [
        Score(
            variant=variant.name,
            seed=seed,
            epochs=2,
            top1=rng.uniform(),
            best_top1=rng.uniform(),
            nll=rng.uniform(),
            cos_sim=tuple(rng.uniform(size=blocks)),
            attention_std=tuple(rng.uniform(size=blocks)),
            loss_by_epoch=(1.5, 1.25)[: 1 + seed],
            top1_by_epoch=(0.5, 0.75)[: 1 + seed],
            seconds=1.5,
        )
        for seed in range(seeds)
        for variant in VARIANTS
    ]


def test_the_rows_are_what_numpy_says() -> None:
    runs = scores(np.random.default_rng(0), 24)
    first, second = rows_of(VARIANTS, runs)
    none, cosine = ([run for run in runs if run.variant == name] for name in ("none", "cosine"))
    top1 = np.array([[run.top1 for run in group] for group in (none, cosine)])
    similarity = np.array([run.cos_sim for run in cosine])
    spread = np.array([run.attention_std for run in cosine])
    assert first.gain is None
    assert (second.top1.mean, second.top1.std) == pytest.approx((top1[1].mean(), top1[1].std(ddof=1)), rel=1e-12)
    difference = top1[1] - top1[0]
    assert second.gain is not None
    assert (second.gain.mean, second.gain.std) == pytest.approx((difference.mean(), difference.std(ddof=1)), rel=1e-12)
    for found, expected in (
        (second.cos_sim_last_block, similarity[:, -1]),
        (second.cos_sim_last_layers, similarity[:, 18:].mean(axis=1)),
        (second.attention_std_last_layers, spread[:, 18:].mean(axis=1)),
    ):
        assert found is not None
        assert (found.mean, found.std) == pytest.approx((expected.mean(), expected.std(ddof=1)), rel=1e-12)
    assert second.cos_sim_by_block == pytest.approx(similarity.mean(axis=0), rel=1e-12)
    assert (second.seeds, second.published_top1) == ((0, 1, 2), 82.0)


def test_gains_pair_equal_seeds_and_rows_without_runs_are_left_out() -> None:
    runs = scores(np.random.default_rng(1), 0)
    (row,) = rows_of(VARIANTS, [run for run in runs if run.variant == "cosine"])
    assert row.gain is row.cos_sim_last_block is row.attention_std_last_layers is None
    _, row = rows_of(VARIANTS, [run for run in runs if run.variant == "cosine" or run.seed == 1])
    by_name = {(run.variant, run.seed): run.top1 for run in runs}
    assert row.gain == MeanStd(mean=by_name["cosine", 1] - by_name["none", 1], std=None)
    assert row.gain is not None
    assert "±" not in row.gain.text()


@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (24, 6)])
def test_the_last_layers_are_the_last_quarter(blocks: int, count: int) -> None:
    assert list(last_layers(range(blocks))) == list(range(blocks))[blocks - count :]


def test_the_ablation_has_the_rows_of_the_papers_table() -> None:
    recipe = apply_overrides(get_recipe("digits-deit"), ["losses.cosine=0.3"])
    baseline, *variants = ablation_variants(recipe)
    as_deit = apply_overrides(recipe, baseline.overrides)
    assert (as_deit.mixup.mixup, as_deit.mixup.cutmix, as_deit.cutmix.probability) == (0.8, 1, 0)
    assert (baseline.published, as_deit.losses.need_tokens) == (81.8, False)
    assert len({tuple(variant.factors.values()) for variant in variants}) == len(variants) == 8
    for variant in variants:
        losses = apply_overrides(recipe, variant.overrides).losses
        on = tuple(name for name in ("cosine", "contrastive", "mixing") if getattr(losses, name))
        assert variant.name == ("+".join(on) or "none")
        assert losses.cosine in (0, 0.3)
        assert variant.published == PUBLISHED.get(on)
    assert [variant.published for variant in variants].count(None) == 2  # none of the losses, and all
    assert ablation_variants(get_recipe("digits-deit"))[2].factors["cosine"] == 1.0


def test_a_depth_is_one_network_of_one_kind_of_attention() -> None:
    variants = depth_variants((6, 12))
    assert [variant.name for variant in variants][:3] == ["6-plain", "6-talking-heads", "6-re-attention"]
    kwargs = apply_overrides(get_recipe("digits-deepvit"), variants[5].overrides).model.kwargs
    assert (kwargs["depth"], kwargs["attention"]) == (12, "re-attention")


def test_published_numbers_are_those_of_the_recipes() -> None:
    """The recipes' docstrings quote the same tables."""
    quoted = {"losses": ("patchvit-b-12", "patchvit-b-24"), "talking-heads": ("patchvit-b-12",)}
    quoted |= {"finetune": ("patchvit-b-12-384",), "depth": ("deepvit-16", "deepvit-24", "deepvit-32")}
    base = apply_overrides(get_recipe("digits-deit"), ["model.initial_checkpoint=run"])
    for kind, names in quoted.items():
        variants = depth_variants((16, 24, 32)) if kind == "depth" else STUDIES[kind].variants(base)  # type: ignore[index]
        text = " ".join(inspect.getdoc(RECIPES[name]) or "" for name in names)
        numbers = {f"{variant.published:.{2 if kind == 'depth' else 1}f}" for variant in variants if variant.published}
        assert numbers
        assert all(number in text for number in numbers), (kind, numbers)


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
    assert "18 images of 3 classes, 32 px, 1 epoch at batch 6, 1 seed" in result.here
    assert (tmp_path / "study" / "study.png").is_file()


def test_fine_tuning_begins_with_weights(vitx: Vitx, tmp_path: Path) -> None:
    code, _, said = vitx("study", "finetune", "--out", tmp_path / "study")
    assert (code, said.count("\n")) == (2, 1)
    assert "begins with weights: give --set model.initial_checkpoint=RUN" in said
    code, _, said = vitx("study", "finetune", "--out", tmp_path / "study", "--set", "model.initial_checkpoint=nowhere")
    assert (code, said.count("\n"), "nowhere" in said) == (2, 1, True)  # before any process is started
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("kind", STUDIES)
@pytest.mark.parametrize(("blocks", "seeds"), [(24, 3), (0, 1)])
def test_every_study_has_a_figure(kind: str, blocks: int, seeds: int) -> None:
    """Rows may have different depths."""
    runs = scores(np.random.default_rng(2), blocks, seeds)
    shallow = {"cos_sim": runs[1].cos_sim[: blocks // 2], "attention_std": runs[1].attention_std[: blocks // 2]}
    runs[1::2] = [run.model_copy(update=shallow) for run in runs[1::2]]
    factors = {"depth": 6, "attention": "plain"}
    rows = [
        row.model_copy(update={"factors": {**factors, "depth": 6 * i}}) for i, row in enumerate(rows_of(VARIANTS, runs))
    ]
    steps = [{"attention_depths": [0, i], "top1": 0.9, "kept": i < 2} for i in range(3)]
    result = StudyResult.model_construct(study=kind, rows=tuple(rows), runs=tuple(runs), steps=tuple(steps))
    assert png(draw_study(result)).startswith(b"\x89PNG")


def test_the_best_epoch_is_the_one_that_the_recipe_selects() -> None:
    history = [epoch_row(1, top1=0.95, nll=0.9), epoch_row(2, top1=0.90, nll=0.3), epoch_row(3, top1=0.5, nll=0.5)]
    best: dict[Any, float] = {metric: Score.of("v", 0, history, metric).best_top1 for metric in ("top1", "nll")}
    assert best == {"top1": 0.95, "nll": 0.90}
    assert Score.of("v", 0, history, "nll").top1 == 0.5


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
    assert f"'{first}': it was begun on 18 images of 3 classes, and '{image_folder}' has other ones" in said


class Commands(Runner):
    """Trials whose processes run Python code, by name."""

    codes: dict[str, str]

    def _command(self, trial: Trial) -> list[str]:
        return [sys.executable, "-c", self.codes[trial.variant], str(self.study)]


def trials(*names: str) -> list[Trial]:
    return [Trial(name, 0, "digits-deit", None, ()) for name in names]


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path) -> None:
    runner = Commands(tmp_path, 1)
    runner.codes = {
        "refused": "import sys; print('epoch 1'); sys.exit('error: no disk')",
        "stopped": "print('stopped by SIGTERM')",
    }
    found = {trial.variant: reason for trial, reason in runner.run(trials("refused", "stopped"))}
    assert found == {"refused": "exit code 1: no disk", "stopped": "exit code 0: stopped by SIGTERM"}
    assert "epoch 1" in (tmp_path / "logs" / "refused-seed0.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_the_runs_under_way_and_begins_no_other(tmp_path: Path, number: signal.Signals) -> None:
    assert threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests run under nohup
    code = """
import signal, sys, time
from pathlib import Path
study = Path(sys.argv[1])
def saved(*_):
    (study / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, saved)
(study / "ready").touch()
while True:
    time.sleep(0.1)  # a signal that comes just before a long sleep would wait for its end
"""
    runner = Commands(tmp_path, 1)
    runner.codes = {"sleeps": code, "waits": "open('begun', 'w')"}

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingStopped, match=number.name), closing(runner.run(trials("sleeps", "waits"))) as outcomes:
        list(outcomes)
    thread.join()
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "logs" / "waits-seed0.log").read_text()
    assert signal.getsignal(number) is before


def test_a_study_in_use_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use: another study trains there"):
            list(Commands(tmp_path, 1).run(trials("any")))


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
        (("alternet", "--recipe", "digits-deit"), "model 'deit_digits' is no AlterNet"),
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
