"""What `vitx analyze` asks for and prints, of networks that are known here."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.analyze import METRICS
from vitx.analyze.findings.differences import Difference
from vitx.analyze.findings.finding import Finding, Findings
from vitx.analyze.options import AnalysisRequest
from vitx.cli import analyze

FINDING = Finding(
    kind="k", statement="It is so.", effect=0.5, interval=None, unit="of all", baseline="none", p=0.01, metric="cka"
)
DIFFERENCE = Difference(
    quantity="top-1", first=0.5, second=0.75, difference=0.25, interval=(0.125, 0.5), p=0.01, significant=True
)
EXPORT = ("vitx", "export", "run")
Calls = list[tuple[Any, ...]]


class Images(list[int]):
    name = "digits"


def analysis(name: str, *found: Finding, **results: str) -> Any:
    findings = Findings(found=found, tests={"a": 2, "b": 3})
    return SimpleNamespace(
        source=SimpleNamespace(name=name),
        results=results,
        not_applicable={"lesions": "no blocks"},
        images=Images([0, 1]),
        findings=lambda: findings,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked for and printed, each by its name."""
    made: Calls = []

    def analyze_networks(names: list[str], *given: Any, quiet: bool) -> Any:
        made.append(("analyze", names, *given, quiet))
        found = [analysis(f"runs/{names[0]}", FINDING, cka="C"), analysis(f"runs/{names[-1]}-b", cka="D")]
        return found[: len(names)], "between"

    def compare(*given: Any) -> list[Difference]:
        made.append(("differ", *given))
        return [DIFFERENCE]

    monkeypatch.setattr("vitx.analyze.network_analyses.analyze_networks", analyze_networks)
    monkeypatch.setattr("vitx.analyze.analysis_report.report_json", lambda *given: {"given": [len(given[0]), given[1]]})
    monkeypatch.setattr("vitx.cli.next_command.export_of", lambda run, *, skip_bad: (*EXPORT[:2], run, skip_bad))
    monkeypatch.setattr(
        "vitx.analyze.findings.differences.differences",
        compare,
    )
    monkeypatch.setitem(METRICS, "cka", replace(METRICS["cka"], line=lambda result: f"line {result}"))
    for name in ("print_table", "log_next"):
        monkeypatch.setattr(analyze, name, lambda *given, name=name: made.append((name, *given)))
    return made


CHOSEN = ("cka", "lesions")
ONLY = ("--only", ",".join(CHOSEN))
REQUEST = AnalysisRequest(only=CHOSEN)
FINDINGS = ("finding", "effect", "baseline")


def test_a_network_is_its_findings_and_a_line_for_each_metric(vitx: Vitx, calls: Calls) -> None:
    assert vitx("analyze", "run", *ONLY) == (0, "", "")
    assert calls[0] == ("analyze", ["run"], tuple(name for name in METRICS if name in CHOSEN), REQUEST, False)
    found, (_, title, columns, rows), following = calls[1:]
    assert found == ("print_table", "findings of run", FINDINGS, [("It is so.", "0.5 of all", "none")])
    assert (title, columns) == ("2 images of digits", ("metric", "run"))
    assert dict(rows) == {"cka": "line C", "lesions": "not applicable: no blocks"}
    assert following == ("log_next", *EXPORT, False)
    assert vitx("analyze", "run", *ONLY, "--skip-bad")[0] == 0
    assert calls[-1] == ("log_next", *EXPORT, True)


def test_two_networks_are_set_beside_each_other(vitx: Vitx, calls: Calls) -> None:
    assert vitx("analyze", "run", "other", *ONLY) == (0, "no finding of other-b: 5 tests\n", "")
    assert calls[0][1] == ["run", "other"]
    compared = ("number", "difference")
    said = "0.5 → 0.75: +0.25 [+0.125, +0.5], p = 0.01: differs"
    assert calls[2:4] == [
        ("differ", {"cka": "C"}, {"cka": "D"}),
        ("print_table", "other-b less run", compared, [("top-1", said)]),
    ]
    _, _, columns, rows = calls[4]
    assert columns == ("metric", "run", "other-b")
    assert ("cka", "line C", "line D") in rows
    assert len(calls) == 5


def test_without_a_number_of_both_networks_there_is_no_table_of_differences(
    vitx: Vitx, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitx.analyze.findings.differences.differences", lambda *_: [])
    code, out, _ = vitx("analyze", "run", "other", *ONLY)
    assert (code, out.splitlines()[1:]) == (0, ["other-b less run: nothing was measured of both on ten images or more"])
    assert [title for name, title, *_ in calls if name == "print_table"] == ["findings of run", "2 images of digits"]


def test_one_test_is_one(vitx: Vitx, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    found = analysis("run", cka="C")
    found.findings().tests.clear()
    found.findings().tests["a"] = 1
    monkeypatch.setattr("vitx.analyze.network_analyses.analyze_networks", lambda *_, **__: ([found], None))
    assert vitx("analyze", "run", *ONLY)[:2] == (0, "no finding of run: 1 test\n")


def test_the_report_as_json(vitx: Vitx, calls: Calls) -> None:
    code, out, _ = vitx("analyze", "run", *ONLY, "--json", "--quiet")
    assert (code, json.loads(out)) == (0, {"given": [1, "between"]})
    assert [(name, *rest[3:]) for name, *rest in calls] == [("analyze", True)]


def test_of_a_model_there_is_no_run_to_export(vitx: Vitx, calls: Calls) -> None:
    for quiet in ((), ("--quiet",)):
        assert vitx("analyze", "model:net", *ONLY, *quiet)[0] == 0
    assert "log_next" not in [name for name, *_ in calls]


def test_what_is_refused_before_anything_is_measured(vitx: Vitx, calls: Calls) -> None:
    for given in (("run", "--only", "nonsense"), ("run", "")):
        assert vitx("analyze", *given)[0] == 2
    assert calls == []
