"""What a study does around its runs, whose outcomes are known here: nothing is trained."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from epoch_row import epoch_row
from vitx.core.errors import InputError
from vitx.core.machine import describe_machine, installed_versions
from vitx.data.image_set import ImageSet
from vitx.train.loop.environment import DataRecord
from vitx.train.study import study as module
from vitx.train.study.result import Score, StudyResult, Variant
from vitx.train.study.study import Study, compare
from vitx.train.study.trials import Runner, Trial
from vitx.train.study.variants import STUDIES

VARIANTS = (
    Variant("plain", ("epochs=2",), {"cosine": 0.0}),
    Variant("cosine", ("losses.cosine=0.5",), {"cosine": 0.5}),
)
SETTINGS = ("workers=0", "model.kwargs.depth=2", "schedule.warmup_epochs=0", "selection.metric=nll")


def make_study(folder: Path, images: Path, **changes: Any) -> Study:
    arguments = {"seeds": (4, 7), "data": str(images), "overrides": SETTINGS, "device": "cpu", **changes}
    return Study("ablation", "digits-deit", folder / "study", **arguments)


def history_of(trial: Trial, **changes: Any) -> list[dict[str, Any]]:
    """Two epochs, of which the first has the better likelihood."""
    layers = {"cos_sim": [0.5, 0.25], "attention_std": [0.1, 0.2]}
    first = epoch_row(1, top1=0.875, nll=0.5, seconds=0.25)
    return [first | layers, epoch_row(2, top1=0.5 + trial.seed / 100, nll=0.75, seconds=61) | layers | changes]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """By the name of a trial, why it fails, "gone" for a run whose folder is, None for one that succeeds."""
    reasons: dict[str, str | None] = {}

    def run(runner: Runner, trials: Sequence[Trial]) -> Generator[tuple[Trial, str | None], None, None]:
        for trial in reversed(trials):
            reason = reasons.get(trial.name)
            yield trial, None if reason == "gone" else reason

    def history(trial: Trial, study: Path) -> list[dict[str, Any]] | None:
        return None if reasons.get(trial.name) == "gone" else history_of(trial)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(Trial, "history", history)
    return reasons


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "no seeds: give at least one, such as --seeds 0,1,2"),
        ({"seeds": (3, 1, 3)}, "--seeds 3,1,3: each only once"),
        ({"jobs": 0}, "--jobs 0: expected at least 1"),
        ({"overrides": ("workers=0", "seed=3")}, "--set seed=3: a study has --seeds instead"),
    ],
)
def test_a_study_refuses(tmp_path: Path, image_folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        make_study(tmp_path, image_folder, **changes)
    assert str(refused.value) == message


def test_a_study_is_not_made_among_the_class_folders(tmp_path: Path, image_folder: Path) -> None:
    """Its folder would be a class without images, and so the error of each of its runs."""
    flat = image_folder / "train"
    with pytest.raises(InputError, match=r"/train/study' is in '.*/train', where the next run would take it for a"):
        make_study(flat, flat)
    assert make_study(tmp_path, flat).train_images.class_names == ("class-0", "class-1", "class-2")


def test_what_a_study_is_unless_told(tmp_path: Path) -> None:
    study = Study("ablation", "digits-deit", tmp_path / "new", (0,))
    assert (study.data, study.overrides, study.jobs, study.device) == (None, (), 1, "auto")
    assert (study.skip_bad, study.quiet, study.failed, study.scores) == (False, False, {}, {})
    assert (len(study.train_images), len(study.val_images)) == (1437, 360)


def test_a_trial_for_each_row_seed_by_seed(tmp_path: Path, image_folder: Path) -> None:
    study = make_study(tmp_path, image_folder)
    assert study.trials(VARIANTS) == [
        Trial(name, seed, "digits-deit", str(image_folder), (*SETTINGS, override), "cpu")
        for seed in (4, 7)
        for name, override in (("plain", "epochs=2"), ("cosine", "losses.cosine=0.5"))
    ]
    with pytest.raises(AttributeError):
        study.trials(VARIANTS)[0].seed = 1  # type: ignore[misc]  # it is a key of `scores`


@pytest.mark.parametrize(
    "entries",
    [(), ("runs",), ("runs", "logs", ".lock"), ("runs", "logs", ".lock", "study.png"), ("study.json", "notes.txt")],
)
def test_a_study_is_taken_up_in_its_own_folder(
    tmp_path: Path, image_folder: Path, entries: tuple[str, ...], outcomes: dict[str, str | None]
) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    for name in entries:
        if name == "study.json":
            compare(make_study(tmp_path, image_folder), VARIANTS)
        else:
            (folder / name).touch()
    assert make_study(tmp_path, image_folder).out == folder


def test_a_damaged_result_is_not_needed(tmp_path: Path, image_folder: Path, outcomes: dict[str, str | None]) -> None:
    folder = tmp_path / "study"
    written = compare(make_study(tmp_path, image_folder), VARIANTS)
    (folder / "study.json").write_text("{")
    (folder / "study.png").touch()
    with pytest.raises(InputError, match=r"StudyResult: .*; without this file the study goes on, and writes it again$"):
        make_study(tmp_path, image_folder)
    (folder / "study.json").unlink()
    assert compare(make_study(tmp_path, image_folder), VARIANTS) == written


@pytest.mark.parametrize(
    ("entry", "message"), [("notes.txt", "something that is no study"), (".", "cannot be a folder")]
)
def test_another_folder_is_left_alone(tmp_path: Path, image_folder: Path, entry: str, message: str) -> None:
    folder = tmp_path / "study"
    if entry != ".":
        folder.mkdir()
    (folder / entry).touch()
    with pytest.raises(InputError, match=message):
        make_study(tmp_path, image_folder)


def test_every_trial_is_looked_at_and_a_network_built_once(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are looked at for runs that would begin with them, and not for those that go on."""
    first = tmp_path / "first.safetensors"
    study = make_study(tmp_path, image_folder, overrides=(*SETTINGS, f"model.initial_checkpoint={first}"))
    said: list[tuple[Any, ...]] = []
    images = {"train": DataRecord.of(study.train_images), "val": DataRecord.of(study.val_images)}

    def check_begun(trial: Trial, out: Path, train: ImageSet, found: dict[str, DataRecord]) -> None:
        assert (out, found) == (study.out, images)
        assert train.class_names == ("class-0", "class-1", "class-2")
        said.append(("looked at", trial.name))

    def load(network: object, spec: Any, source: str, *, quiet: bool) -> None:
        assert quiet
        said.append(("weights", network, spec.num_classes, source))

    monkeypatch.setattr(Trial, "check_begun", check_begun)
    monkeypatch.setattr(module, "build_network", lambda recipe, spec: recipe.seed)
    monkeypatch.setattr(module, "load_initial_weights", load)
    begun = study.out / "runs" / "plain-seed4"
    begun.mkdir(parents=True)
    (begun / "run.json").touch()
    study.check(VARIANTS)
    assert said == [
        ("looked at", "plain-seed4"),
        ("looked at", "cosine-seed4"),
        ("weights", 4, 3, str(first)),
        ("looked at", "plain-seed7"),
        ("looked at", "cosine-seed7"),
    ]
    said.clear()
    make_study(tmp_path, image_folder).check(VARIANTS)
    assert {what for what, *_ in said} == {"looked at"}


def test_runs_that_end_are_told_and_counted(
    tmp_path: Path, image_folder: Path, outcomes: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path, image_folder)
    outcomes |= {"plain-seed7": "exit code 1: no disk", "cosine-seed4": "gone"}
    seen: list[tuple[int, int]] = []
    study.run(VARIANTS, lambda: seen.append((len(study.scores), len(study.failed))))
    assert study.out.is_dir()
    assert capsys.readouterr().err.splitlines() == [
        "1/4 cosine-seed7: top-1 57.00%, CosSim of the last block 0.250, 61 s",
        "2/4 plain-seed7: exit code 1: no disk",
        "3/4 cosine-seed4: its run folder is gone",
        "4/4 plain-seed4: top-1 54.00%, CosSim of the last block 0.250, 61 s",
    ]
    assert seen == [(1, 0), (1, 1), (1, 2), (2, 2)]
    assert study.failed == {"plain-seed7": "exit code 1: no disk", "cosine-seed4": "its run folder is gone"}
    trials = {trial.name: trial for trial in study.trials(VARIANTS)}
    assert study.scores == {
        trials[f"{name}-seed{seed}"]: Score.of(name, seed, history_of(trials[f"{name}-seed{seed}"]), "nll")
        for name, seed in (("cosine", 7), ("plain", 4))
    }
    outcomes.clear()
    study.quiet = True
    study.run(VARIANTS)
    assert (study.failed, len(study.scores)) == ({}, 4)
    assert capsys.readouterr().err == ""


def test_a_network_without_blocks_has_no_similarity() -> None:
    score = Score.of("plain", 4, history_of(Trial("plain", 4, "r", None, ()), cos_sim=[]), "top1")
    assert module._in_words(score) == "top-1 54.00%, 61 s"


def test_the_result_says_what_was_trained(
    tmp_path: Path, image_folder: Path, outcomes: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """study.json is there after each run, and begun when the arguments were looked at."""
    study = make_study(tmp_path, image_folder, jobs=2, quiet=True)
    outcomes["plain-seed7"] = "exit code 1: no disk"
    runs: list[list[str]] = []
    write = Study.write

    def keep(self: Study, *arguments: Any) -> StudyResult:
        result = write(self, *arguments)
        assert StudyResult.model_validate_json((self.out / "study.json").read_bytes()) == result
        runs.append([f"{run.variant}-seed{run.seed}" for run in result.runs])
        return result

    monkeypatch.setattr(Study, "write", keep)
    monkeypatch.setattr(Study, "check", lambda self, variants: runs.append([]))
    result = compare(study, VARIANTS)
    names = ["plain-seed4", "cosine-seed4", "cosine-seed7"]
    assert runs == [[], names[2:], names[2:], names[1:], names, names]
    assert (result.study, result.recipe, result.data) == ("ablation", "digits-deit", str(image_folder))
    assert (result.classes, result.images) == (3, {"train": 18, "val": 6})
    assert (result.settings, result.seeds, result.jobs) == (SETTINGS, (4, 7), 2)
    assert (result.machine, result.versions) == (describe_machine(), installed_versions())
    assert result.seconds == pytest.approx(3 * 61.2)
    assert [(row.name, row.seeds) for row in result.rows] == [("plain", (4,)), ("cosine", (4, 7))]
    assert result.failed == {"plain-seed7": "exit code 1: no disk"}
    assert (result.steps, result.paper) == ((), STUDIES["ablation"].paper)
    assert result.here == (
        "deit_digits, weight_init=jax, position_std=0.5, depth=2; "
        "18 images of 3 classes, 32 px, 30 epochs at batch 64, 2 seeds"
    )
    assert study.write(VARIANTS, [{"kept": True}]).steps == ({"kept": True},)


def test_unreadable_images_are_refused_or_left_out(tmp_path: Path, image_folder: Path) -> None:
    (image_folder / "train" / "class-0" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"0\.png"):
        make_study(tmp_path, image_folder)
    study = make_study(tmp_path, image_folder, skip_bad=True)
    assert len(study.train_images) == 17
