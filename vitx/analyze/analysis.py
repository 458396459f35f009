"""Any metrics of one network on one image set: one pass for all that read activations; results can be cached."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitx.analyze.activations import stream_activations
from vitx.analyze.corruption.copies import files_digest
from vitx.analyze.findings.finding import Findings, effect_text, find, p_text
from vitx.analyze.findings.rules import RULES
from vitx.analyze.metric import DEFINITIONS_VERSION, AnalysisOptions, MetricContext, NotApplicable, labels_missing
from vitx.analyze.metrics import METRICS
from vitx.analyze.metrics.cka import cka_of_networks
from vitx.analyze.metrics.trajectory import checkpoints_by_step
from vitx.analyze.options import check_metrics
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.console import log, progress
from vitx.core.errors import InputError
from vitx.core.files import Record, read_record, write_json
from vitx.core.page import table
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.models.source import Source


class _CachedResult(Record):
    """A result in a file: the metric, everything it depends on, and how long it took."""

    metric: str
    key: dict[str, Any]
    seconds: float
    result: dict[str, Any] | None
    not_applicable: str | None


@dataclass
class Analysis:
    """The results of one network by metric, why others do not apply, and the seconds each took when it was measured."""

    source: Source
    images: ImageSet
    options: AnalysisOptions
    results: dict[str, Record] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def findings(self) -> Findings:
        """What the results say of this network: every statement passed a test (docs/analyses.md)."""
        return find(self.results, RULES)

    def __repr__(self) -> str:
        return f"Analysis of {self.source.name}: {', '.join(self.results)}"

    def _repr_html_(self) -> str:
        """For notebooks: the findings, then each metric's line."""
        found = self.findings().found
        said = [
            (each.statement, f"{effect_text(each)}; baseline: {each.baseline}; adjusted {p_text(each.p)}")
            for each in found
        ]
        lines = [(METRICS[name].title, METRICS[name].line(result)) for name, result in self.results.items()]
        return table(said or [("No finding", f"of {self.source.name}")]) + table(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source.name,
            "model": self.source.spec.name,
            "checkpoint": self.source.checkpoint,
            "checkpoint_sha256": self.source.checkpoint_sha256,
            "data": self.images.name,
            "images": len(self.images),
            "options": self.options.model_dump(mode="json"),
            "findings": self.findings().model_dump(mode="json"),
            "metrics": {name: result.model_dump(mode="json") for name, result in self.results.items()},
            "not_applicable": self.not_applicable,
            "seconds": self.seconds,
        }


def chosen_metrics(only: Sequence[str] | None) -> tuple[str, ...]:
    """The metrics to measure, in the report's order: the one or those named, all for "all", or the default for None.

    Raises InputError for an unknown name.
    """
    if only is None:
        return tuple(name for name, metric in METRICS.items() if metric.default)
    names = (only,) if isinstance(only, str) else only
    check_metrics(names)
    return tuple(name for name in METRICS if name in names or "all" in names)


def analyze(
    source: Source,
    images: ImageSet,
    names: Sequence[str],
    options: AnalysisOptions,
    *,
    cache: Path | None = None,
    report: Callable[[Analysis], None] = lambda _analysis: None,
    quiet: bool = False,
) -> Analysis:
    """Measure `names`, as `chosen_metrics` takes them, in evaluation mode; modes, hooks and gradients are as before.

    cache: a folder. Results of the same checkpoint, images and options are read from it, also those of metrics that are
    not in `names`; new ones are written to it one by one. A model that was changed since it was loaded, such as by
    `half()` or without a block, is not told from the one before: give it another folder. report: called with what is
    known so far, whenever that has grown. A metric that does not apply is listed with its reason and is no error.

    Raises InputError for an unknown name, and without images.
    """
    names = chosen_metrics(names)
    if not len(images):
        raise InputError(f"no images of '{images.name}' to analyze '{source.name}' with")
    analysis = Analysis(source, images, options)
    results = _ResultCache(cache, source, images, options)
    for name in METRICS:
        reason = labels_missing(source, images) if METRICS[name].labels else None
        if reason and name in names:
            analysis.not_applicable[name] = reason
        elif not reason:
            results.read(name, analysis, quiet=quiet)
    missing = [name for name in names if name not in analysis.results and name not in analysis.not_applicable]
    shared = [name for name in missing if METRICS[name].activation is not None]
    if shared:
        _measure_shared(analysis, shared, results, quiet=quiet)
        report(analysis)
    for name in missing:
        measure = METRICS[name].measure
        if measure is not None:
            _measure_alone(analysis, name, measure, results, quiet=quiet)
            report(analysis)
    analysis.results = {name: analysis.results[name] for name in METRICS if name in analysis.results}
    return analysis


def _measure_alone(
    analysis: Analysis, name: str, measure: Callable[[MetricContext], Record], results: "_ResultCache", *, quiet: bool
) -> None:
    log(f"analyze: {METRICS[name].title}", quiet=quiet)
    start = time.perf_counter()
    try:
        analysis.results[name] = measure(MetricContext(analysis.source, analysis.images, analysis.options, quiet, name))
    except NotApplicable as reason:
        analysis.not_applicable[name] = str(reason)
    analysis.seconds[name] = time.perf_counter() - start
    results.write(name, analysis)


def compare_representations(
    first: Source,
    second: Source,
    images: ImageSet,
    options: AnalysisOptions,
    *,
    cache: Path | None = None,
    quiet: bool = False,
) -> SimilarityMatrix:
    """CKA between the units of two networks on the same images; NotApplicable where there is none.

    cache: as in `analyze`.
    """
    if cache is None:
        return cka_of_networks([first, second], images, options, "CKA of both", quiet=quiet)
    digest = images.digest()  # reads every image
    keys = [_ResultCache(cache, source, images, options, digest).key("cka") for source in (first, second)]
    path = cache / f"cka-between-{_digest(keys)}.json"
    kept = _read_kept(path, quiet=quiet)
    if kept is not None:
        with suppress(ValidationError):  # of another form: it is measured again
            return SimilarityMatrix.model_validate(kept.result)
    start = time.perf_counter()
    found = cka_of_networks([first, second], images, options, "CKA of both", quiet=quiet)
    seconds, result = time.perf_counter() - start, found.model_dump(mode="json")
    about: dict[str, Any] = {"metric": "cka-between", "key": {"networks": keys}, "not_applicable": None}
    write_json(path, _CachedResult(seconds=seconds, result=result, **about))
    return found


def _measure_shared(analysis: Analysis, names: Sequence[str], results: "_ResultCache", *, quiet: bool) -> None:
    """Measure all metrics of activations in one pass; each is charged an equal share of its seconds."""
    context = MetricContext(analysis.source, analysis.images, analysis.options, quiet)
    collectors = {name: make(context) for name in names if (make := METRICS[name].activation) is not None}
    start = time.perf_counter()
    passes = stream_activations(
        analysis.source.model,
        analysis.images,
        analysis.source.preprocessing,
        batch_size=analysis.options.batch_size,
        streams=any(METRICS[name].streams for name in names),
        maps=any(METRICS[name].maps for name in names),
        mixed=any(METRICS[name].mixed for name in names),
    )
    with progress(", ".join(names), len(analysis.images), quiet=quiet) as bar:
        done = 0
        for batch in passes:
            for collector in collectors.values():
                collector.add(batch)
            done += batch.images
            bar.update(done)
    for name, collector in collectors.items():
        try:
            analysis.results[name] = collector.result()
        except NotApplicable as reason:
            analysis.not_applicable[name] = str(reason)
        analysis.seconds[name] = (time.perf_counter() - start) / len(names)
        results.write(name, analysis)


def _digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _read_kept(path: Path | None, *, quiet: bool) -> _CachedResult | None:
    """The result in a file of the cache; None where there is none that can be read."""
    if path is None or not path.is_file():
        return None
    try:
        return read_record(path, _CachedResult)
    except InputError:
        log(f"analyze: '{path}' is damaged and counts as absent", quiet=quiet)
        return None


class _ResultCache:
    """Results as files METRIC-KEY.json in a folder; another network, image, option or definition is another key."""

    def __init__(
        self, folder: Path | None, source: Source, images: ImageSet, options: AnalysisOptions, digest: str | None = None
    ) -> None:
        """digest: the images', where it is known."""
        self._folder, self._options, self._run = folder, options, RunFolder(source.name)
        self._subject: dict[str, Any] = {}
        if folder is None:
            return
        # The same weights are another network with other arguments, and see other pixels with other preprocessing.
        about = source.spec.model_dump(mode="json"), source.preprocessing.model_dump(mode="json")
        self._subject = {"model": source.checkpoint_sha256, "about": about, "images": digest or images.digest()}
        self._subject["labels"] = labels_missing(source, images)  # and with other names of classes no answer is wrong

    def read(self, name: str, analysis: Analysis, *, quiet: bool) -> None:
        """Copy the result of `name` from its file, if there is one that can be read, into `analysis`."""
        kept = _read_kept(self._path(name), quiet=quiet)
        if kept is None:
            return
        if kept.result is not None:
            try:
                analysis.results[name] = METRICS[name].record.model_validate(kept.result)
            except ValidationError:  # of another form: it is measured again
                return
        else:
            analysis.not_applicable[name] = kept.not_applicable or ""
        analysis.seconds[name] = kept.seconds

    def write(self, name: str, analysis: Analysis) -> None:
        path = self._path(name)
        if path is not None:
            result = analysis.results.get(name)
            kept = _CachedResult(
                metric=name,
                key=self.key(name),
                seconds=analysis.seconds[name],
                result=None if result is None else result.model_dump(mode="json"),
                not_applicable=analysis.not_applicable.get(name),
            )
            write_json(path, kept)

    @cached_property
    def _copies(self) -> str:
        corrupted = self._options.corrupted
        return "" if corrupted is None else files_digest(Path(corrupted))

    @cached_property
    def _checkpoints(self) -> list[dict[str, str]]:
        return [state.sha256 for state, _ in checkpoints_by_step(self._run)]

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        try:
            key = self.key(name)
        except InputError:  # of a checkpoint that cannot be read: whoever measures says so
            return None
        return self._folder / f"{name}-{_digest(key)}.json"

    def key(self, name: str) -> dict[str, Any]:
        """What the result of `name` depends on; raise InputError for a checkpoint that cannot be read."""
        metric = METRICS[name]
        options = self._options.model_dump(include={"batch_size", *metric.options})
        if "corrupted" in options:
            options["corrupted"] = self._copies
        read = {"checkpoints": self._checkpoints} if metric.checkpoints else {}
        return {"metric": name, "version": DEFINITIONS_VERSION, **self._subject, **read, "options": options}
