"""What `vitx export` asks for, prints and ends with, of bundles that are known here."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.cli import export
from vitx.export.options import ExportOptions
from vitx.export.rewrite.cost import Cost, ExplainedRewrite

ROW = ExplainedRewrite("fold", "a = b", 3, Cost(9, 8, 7_000_000, 6_000_000), Cost(4, 6, 4_000_000, 5_500_000))
Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked for and printed, each by its name."""
    made: Calls = []

    def noted(name: str, found: Any = None) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            made.append((name, *given, options) if options else (name, *given))
            return found

        return call

    loaded = SimpleNamespace(model="model", preprocessing="pixels", spec=SimpleNamespace(name="net"))
    monkeypatch.setattr("vitx.parity.exported.source_request", noted("source", SimpleNamespace(load=lambda: loaded)))
    monkeypatch.setattr("vitx.export.explain", noted("explain", [ROW]))
    monkeypatch.setattr("vitx.export.rewrite.rewrites.select_rewrites", noted("select", ("fold",)))
    for name in ("print_table", "print_result", "log_next"):
        monkeypatch.setattr(export, name, noted(name))
    return made


def exported(monkeypatch: pytest.MonkeyPatch, calls: Calls, certificate: object) -> None:
    bundle = SimpleNamespace(
        manifest=SimpleNamespace(name="net"),
        summary=lambda: {"verdict": "pass"},
        certificate=lambda: certificate,
        path=Path("net.vitx"),
    )

    def export_certified(*given: Any, **options: Any) -> Any:
        calls.append(("export", *given, options))
        return bundle

    monkeypatch.setattr("vitx.parity.exported.export_certified", export_certified)


def test_a_bundle_is_summed_up_and_its_verification_named(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    exported(monkeypatch, calls, "certificate")
    assert vitx("export", "run") == (0, "", "")
    assert calls == [
        ("export", "run", None, ExportOptions(), {"weights": "pretrained", "quiet": False}),
        ("print_result", "bundle net", {"verdict": "pass"}, {"as_json": False}),
        ("log_next", "vitx", "parity", "--verify", Path("net.vitx"), {"quiet": False}),
    ]


def test_everything_that_is_given_is_asked_for(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    exported(monkeypatch, calls, None)
    given = ("--out", "o.vitx", "--weights", "random", "--uncertified", "--json", "--quiet")
    assert vitx("export", "model:net", *given, "--model-arg", "img_size=8", "--model-arg", "depth=2")[0] == 0
    assert calls == [
        (
            "export",
            "model:net?img_size=8&depth=2",
            Path("o.vitx"),
            ExportOptions(uncertified=True),
            {"weights": "random", "quiet": True},
        ),
        ("print_result", "bundle net", {"verdict": "pass"}, {"as_json": True}),
    ]


def test_what_rewrites_remove(vitx: Vitx, calls: Calls) -> None:
    given = ("export", "run", "--explain", "--weights", "w", "--without", "x")
    assert vitx(*given) == (0, "", "")
    columns = ("rewrite", "places", "nodes", "parameters", "MFLOPs", "MB written", "identity")
    options = ExportOptions(explain=True, without=("x",))
    asked = [
        ("select", (), ("x",)),
        ("source", "run", options, "w"),
        ("explain", "model", "pixels", ("fold",)),
    ]
    title = "what each rewrite removes from net, for one image"
    assert calls == [*asked, ("print_table", title, columns, [("fold", 3, 5, 2, 3.0, 0.5, "a = b")])]
    calls.clear()
    code, out, _ = vitx(*given, "--json")
    assert (code, json.loads(out), calls) == (0, [asdict(ROW)], asked)
    said = "error: --explain only prints what rewrites remove: leave --out o out\n"
    assert vitx(*given, "--out", "o") == (2, "", said)
    assert calls == asked


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        *((("--uncertified",), "--uncertified"), (("--max-flip-rate", "0.5"), "--max-flip-rate")),
        *((("--seconds", "5"), "--seconds"), (("--device", "cpu"), "--device"), (("--skip-bad",), "--skip-bad")),
        (("--trt-rtx", "--profiles", "1"), "--trt-rtx"),
        (("--data", "digits"), "--data"),
    ],
)
def test_options_without_an_effect_on_what_is_explained(
    vitx: Vitx, calls: Calls, given: tuple[str, ...], flag: str
) -> None:
    """Some were ignored without a word. The data of a `model:` names its classes, which its last layer has."""
    said = f"error: {flag} has no effect with --explain, which only prints what rewrites remove: leave it out\n"
    assert vitx("export", "run", "--explain", *given) == (2, "", said)
    assert calls == []
    with_effect = ("--with", "fold", "--without", "x", "--checkpoint", "last")
    assert vitx("export", "run", "--explain", *with_effect)[0] == 0
    assert vitx("export", "model:net", "--explain", "--data", "digits")[0] == 0
