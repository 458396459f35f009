"""The mutants that are made of a source, and which tests are asked about them."""

import re
import textwrap
import tomllib
from pathlib import Path

import mutate
import pytest

from mutation.mutants import Mutant, mutants_of

SOURCE = textwrap.dedent(
    """
    def newest(files: "list[str]", least: int = 1) -> str:
        '''The doc stays.'''
        if len(files) < least:
            raise ValueError("none")
        files.sort()
        return files[least - 2]
    """
)


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants_of("vitx/core/newest.py", source)}


def test_each_kind_of_wrong_line_is_made_once() -> None:
    head = 'def newest(files: "list[str]", least: int = 1) -> str:'
    assert changes(SOURCE) == {
        (head, head.replace("= 1", "= 2")),
        ("if len(files) < least:", "if False:"),
        ("if len(files) < least:", "if True:"),
        ("if len(files) < least:", "if len(files) <= least:"),
        ('raise ValueError("none")', "pass"),
        ('raise ValueError("none")', 'raise ArithmeticError("none")'),
        ('raise ValueError("none")', 'raise ValueError("XXnoneXX")'),
        ("files.sort()", "pass"),
        ("return files[least - 2]", "return files[least + 2]"),
        ("return files[least - 2]", "return files[2 - least]"),
        ("return files[least - 2]", "return files[least - 3]"),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a / (b + c)", "x = (b + c) / a"),
        ("f(a, b, c)", "f(b, a, c)"),
        ("f(a, key=b)", "f(a, )"),
        ("x = min(a, b)", "x = max(a, b)"),
        ("x = not a", "x = a"),
        ("x.y = a", "pass"),
        ("await f()", "pass"),
        ("x = a if b else c", "x = a if (b) and False else c"),
        ("RATE = 0.05", "RATE = 1.05"),
    ],
)
def test_a_wrong_line_is_among_the_mutants(before: str, after: str) -> None:
    assert (before, after) in changes(f"{before}\n")


def test_how_a_dataclass_is_stored_stays() -> None:
    source = "@dataclass(frozen=True, slots=True)\nclass A: ...\n"
    assert {after for _, after in changes(source)} == {"@dataclass(frozen=False, slots=True)", "@dataclass(slots=True)"}


@pytest.mark.parametrize(("before", "after"), [("min(a, b)", "min(b, a)"), ("a.transpose(1, 2)", "a.transpose(2, 1)")])
def test_arguments_whose_order_says_nothing_stay(before: str, after: str) -> None:
    assert (before, after) not in changes(f"{before}\n")


def mutant(file: str, line: int) -> Mutant:
    return Mutant(file, line, line, "number", "1", "2", "source")


def test_the_tests_that_reach_the_line_are_asked_fastest_first_else_those_of_the_file_else_all() -> None:
    covering = {
        "lines": {"vitx/a.py": {"3": ["slow", "fast"], "4": ["other"]}},
        "seconds": {"slow": 2.0, "fast": 0.5, "other": 1.0, "elsewhere": 0.1},
    }
    assert mutate.tests_of(mutant("vitx/a.py", 3), covering) == ["fast", "slow"]
    assert mutate.tests_of(mutant("vitx/a.py", 1), covering) == ["fast", "other", "slow", "elsewhere"]
    assert mutate.tests_of(mutant("vitx/b.py", 1), covering) == ["elsewhere", "fast", "other", "slow"]


def test_a_room_without_an_entry_has_the_floor_above_it_and_the_tests_of_its_name() -> None:
    assert mutate.room_settings("train/losses") == (90.0, ["tests/train/losses"])
    assert mutate.room_settings("parity/executables/choice.py") == (90.0, ["tests/parity/executables"])
    assert mutate.room_settings("analyze/accuracy.py") == (90.0, ["tests/analyze"])
    assert mutate.room_settings("parity/options.py") == mutate.room_settings("parity")


def test_the_tests_of_a_room_are_there() -> None:
    rooms = tomllib.loads((mutate.SETTINGS / "rooms.toml").read_text(encoding="utf-8"))
    named = {test for room in rooms.values() for test in room.get("tests", ())}
    assert len(named) > 100
    missing = []
    for test in named:
        file, _, name = test.partition("::")
        path = mutate.ROOT / file
        if not path.exists() or (name and f"def {name.partition('[')[0]}(" not in path.read_text(encoding="utf-8")):
            missing.append(test)
    assert missing == []


def test_the_mutants_listed_as_equivalent_are_of_lines_that_stand() -> None:
    """`make mutate` refuses a list with others: who changes such a line removes its entry."""
    listed = tomllib.loads((mutate.SETTINGS / "equivalent.toml").read_text(encoding="utf-8"))["mutant"]
    lines = {file: (mutate.ROOT / file).read_text(encoding="utf-8").split("\n") for file in {e["file"] for e in listed}}
    stale = [e["before"] for e in listed if e["before"] not in map(str.strip, lines[e["file"]])]
    assert stale == []


def test_the_page_lists_each_report_and_each_report_is_of_code_that_stands() -> None:
    page, table = mutate.PAGE.read_text(encoding="utf-8"), mutate.table_of_scores(mutate.REPORTS)
    rooms = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(rooms) == len(set(rooms)) == len(list(mutate.REPORTS.glob("*.txt"))) > 100
    assert [room for room in rooms if not (mutate.ROOT / "vitx" / room).exists()] == []
    assert mutate.with_scores(page, table) == page, "run write_scores() of benchmarks/mutate.py"


def test_a_report_is_a_row_of_what_it_counts(tmp_path: Path) -> None:
    head = "vitx/core/a.py, 2026-11-22: 28 of 30 mutants caught, 93.3 % (floor 90 %)\n"
    (tmp_path / "2026-11-22-core-a.txt").write_text(f"{head}30 mutants, a sample of 1450; {{}}\n")
    row = "| `core/a.py` | 2026-11-22 | 30 of 1,450 | 93 % | [2](mutation/2026-11-22-core-a.txt) |\n"
    assert mutate.table_of_scores(tmp_path) == row
    page = "# A\n\n| room | date |\n|---|---|\n| `old` | 1 |\n\nbehind\n"
    assert mutate.with_scores(page, row) == f"# A\n\n| room | date |\n|---|---|\n{row}\nbehind\n"
    (tmp_path / "2026-11-22-core-b.txt").write_text("survivors: 0\n")
    with pytest.raises(SystemExit, match=r"core-b\.txt is no report of mutants"):
        mutate.table_of_scores(tmp_path)
