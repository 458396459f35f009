"""`analyze` and the comparison of two networks with metrics made here: what they are handed, kept and shown."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from vitx.analyze.analysis import Analysis, analyze, compare_representations
from vitx.analyze.findings.finding import Finding, Findings
from vitx.analyze.metric import DEFINITIONS_VERSION, AnalysisOptions, Metric, MetricContext, NotApplicable
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.files import Record
from vitx.core.page import table
from vitx.core.preprocess import ImageError, Preprocessing
from vitx.core.run import ModelSpec
from vitx.data.image_set import ImageSet
from vitx.models.source import Source

PLACE = "vitx.analyze.analysis"
OPTIONS = AnalysisOptions(batch_size=2)
MATRIX = SimilarityMatrix(layers=("a",), columns=("b",), matrix=((0.5,),))


class Things(Record):
    value: int


def metric(**fields: Any) -> Metric:
    about: dict[str, Any] = {"title": "Things", "reading": "", "precision": "", "record": Things}
    return Metric(**about, line=lambda found: f"{found.value} things", **fields)


def source(name: str = "net", digest: str = "0" * 64) -> Source:
    return Source(
        name=name,
        model=nn.Linear(1, 1),
        spec=ModelSpec(name="resnet18", num_classes=2),
        class_names=("0", "1"),
        preprocessing=Preprocessing(image_size=8, crop_fraction=1.0, mean=(0.5,) * 3, std=(0.5,) * 3),
        data="",
        checkpoint="random",
        checkpoint_sha256=digest,
    )


def image_set(*, readable: bool = True) -> ImageSet:
    def read(index: int) -> bytes:
        if not readable:
            raise ImageError("gone")
        return bytes([index])

    return ImageSet("three", ("0", "1"), ("a", "b", "c"), np.array([0, 1, 0]), read)


def given(monkeypatch: pytest.MonkeyPatch, *clock: float, **metrics: Metric) -> None:
    """These metrics alone, and a clock that shows these seconds one after the other."""
    monkeypatch.setattr(f"{PLACE}.METRICS", metrics)
    monkeypatch.setattr(f"{PLACE}.chosen_metrics", tuple)
    if clock:
        monkeypatch.setattr(f"{PLACE}.time", SimpleNamespace(perf_counter=iter(clock).__next__))


def test_a_metric_by_itself_is_handed_all_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contexts: list[MetricContext] = []

    def measure(context: MetricContext) -> Things:
        contexts.append(context)
        return Things(value=3)

    def refuse(context: MetricContext) -> Things:
        raise NotApplicable(f"{context.name} has nothing")

    given(monkeypatch, 10.0, 13.0, 20.0, 25.0, one=metric(measure=measure), other=metric(measure=refuse))
    network, images, reports = source(), image_set(readable=False), list[Analysis]()
    found = analyze(network, images, ("one", "other"), OPTIONS, report=reports.append)
    assert contexts == [MetricContext(network, images, OPTIONS, False, "one")]
    assert (found.results, found.not_applicable) == ({"one": Things(value=3)}, {"other": "other has nothing"})
    assert found.seconds == {"one": 3.0, "other": 5.0}
    assert reports == [found, found]
    assert capsys.readouterr().err == "analyze: Things\nanalyze: Things\n"


def test_the_shared_pass_records_what_is_asked_for_and_its_seconds_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    updates: list[int] = []

    def streams(*given: Any, **asking: Any) -> Iterator[Any]:
        asked.append((given, asking))
        yield from (SimpleNamespace(images=2), SimpleNamespace(images=1))

    @contextmanager
    def progress(*given: Any, **asking: Any) -> Iterator[Any]:
        asked.append((given, asking))
        yield SimpleNamespace(update=updates.append)

    class Sum:
        total = 0

        def __init__(self, context: MetricContext) -> None:
            asked.append(context)

        def add(self, batch: Any) -> None:
            self.total += batch.images

        def result(self) -> Things:
            return Things(value=self.total)

    monkeypatch.setattr(f"{PLACE}.stream_activations", streams)
    monkeypatch.setattr(f"{PLACE}.progress", progress)
    maps, mixed = metric(activation=Sum, maps=True), metric(activation=Sum, mixed=True)
    given(monkeypatch, 10.0, 16.0, 18.0, maps=maps, mixed=mixed)
    network, images = source(), image_set()
    found = analyze(network, images, ("maps", "mixed"), OPTIONS, quiet=True)
    context = MetricContext(network, images, OPTIONS, True)
    passed = (network.model, images, network.preprocessing)
    assert asked == [
        context,
        context,
        (("maps, mixed", 3), {"quiet": True}),
        (passed, {"batch_size": 2, "streams": False, "maps": True, "mixed": True}),
    ]
    assert updates == [2, 3]
    assert found.results == {"maps": Things(value=3), "mixed": Things(value=3)}
    assert found.seconds == {"maps": 3.0, "mixed": 4.0}


def test_an_analysis_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, one=metric(measure=lambda _: Things(value=3)))
    found = analyze(source(), image_set(), ("one",), OPTIONS, quiet=True)
    assert repr(found) == "Analysis of net: one"
    assert found._repr_html_() == table([("No finding", "of net")]) + table([("Things", "3 things")])
    assert found.as_json() == {
        "source": "net",
        "model": "resnet18",
        "checkpoint": "random",
        "checkpoint_sha256": "0" * 64,
        "data": "three",
        "images": 3,
        "options": OPTIONS.model_dump(mode="json"),
        "findings": {"found": [], "tests": {}},
        "metrics": {"one": {"value": 3}},
        "not_applicable": {},
        "seconds": found.seconds,
    }
    about: dict[str, Any] = {"kind": "dead", "interval": None, "unit": "points", "baseline": "none", "metric": "one"}
    dead = Finding(statement="Dead: all.", effect=1.0, p=0.01, **about)
    monkeypatch.setattr(f"{PLACE}.find", lambda *_: Findings(found=(dead,), tests={}))
    said = [("Dead: all.", "1 points; baseline: none; adjusted p = 0.01")]
    assert found._repr_html_() == table(said) + table([("Things", "3 things")])


def test_two_networks_are_compared_once_for_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def compared(*given: Any, **asking: Any) -> SimilarityMatrix:
        calls.append((given, asking))
        return MATRIX

    monkeypatch.setattr(f"{PLACE}.cka_of_networks", compared)
    monkeypatch.setattr(f"{PLACE}.time", SimpleNamespace(perf_counter=iter((10.0, 13.0, 20.0, 21.0)).__next__))
    one, other, images = source(), source("other", "1" * 64), image_set()
    for _ in range(2):
        assert compare_representations(one, other, images, OPTIONS, cache=tmp_path, quiet=True) == MATRIX
    assert calls == [(([one, other], images, OPTIONS, "CKA of both"), {"quiet": True})]
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("cka-between-")
    assert '"seconds": 3.0' in kept.read_text()
    assert '"metric": "cka-between"' in kept.read_text()
    assert compare_representations(other, one, images, OPTIONS, cache=tmp_path, quiet=True) == MATRIX
    assert (len(calls), len([*tmp_path.iterdir()])) == (2, 2), "in another order they are another comparison"
    assert compare_representations(one, other, images, OPTIONS, quiet=False) == MATRIX
    assert calls[2] == (([one, other], images, OPTIONS, "CKA of both"), {"quiet": False})


def test_a_kept_result_has_all_that_it_depends_on_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = metric(measure=lambda _: Things(value=3), options=("corrupted", "seed"), checkpoints=True)
    given(monkeypatch, one=one)
    monkeypatch.setattr(f"{PLACE}.files_digest", lambda path: f"of {path}")
    monkeypatch.setattr(f"{PLACE}.checkpoints_by_step", lambda _run: [(SimpleNamespace(sha256={"file": "f"}), None)])
    network, images, options = source(), image_set(), OPTIONS.model_copy(update={"corrupted": Path("copies")})
    analyze(network, images, ("one",), options, cache=tmp_path, quiet=True)
    (kept,) = tmp_path.iterdir()
    about = network.spec.model_dump(mode="json"), network.preprocessing.model_dump(mode="json")
    found = json.loads(kept.read_text())
    assert found["key"] == {
        "metric": "one",
        "version": DEFINITIONS_VERSION,
        "model": "0" * 64,
        "about": [*about],
        "images": images.digest(),
        "labels": None,
        "checkpoints": [{"file": "f"}],
        "options": {"batch_size": 2, "seed": 0, "corrupted": "of copies"},
    }
    kept.write_text(json.dumps({**found, "result": None}))  # and no reason why not
    again = analyze(network, images, ("one",), options, cache=tmp_path, quiet=True)
    assert (again.results, again.not_applicable) == ({}, {"one": ""})
