"""The commands that docs/studies.md prints: each is read as it stands, its networks are built, nothing is trained."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from vitx.cli import app
from vitx.train.options import StudyKind
from vitx.train.study import study as study_file
from vitx.train.study import trials
from vitx.train.study.trials import Trial

PAGE = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(vitx .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("   #")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("vitx study")
]
# What stands for something of the reader's own.
GIVEN = {"R": "digits-deit", "D": "digits", "DIR": "out", "RUN": "runs/start"}


def words_of(command: str) -> list[str]:
    words = [GIVEN.get(word, word).replace("=RUN", "=runs/start") for word in shlex.split(command)[1:]]
    return words if "--out" in words else [*words, "--out", "out"]


def test_the_page_has_a_command_of_each_kind() -> None:
    kinds = {words_of(command)[1] for command in COMMANDS}
    assert kinds == set(get_args(StudyKind))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_begins_its_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Trial] = []

    def run(_runner: trials.Runner, chosen: Sequence[Trial]) -> Iterator[tuple[Trial, str | None]]:
        begun.extend(chosen)
        yield from ((trial, "not trained here") for trial in chosen)

    monkeypatch.setattr(trials.Runner, "run", run)
    monkeypatch.setattr(study_file, "load_initial_weights", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    words = words_of(command)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output  # as no run ended
    assert "not trained here" in done.output
    seeds = words[words.index("--seeds") + 1] if "--seeds" in words else "0,1,2"
    assert [*dict.fromkeys(str(trial.seed) for trial in begun)] == seeds.split(",")
    assert len({trial.name for trial in begun}) == len(begun) >= len(seeds.split(","))
