"""What `vitx parity` asks for, prints and ends with, of results that are known here."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from bundle_fixture import certificate, write_bundle
from cli_fixture import Vitx
from vitx.cli import parity
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.certificate import Executable, Flip, OutputVerdict, Verdict
from vitx.core.errors import CheckFailed
from vitx.parity.check import ParityResult
from vitx.parity.divergence import LayerError, Trace
from vitx.parity.html_report import summary
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.options import ParityOptions
from vitx.parity.replay import Replay, ReplayedNumber
from vitx.parity.served import ServedComparison
from vitx.parity.trace import TraceResult

EXECUTABLE = Executable(
    runtime="onnxruntime",
    version="1.2",
    provider="CPUExecutionProvider",
    architecture="x86_64",
    precision="fp32",
    artefacts={"model.onnx": "0"},
)
OUTPUT = OutputVerdict(
    verdict="fail",
    images=9,
    worst_distance=0.5,
    mean_distance=0.25,
    allowed_distance=0.125,
    worst_length_error=1.0,
    allowed_length_error=0.1,
    exceeding=3,
    exceeding_bound=0.5,
)
PASSED = Verdict(
    executable=EXECUTABLE,
    verdict="pass",
    reasons=(),
    evidence="witness set",
    images=300,
    flip_rate_bound=0.01,
    max_logit_error=1e-5,
)
FAILED = PASSED.model_copy(update={"verdict": "fail", "reasons": ("far", "off"), "outputs": {"embedding": OUTPUT}})
EXECUTABLES = ("runtime", "version", "precision", "gives", "verdict", "images", "bound", "logit error")
PASSED_ROW = ("onnxruntime", "1.2", "fp32", "logits", "pass", 300, 0.01, 1e-5)
FAILED_ROW = ("onnxruntime", "1.2", "fp32", "logits, embedding", "fail", 300, 0.01, 1e-5)
Tables = list[tuple[Any, ...]]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Each as (title, columns, rows), or (title, fields)."""
    printed: Tables = []
    monkeypatch.setattr(parity, "print_table", lambda *table: printed.append(table))
    monkeypatch.setattr(parity, "print_fields", lambda *table: printed.append(table))
    return printed


def result_of(failures: tuple[str, ...] = (), **changes: Any) -> ParityResult:
    model = cast(LoadedModel, type("Model", (), {"run": None}))
    known: dict[str, Any] = {"certificate": certificate(), "written": False, "served": None, "trace": None}
    return ParityResult(model, model, failures=failures, notes=("why it is so",), **known | changes)


def compared(monkeypatch: pytest.MonkeyPatch, result: ParityResult) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def check(reference: Path, candidate: str, options: ParityOptions, *, quiet: bool) -> ParityResult:
        asked.append((reference, candidate, options, quiet))
        return result

    monkeypatch.setattr("vitx.parity.check.check_parity", check)
    return asked


def test_a_pair_is_compared_as_asked(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    result = result_of()
    asked = compared(monkeypatch, result)
    code, out, err = vitx("parity", "a", "b", "--images", "5", "--runtime", "torch", "--trace", "--quiet")
    assert (code, out, err) == (0, "", "why it is so\n")
    assert asked == [(Path("a"), "b", ParityOptions(images="5", runtime="torch", trace=True), True)]
    assert tables == [("parity of b with run", {"verdict": "pass", **summary(result.certificate)})]
    assert vitx("parity", "a", "b", "--json")[1] == json.dumps(result.as_json(), indent=2) + "\n"
    assert [quiet for *_, quiet in asked] == [True, False]
    assert len(tables) == 1


def test_a_served_model_is_asked_with_its_token(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    asked = compared(monkeypatch, result_of())
    url = "http://127.0.0.1:9/v2/models/m"
    assert vitx("parity", "a", url, "--token-file", "t", "--precision", "fp16", "--batch-sizes", "1")[0] == 0
    assert asked[0][1:3] == (url, ParityOptions(token_file=Path("t"), precision="fp16", batch_sizes=(1,)))
    for option in ("--served", "--trace"):
        code, _, err = vitx("parity", "a", url, option)
        assert (code, err) == (2, f"error: {option} has no effect on a served model: leave it out\n")
    for url in ("http://h/v2/models/m", "https://h/v2/models/m"):
        code, _, err = vitx("parity", url, "b")
        assert (code, err.startswith(f"error: the reference is '{url}': expected"), len(asked)) == (2, True, 1)
    assert vitx("parity", "http", "b")[0] == 0


def test_an_empty_candidate_is_no_bundle_alone(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    asked = compared(monkeypatch, result_of())
    for verify in ((), ("--verify",)):
        code, _, err = vitx("parity", "a", "", *verify)
        assert (code, err) == (2, "error: CANDIDATE '': it is empty: is a variable not set?\n")
    assert not asked


def test_a_pair_that_differs_is_an_error(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    flips = [
        Flip(key=f"{margin}.png", label=3, reference=1, candidate=2, reference_margin=margin, batch_size=8)
        for margin in range(12)
    ]
    layers = (LayerError("first", 0.5, None), LayerError("last", 0.25, 0.125, 0.75, 1.0))
    failing = certificate(flips=tuple(flips), verdict="fail")
    served = ServedComparison(
        images=9, flips=("x", "y"), flip_rate_bound=0.123456, max_error=0.25, mean_error=0, max_error_allowed=1
    )
    trace = TraceResult(Trace(9, layers, "last"), (), ())
    compared(monkeypatch, result_of(("far",), certificate=failing, served=served, trace=trace))
    code, _, err = vitx("parity", "a", "b")
    assert (code, err) == (1, "error: 'b' is not the equal of 'a': far; why it is so\n")
    over_http = {"flips over HTTP": "2, rate at most 0.12346 (95 %)", "largest error over HTTP": 0.25}
    assert tables == [
        ("parity of b with run", {"verdict": "fail", **summary(failing), **over_http}),
        (
            "the clearest of 12 flips",
            ("image", "label", "reference", "candidate", "margin", "batch size"),
            [(f"{margin}.png", 3, 1, 2, margin, 8) for margin in range(11, 1, -1)],
        ),
        (
            "error by layer, relative",
            ("layer", "error", "own", "CosSim before", "after"),
            [("first", 0.5, "", "", ""), ("last", 0.25, 0.125, 0.75, 1.0)],
        ),
    ]
    without = TraceResult(None, (), ())
    compared(monkeypatch, result_of(("far",), trace=without))
    assert (vitx("parity", "a", "b")[0], len(tables)) == (1, 4)


def judged(monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict]) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def certify(path: Path, options: ParityOptions, *, quiet: bool) -> list[Verdict]:
        asked.append((path, options, quiet))
        return verdicts

    monkeypatch.setattr("vitx.parity.executables.first_load.certify_here", certify)
    return asked


def test_a_bundle_alone_is_judged(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables, tiny_bundle: Bundle
) -> None:
    path = tiny_bundle.path
    asked = judged(monkeypatch, [PASSED])
    code, _, err = vitx("parity", path, "--runtime", "torch", "--max-flip-rate", "0.5", "--device", "cpu")
    assert (code, err) == (0, f"next: vitx serve {path}\n")
    assert asked == [(path, ParityOptions(runtime="torch", max_flip_rate=0.5, device="cpu"), False)]
    assert tables == [(f"executables of {path}", EXECUTABLES, [PASSED_ROW])]
    assert vitx("parity", path, "--quiet")[2] == ""
    assert asked[1][2]
    printed = json.loads(vitx("parity", path, "--json")[1])
    assert printed == {"bundle": str(path), "executables": [PASSED.model_dump(mode="json")]}


def test_a_bundle_alone_that_fails_is_an_error(vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    judged(monkeypatch, [PASSED, FAILED])
    code, _, err = vitx("parity", "b.vitx")
    assert (code, err) == (1, f"error: 'b.vitx' is not the checkpoint's equal in {EXECUTABLE}: far; off\n")
    assert tables == [
        ("executables of b.vitx", EXECUTABLES, [PASSED_ROW, FAILED_ROW]),
        (
            "cosine distance of further outputs from the checkpoint's",
            ("runtime", "output", "verdict", "largest distance", "mean", "allowed"),
            [("onnxruntime", "embedding", "fail", 0.5, 0.25, 0.125)],
        ),
    ]


@pytest.mark.parametrize("run", [None, "run"])
def test_a_certificate_is_replayed(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables, tiny_bundle: Bundle, run: str | None
) -> None:
    asked: list[tuple[Any, ...]] = []
    numbers = [ReplayedNumber("flips", 0, 0, True)]

    def verify(first: Path, second: Path | None, options: ParityOptions, *, quiet: bool) -> Replay:
        asked.append((first, second, options, quiet))
        return Replay(tiny_bundle, tuple(numbers), (PASSED,))

    monkeypatch.setattr("vitx.parity.replay.verify_certificate", verify)
    path = tiny_bundle.path
    command = ("parity", path, *([run] if run else []), "--verify", "--data", "digits", "--skip-bad")
    code, _, err = vitx(*command)
    assert (code, err) == (0, f"next: vitx serve {path}\n")
    asked_for = ParityOptions(verify=True, data="digits", skip_bad=True)
    assert asked == [(path, Path(run) if run else None, asked_for, False)]
    assert tables == [
        (
            f"certificate of {path}, replayed",
            ("", "certified", "measured now", ""),
            [("flips", 0, 0, "agrees")],
        ),
        (f"executables of {path}", EXECUTABLES, [PASSED_ROW]),
    ]
    numbers.append(ReplayedNumber("images", 9, 8, False))
    code, out, err = vitx(*command, "--json", "--quiet")
    assert (code, err) == (1, f"error: the certificate of '{path}' is not reproduced: images 8, certified 9\n")
    assert json.loads(out) == {
        "bundle": str(path),
        "numbers": [
            {"name": "flips", "certified": 0, "seen": 0, "agrees": True},
            {"name": "images", "certified": 9, "seen": 8, "agrees": False},
        ],
        "executables": [PASSED.model_dump(mode="json")],
    }
    assert asked[1][3]
    assert vitx(*command)[0] == 1
    assert tables[2][2][1] == ("images", 9, 8, "DIFFERS")
    code, _, err = vitx(*command, "--checkpoint", "last")
    if run is None:
        assert (code, err) == (2, "error: --checkpoint has no effect with --verify and no run: leave it out\n")
    else:
        assert (code, asked[-1][2].checkpoint) == (1, "last")
        code, _, err = vitx(*command, "--trace")
        assert (code, err) == (2, "error: --trace has no effect with --verify: leave it out\n")


def test_what_comes_next_is_to_serve_what_would_be_served(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, tables: Tables, tmp_path: Path
) -> None:
    """Nothing is said of a candidate that is no bundle."""
    compared(monkeypatch, result_of())
    bundle = write_bundle(tmp_path / "new.vitx")
    with pytest.raises(CheckFailed) as refusal:
        bundle.require_certificate()
    said = f"why it is so\nparity: vitx serve would refuse it: {refusal.value}\n"
    assert vitx("parity", "a", bundle.path) == (0, "", said)
    assert vitx("parity", "a", bundle.path, "--quiet")[2] == "why it is so\n"
    (bundle.path / MANIFEST).rename(bundle.path / "no.json")
    assert vitx("parity", "a", bundle.path)[2] == "why it is so\n"
