"""What `vitx train` asks for, prints and ends with, of trainings that are known here."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.cli import train
from vitx.train.loop.interruption import TrainingStopped

RECIPE = SimpleNamespace(name="mine", epochs=3, selection=SimpleNamespace(metric="nll"))
Calls = list[tuple[Any, ...]]


class Result(SimpleNamespace):
    def summary(self, metric: str) -> dict[str, str]:
        return {"summary": metric}

    def shown(self, metric: str) -> dict[str, str]:
        return {"shown": metric}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked for and printed, each by its name."""
    made: Calls = []

    def noted(name: str, found: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            made.append((name, *given, options) if options else (name, *given))
            return dict(found) if isinstance(found, dict) else found

        return call

    monkeypatch.setattr("vitx.train.recipes.registry.resolve_recipe", noted("resolve", RECIPE))
    monkeypatch.setattr("vitx.train.loop.dry_run.dry_run", noted("dry run", {"steps": 3}))
    monkeypatch.setattr("vitx.train.lr_find.lr_find", noted("lr find", {"rate": 0.5, "curve": [(0.1, 2.0)]}))
    monkeypatch.setattr("vitx.train.lr_find.rows", lambda curve: ("rows of", curve))
    monkeypatch.setattr("vitx.analyze.between_epochs.analysis_between_epochs", noted("analysis", "after"))
    for name in ("print_table", "print_fields", "print_result", "log_next"):
        monkeypatch.setattr(train, name, noted(name, None))
    return made


def trained(monkeypatch: pytest.MonkeyPatch, calls: Calls, epochs: int = 3, resumed_from: int = 0) -> None:
    def run(*given: Any, **options: Any) -> Result:
        calls.append(("train", *given, options))
        return Result(history=[{}] * epochs, resumed_from=resumed_from)

    monkeypatch.setattr("vitx.train.train", run)


def of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.train.loop.distributed.processes.is_first_process", lambda: False)


def resolved(name: str | None = "mine", **changes: Any) -> tuple[Any, ...]:
    options = {"data": None, "overrides": (), "resumed": None, "start": None, "file": None, "device": "auto"}
    return ("resolve", name, options | changes)


PLAIN = {"resume": False, "quiet": False, "skip_bad": False, "device": "auto", "wandb": None, "after_epoch": None}


def test_a_training_and_what_usually_follows(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    trained(monkeypatch, calls)
    assert vitx("train", "mine") == (0, "", "")
    folder = Path("runs/mine")
    assert calls == [
        resolved(),
        ("train", RECIPE, folder, PLAIN),
        ("print_result", f"trained {folder}", {"shown": "nll"}, {"as_json": False}),
        ("log_next", "vitx", "report", folder, {"quiet": False}),
    ]


def test_everything_that_is_given_is_asked_for(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path
) -> None:
    trained(monkeypatch, calls)
    words = ("--data", "d", "--from", "s", "--recipe", "f.toml", "--set", "a=1", "--set", "b=2", "--wandb", "w")
    given = (*words, "--out", tmp_path, "--device", "cpu", "--skip-bad", "--quiet", "--json", "--analysis-every", "2")
    assert vitx("train", "mine", *given)[0] == 0
    asked = {"skip_bad": True, "device": "cpu", "wandb": "w", "after_epoch": "after", "quiet": True}
    assert calls == [
        resolved(data="d", overrides=("a=1", "b=2"), start="s", file=Path("f.toml"), device="cpu"),
        ("analysis", tmp_path, 2, {"skip_bad": True, "quiet": True}),
        ("train", RECIPE, tmp_path, PLAIN | asked),
        ("print_result", f"trained {tmp_path}", {"summary": "nll"}, {"as_json": True}),
        ("log_next", "vitx", "report", tmp_path, "--skip-bad", {"quiet": True}),
    ]


def test_the_folder_is_named_by_the_recipe_or_its_file(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path
) -> None:
    trained(monkeypatch, calls)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"name": "of-the-file"}))
    assert vitx("train", "--recipe", file)[0] == 0
    assert calls[:2] == [resolved(None, file=file), ("train", RECIPE, Path("runs/of-the-file"), PLAIN)]
    calls.clear()
    assert vitx("train", "mine", "--resume")[0] == 0
    folder = Path("runs/mine")
    assert calls[:2] == [resolved(resumed=folder), ("train", RECIPE, folder, PLAIN | {"resume": True})]


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (TrainingStopped(signal.SIGINT), 130, "stopped by SIGINT, all is saved"),
        (TrainingStopped(signal.SIGTERM), 0, "stopped by SIGTERM, all is saved"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_training_that_is_stopped_says_how_it_goes_on(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls, error: BaseException, code: int, what: str
) -> None:
    def stopped(*_given: Any, **_options: Any) -> None:
        raise error

    def ended(number: int) -> None:  # in place of os._exit
        raise SystemExit(number)

    monkeypatch.setattr("vitx.train.train", stopped)
    monkeypatch.setattr("os._exit", ended)
    again = "vitx train mine --out 'a folder' --resume"
    given = ("train", "mine", "--out", "a folder", "--set", "a=1")
    assert vitx(*given) == (code, "", f"{what}: resume with `{again}`\n")
    more = ("--skip-bad", "--device", "cpu", "--wandb", "w", "--analysis-every", "3")
    assert vitx(*given, *more) == (code, "", f"{what}: resume with `{again} {' '.join(more)}`\n")
    assert vitx(*given, "--resume") == (code, "", f"{what}: resume with `{again} --set a=1`\n")
    of_another_process(monkeypatch)
    assert vitx(*given) == (code, "", "")


def test_why_fewer_epochs_or_none_were_trained(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    finished = "'runs/mine' has finished its 3 epochs: nothing is left to train\n"
    early = "stopped after 2 of 3 epochs: none was better for selection.patience\n"
    one = finished.replace("3 epochs", "1 epoch")
    for epochs, resumed_from, said in ((3, 3, finished), (2, 0, early), (1, 1, one), (3, 2, "")):
        trained(monkeypatch, calls, epochs, resumed_from)
        assert vitx("train", "mine") == (0, "", said)
        assert vitx("train", "mine", "--quiet") == (0, "", "")


def test_what_writes_nothing(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    folder = Path("runs/mine")
    assert vitx("train", "mine", "--dry-run") == (0, "", "")
    options = {"resume": False, "skip_bad": False, "device": "auto"}
    title = "dry run of mine, nothing is written"
    assert calls[1:] == [
        ("dry run", RECIPE, folder, options),
        ("print_result", title, {"steps": 3}, {"as_json": False}),
    ]
    calls.clear()
    assert vitx("train", "mine", "--dry-run", "--json", "--skip-bad", "--device", "cpu", "--resume") == (0, "", "")
    options = {"resume": True, "skip_bad": True, "device": "cpu"}
    assert calls[1:] == [("dry run", RECIPE, folder, options), ("print_result", title, {"steps": 3}, {"as_json": True})]
    calls.clear()
    assert vitx("train", "mine", "--lr-find") == (0, "", "")
    assert calls[1:] == [
        ("lr find", RECIPE, {"skip_bad": False, "device": "auto", "quiet": False}),
        ("print_table", "loss by learning rate", ("rate", "loss", ""), ("rows of", [(0.1, 2.0)])),
        ("print_fields", "learning rate of mine, nothing is written", {"rate": 0.5}),
    ]
    calls.clear()
    code, out, _ = vitx("train", "mine", "--lr-find", "--json", "--skip-bad", "--device", "cpu", "--quiet")
    assert (code, json.loads(out)) == (0, {"rate": 0.5, "curve": [[0.1, 2.0]]})
    assert calls[1:] == [("lr find", RECIPE, {"skip_bad": True, "device": "cpu", "quiet": True})]


def test_only_the_first_process_prints(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    of_another_process(monkeypatch)
    trained(monkeypatch, calls, 2)
    for given, did in (((), "train"), (("--dry-run",), "dry run"), (("--lr-find",), "lr find")):
        assert vitx("train", "mine", *given) == (0, "", "")
        assert [name for name, *_ in calls] == ["resolve", did]
        calls.clear()


def test_two_trials_at_once_are_refused(vitx: Vitx, calls: Calls) -> None:
    said = "error: --dry-run and --lr-find each try the recipe in their own way: leave one of them out\n"
    assert vitx("train", "mine", "--dry-run", "--lr-find") == (2, "", said)
    assert calls == []
