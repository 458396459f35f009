"""What `vitx study` asks for, prints and ends with, of studies that are known here."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.cli import study
from vitx.train.loop.interruption import TrainingStopped
from vitx.train.study.result import MeanStd, Row, StudyResult

MEAN, ALONE = MeanStd(mean=0.5, std=0.25), MeanStd(mean=0.75, std=None)
ROW = Row(
    name="plain",
    factors={"depth": 6, "loss": 0, "stages": [0, 1]},
    settings=(),
    seeds=(3, 4),
    top1=MEAN,
    gain=None,
    best_top1=MEAN,
    nll=MEAN,
    cos_sim_last_block=ALONE,
    cos_sim_last_layers=MEAN,
    attention_std_last_layers=None,
    cos_sim_by_block=(),
    published_top1=None,
)
OTHER = ROW.model_copy(update={"gain": ALONE, "published_top1": 81.5})
RESULT = StudyResult(
    study="losses",
    recipe="digits-deit",
    data="digits",
    classes=10,
    images={},
    settings=(),
    seeds=(3, 4),
    jobs=1,
    machine={},
    versions={},
    seconds=1,
    rows=(ROW,),
    runs=(),
    failed={},
    paper="theirs",
    here="ours",
)
COLUMNS = ["depth", "loss", "stages", "n", "top-1 (%)", "gain", "CosSim, last", "last quarter", "attention std"]
CELLS = ["6", "–", "0 1", 2, "50.0 ± 25.0", "–", "0.750", "0.500 ± 0.250", "–"]
TITLE = "losses of digits-deit on digits: {}/study.json"
TRAINED = ("what was trained", {"the paper": "theirs", "here": "ours"})
Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked for and printed: (arguments of Study), (depths,), then tables and fields."""
    made: Calls = []
    monkeypatch.setattr("vitx.train.study.study.Study", lambda *given: made.append(given))
    monkeypatch.setattr(study, "print_table", lambda *table: made.append(table))
    monkeypatch.setattr(study, "print_fields", lambda *table: made.append(table))
    return made


def ended(monkeypatch: pytest.MonkeyPatch, calls: Calls, result: StudyResult | TrainingStopped) -> None:
    def run_study(_study: object, depths: tuple[int, ...]) -> StudyResult:
        calls.append((depths,))
        if isinstance(result, TrainingStopped):
            raise result
        return result

    monkeypatch.setattr("vitx.train.study.run_study.run_study", run_study)


def test_a_study_is_a_table_and_what_was_trained(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    ended(monkeypatch, calls, RESULT)
    assert vitx("study", "losses") == (0, "", "")
    folder = Path("runs/study-losses")
    assert calls == [
        ("losses", "digits-deit", folder, (0, 1, 2), None, (), 1, "auto", False, False),
        ((6, 12, 24, 32),),
        (TITLE.format(folder), COLUMNS, [CELLS]),
        TRAINED,
    ]


def test_everything_that_is_given_is_asked_for(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path
) -> None:
    ended(monkeypatch, calls, RESULT)
    words = ("--recipe", "r", "--data", "d", "--seeds", "3, 0,", "--jobs", "2", "--set", "a=1", "--set", "b=2")
    given = (*words, "--out", tmp_path, "--device", "cpu", "--skip-bad", "--quiet", "--json")
    code, out, _ = vitx("study", "depth", *given, "--depths", "1,2")
    assert (code, json.loads(out)) == (0, RESULT.model_dump(mode="json"))
    assert calls == [("depth", "r", tmp_path, (3, 0), "d", ("a=1", "b=2"), 2, "cpu", True, True), ((1, 2),)]


def test_published_numbers_and_steps_have_places_of_their_own(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    steps = (
        {"attention_depths": [0, 0], "top1": 0.5, "kept": True},
        {"attention_depths": [0, 1], "top1": 0.25, "kept": False},
    )
    ended(monkeypatch, calls, RESULT.model_copy(update={"rows": (ROW, OTHER), "steps": steps}))
    assert vitx("study", "losses", "--out", "o")[0] == 0
    others = [*CELLS]
    others[5] = "75.0"
    assert calls[2:] == [
        (TITLE.format("o"), [*COLUMNS, "paper"], [[*CELLS, "–"], [*others, "81.5"]]),
        TRAINED,
        (
            "build-up",
            ("attention units of each stage", "top-1", ""),
            [("0 0", "50.00%", "kept"), ("0 1", "25.00%", "taken back")],
        ),
    ]


def test_runs_that_failed_are_named_at_the_end(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    failed = {"a-seed0": "too little memory", "b-seed0": "no"}
    ended(monkeypatch, calls, RESULT.model_copy(update={"rows": (), "failed": failed}))
    code, _, err = vitx("study", "losses", "--out", "o")
    said = "2 runs failed, the output is in 'o/logs': a-seed0: too little memory; b-seed0: no"
    assert (code, err) == (1, f"error: {said}\n")
    assert calls[2:] == [(TITLE.format("o"), COLUMNS[3:], []), TRAINED]
    ended(monkeypatch, calls, RESULT.model_copy(update={"rows": (), "failed": {"b-seed0": "no"}}))
    assert vitx("study", "losses", "--out", "o")[2] == "error: 1 run failed, the output is in 'o/logs': b-seed0: no\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_study_that_is_stopped_says_how_it_goes_on(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, number: signal.Signals, code: int
) -> None:
    ended(monkeypatch, calls, TrainingStopped(number))
    said = f"stopped by {number.name}, all is saved: go on with the same command\n"
    assert vitx("study", "losses") == (code, "", said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("losses", "--recipe", ""), "--recipe '': it is empty: is a variable not set?"),
        (("losses", "--depths", "6"), "--depths is of `vitx study depth`, not of losses"),
        *(
            (
                ("depth", option, text),
                f"{option} '{text}': expected whole numbers from {least} on, such as {option} 6,12",
            )
            for option, least, text in (
                ("--seeds", 0, "-1"),
                ("--seeds", 0, "a"),
                ("--seeds", 0, ","),
                ("--seeds", 0, "1.5"),
                ("--depths", 1, "6,0"),
                ("--depths", 1, ""),
            )
        ),
        (("depth", "--seeds", "1,2,1"), "--seeds 1,2,1: each only once"),
        (("depth", "--depths", "6,6"), "--depths 6,6: each only once"),
    ],
)
def test_what_is_refused(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, given: tuple[str, ...], said: str
) -> None:
    ended(monkeypatch, calls, RESULT)
    assert vitx("study", *given) == (2, "", f"error: {said}\n")
    assert (6, 12, 24, 32) not in [depths for depths, *_ in calls]
