"""What `vitx predict` asks for, prints and ends with, of predictions that are known here."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.cli import predict
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.options import PredictOptions, Share
from vitx.predict.summary import Increment, PredictionSummary

SUMMARY = PredictionSummary(
    bundle="b",
    bundle_sha256="0",
    certified=True,
    input="i",
    images=100,
    errors=1,
    shards=1,
    classes={"a": 1, "b": 30, "c": 2, "d": 0, "e": 50, "f": 3, "g": 4},
    complete=True,
    sources={},
    skipped_names=SkippedNames(),
    images_here=40,
    seconds=2.5,
    images_per_second=16,
    binding="decode",
    stages={"read": 0.104, "decode": 0.95},
    runtime={},
    versions={},
    created="2026-01-01",
)
FIELDS = {
    "written to": "o/predictions.parquet",
    "unreadable": 1,
    "skipped": 0,
    "done by the last process": 40,
    "seconds": 2.5,
    "images/s": 16,
    "bound by": "decode (read 10%, decode 95%)",
    "most common": "e (50), b (30), g (4), f (3), c (2)",
    "certified": "yes",
}
Calls = list[tuple[Any, ...]]


def predicted(monkeypatch: pytest.MonkeyPatch, summary: PredictionSummary) -> Calls:
    """What was asked for, and the fields that were printed."""
    made: Calls = []

    def launch(*given: Any, quiet: bool) -> PredictionSummary:
        made.append((*given, quiet))
        return summary

    monkeypatch.setattr("vitx.predict.job.launch", launch)
    monkeypatch.setattr(predict, "print_fields", lambda *fields: made.append(fields))
    return made


def test_a_prediction_is_summed_up(vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = predicted(monkeypatch, SUMMARY)
    assert vitx("predict", "b", "i", "--out", "X/") == (0, "", "")
    fields = FIELDS | {"written to": "X/predictions.parquet"}
    assert calls == [(Path("b"), "i", "X/", PredictOptions(), False), ("100 images of i", fields)]
    assert [*calls[1][1]] == [*FIELDS]


def test_a_prediction_as_json(vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = predicted(monkeypatch, SUMMARY)
    code, out, _ = vitx("predict", "b", "i", "--out", "o", "--json", "--quiet", "--top-k", "2")
    assert (code, json.loads(out)) == (0, SUMMARY.model_dump(mode="json"))
    assert calls == [(Path("b"), "i", "o", PredictOptions(top_k=2), True)]


def test_what_was_left_out_is_told(vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 100
    skipped = SkippedNames({".txt": 2, ".md": 1}, ["a.txt", long])
    changes = {
        "images": 1,
        "uncounted": 2,
        "skipped_names": skipped,
        "increment": Increment(new=1, gone=3),
        "certified": False,
        "classes": {long: 1},
    }
    calls = predicted(monkeypatch, SUMMARY.model_copy(update=changes))
    assert vitx("predict", "b", "i", "--out", "o", "--max-error-rate", "1")[0] == 0
    short = f"{'x' * 79}…"
    told = {
        "not read to the end": 2,
        "skipped": f"3 names of no image, such as a.txt, {short}",
        "compared with the output": "1 new, 0 changed, 0 unchanged, 3 gone",
        "most common": f"{short} (1)",
        "certified": "no",
    }
    assert calls[1] == ("1 image of i", FIELDS | told)


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_unreadable_images_are_counted_after_the_numbers(
    vitx: Vitx, monkeypatch: pytest.MonkeyPatch, as_json: tuple[str, ...]
) -> None:
    asked = []
    monkeypatch.setattr(PredictionSummary, "check_errors", lambda _, *given: asked.append(given))
    calls = predicted(monkeypatch, SUMMARY)
    assert vitx("predict", "b", "i", "--out", "o", "--max-error-rate", "0.5", "--shard", "1/2", *as_json)[0] == 0
    assert asked == [(0.5, Share(1, 2))]
    assert len(calls) == 2 - len(as_json)


def test_the_error_rate_decides_the_exit_code(vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = predicted(monkeypatch, SUMMARY.model_copy(update={"errors": 2}))
    code, _, err = vitx("predict", "b", "i", "--out", "o")
    assert (code, err.startswith("error: "), len(calls)) == (1, True, 2)
    assert vitx("predict", "b", "", "--out", "o")[0] == 2
