"""AlterNet's build-up rule: every sequence of outcomes, and trainers whose accuracies are known."""

import itertools
from pathlib import Path

import pytest

from cli_fixture import Vitx
from vitx.core.errors import CheckFailed
from vitx.train.study.build_up import Depths, Quality, Replacement, Step, build_up, next_replacement, study_alternet
from vitx.train.study.result import Score, StudyResult, Variant
from vitx.train.study.study import Study


def follow(depths: Depths, answers: tuple[bool, ...]) -> list[Step]:
    """The steps of the rule when replacement i helps as `answers[i]` says; further ones do not help."""
    best, steps = 0.0, []
    given = iter(answers)

    def train(replacement: Replacement) -> Quality:
        nonlocal best
        if replacement.stage is None:
            return best, 0.0
        helps = next(given, False)
        best += helps
        return (best if helps else best - 1), 0.0

    for step in build_up(depths, train):
        steps.append(step)
    return steps


def expected(depths: Depths, answers: tuple[bool, ...]) -> list[tuple[int | None, Depths, bool]]:
    """The rule in the paper's words, written as nested loops: from the last stage to the first, add MSA at its end in
    turn with convolutions, until there is no room or it does not help."""
    counts = [0] * len(depths)
    steps: list[tuple[int | None, Depths, bool]] = [(None, tuple(counts), True)]
    given = iter(answers)
    for stage in reversed(range(len(depths))):
        for _ in range(depths[stage] // 2):
            counts[stage] += 1
            helps = next(given, False)
            steps.append((stage, tuple(counts), helps))
            if not helps:
                counts[stage] -= 1
                break
    return steps


@pytest.mark.parametrize("depths", [(1, 1, 1, 1), (2, 2, 2, 2), (1, 1, 2, 2), (3, 4, 6, 4), (2, 5, 1, 6), (4, 1)])
def test_every_way_the_rule_can_go(depths: Depths) -> None:
    most = sum(units // 2 for units in depths)
    for answers in itertools.product((False, True), repeat=most):
        steps = follow(depths, answers)
        assert [(step.stage, step.attention_depths, step.kept) for step in steps] == expected(depths, answers)
        assert next_replacement(depths, steps) is None
        tried = [step.attention_depths for step in steps]
        assert len(set(tried)) == len(tried) <= most + 1
        assert all(2 * count <= units for each in tried for count, units in zip(each, depths, strict=True))
        for index in range(len(steps)):  # a study that is taken up walks the same way
            following = next_replacement(depths, steps[:index])
            assert following is not None
            assert following.model_dump() == {key: getattr(steps[index], key) for key in ("stage", "attention_depths")}


def test_known_accuracies_lead_to_the_papers_alternet_50() -> None:
    """Gains as in the paper's Fig. 12: MSA helps at the ends of the late stages and harms the first one."""
    gains = {3: (1.0, 0.5), 2: (0.8, 0.4, 0.2), 1: (0.3, -0.1), 0: (-0.5,)}

    def train(replacement: Replacement) -> Quality:
        counts = replacement.attention_depths
        return 70 + sum(sum(gains[stage][:count]) for stage, count in enumerate(counts)), -1.0

    steps = list(build_up((3, 4, 6, 4), train))
    assert [step.attention_depths for step in steps if step.kept][-1] == (0, 1, 3, 2)
    assert [step.attention_depths for step in steps if not step.kept] == [(0, 2, 3, 2), (1, 1, 3, 2)]
    assert [step.stage for step in steps] == [None, 3, 3, 2, 2, 2, 1, 1, 0]


def test_equal_accuracies_are_decided_by_likelihood() -> None:
    quality: dict[Depths, Quality] = {(0, 0): (0.9, -0.5), (0, 1): (0.9, -0.4), (1, 1): (0.9, -0.4)}
    steps = list(build_up((2, 2), lambda replacement: quality[replacement.attention_depths]))
    assert [step.kept for step in steps] == [True, True, False]
    assert [step.nll for step in steps] == [0.5, 0.4, 0.4]


class KnownStudy(Study):
    """A study whose runs have known results instead of training."""

    def run(self, variants: "list[Variant]", after_each: object = None) -> None:  # type: ignore[override]
        self.out.mkdir(exist_ok=True)
        for trial in self.trials(variants):
            counts = variants[0].factors["attention_depths"]
            if counts == [0, 1, 0, 0]:
                self.failed[trial.name] = "exit code 1: no memory"
                continue
            # Of 360 images; the seeds' order differs, the sum does not.
            top1 = (350 + counts[3] + (trial.seed if counts[2] else 2 - trial.seed)) / 360
            self.scores[trial] = Score(
                variant=trial.variant,
                seed=trial.seed,
                epochs=1,
                top1=top1,
                best_top1=top1,
                nll=0.5,
                cos_sim=(),
                attention_std=(),
                seconds=1.0,
            )


def known(tmp_path: Path, depths: str, *overrides: str) -> Study:
    return KnownStudy(
        "alternet",
        "digits-alternet",
        tmp_path / "study",
        (0, 1, 2),
        overrides=(f"model.kwargs.depths={depths}", *overrides),
        quiet=True,
    )


def test_the_study_follows_the_rule_on_means_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[list[str]] = []
    monkeypatch.setattr(KnownStudy, "check", lambda _, variants: checked.append([each.name for each in variants]))
    result = study_alternet(known(tmp_path, "[1,1,2,2]"))
    assert [(step["attention_depths"], step["kept"]) for step in result.steps] == [
        ((0, 0, 0, 0), True),
        ((0, 0, 0, 1), True),
        ((0, 0, 1, 1), False),  # equal but for the order of the sum
    ]
    assert [row.name for row in result.rows] == ["msa-0-0-0-0", "msa-0-0-0-1", "msa-0-0-1-1"]
    assert [(step["top1"], step["nll"]) for step in result.steps] == [
        (pytest.approx(row.top1.mean), 0.5) for row in result.rows
    ]
    assert checked == [[row.name] for row in result.rows]  # each before it is trained


def test_a_step_that_cannot_be_trained_ends_the_study(tmp_path: Path) -> None:
    with pytest.raises(
        CheckFailed, match="cannot go on without msa-0-1-0-0-seed0, which failed: exit code 1: no memory"
    ):
        study_alternet(known(tmp_path, "[1,2,1,1]"))
    stored = StudyResult.model_validate_json((tmp_path / "study" / "study.json").read_text())
    assert stored.failed["msa-0-1-0-0-seed0"] == "exit code 1: no memory"
    assert [step["attention_depths"] for step in stored.steps] == [[0, 0, 0, 0]]


def test_the_command_prints_the_steps(vitx: Vitx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.train.study.study.Study", KnownStudy)
    code, printed, said = vitx("study", "alternet", "--out", tmp_path / "study")
    assert code == 0, said
    lines = [line.split("│")[1:4] for line in printed.partition("build-up")[2].splitlines() if "%" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["0 0 0 0", "97.50%", "kept"],
        ["0 0 0 1", "97.78%", "kept"],
        ["0 0 1 1", "97.78%", "taken back"],
    ]
    assert (tmp_path / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    code, _, said = vitx("study", "alternet", "--out", tmp_path / "other", "--set", "model.kwargs.depths=[1,2,1,1]")
    assert code == 1
    assert said.startswith("error: the rule cannot go on without msa-0-1-0-0-seed0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe", "digits-deit"), "model 'deit_digits' is no AlterNet: give --recipe digits-alternet or alternet-"),
        (
            ("--set", "model.kwargs.num_heads=[3,6,12,6]"),
            "model.kwargs.num_heads=[3, 6, 12, 6]: the rule wants no fewer heads in later stages",
        ),
        *(
            (("--set", f"model.kwargs.num_heads={heads}"), "model 'alternet_18_cifar' does not take these arguments")
            for heads in ("4", "[3,6]", '[3,6,12,"a"]')
        ),
    ],
)
def test_a_network_that_the_rule_cannot_build_is_refused(
    vitx: Vitx, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    """Before anything is trained, though the first step has no attention and so no heads."""
    code, _, said = vitx("study", "alternet", "--out", tmp_path / "study", *words)
    assert (code, said.startswith(f"error: {message}"), said.count("\n")) == (2, True, 1), said
    assert not (tmp_path / "study").exists()
