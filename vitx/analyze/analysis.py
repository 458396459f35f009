"""Any set of metrics of one network on one set of images: one pass for what shares activations, each result kept."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitx.analyze.activations import stream_activations, stream_order
from vitx.analyze.metric import VERSION, Measured, Metric, NotApplicable, Options
from vitx.analyze.metrics import METRICS
from vitx.analyze.metrics.cka import SMALLEST_BATCH, MinibatchCKA, cka_matrix
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.console import log, progress
from vitx.core.errors import unknown_name
from vitx.core.files import Record, read_record, write_json
from vitx.data.image_set import ImageSet
from vitx.models.source import Source


class _Kept(Record):
    """A result in a file: what it is of, and what it took."""

    metric: str
    key: dict[str, Any]
    seconds: float
    result: dict[str, Any] | None
    not_applicable: str | None


@dataclass
class Analysis:
    """The results of one network, by metric; what does not apply to it and why; seconds each took when measured."""

    source: Source
    images: ImageSet
    options: Options
    results: dict[str, Record] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        info = self.source
        return {
            "source": info.name,
            "model": info.spec.name,
            "checkpoint": info.checkpoint,
            "checkpoint_sha256": info.checkpoint_sha256,
            "data": self.images.name,
            "images": len(self.images),
            "options": self.options.model_dump(mode="json"),
            "metrics": {name: result.model_dump(mode="json") for name, result in self.results.items()},
            "not_applicable": self.not_applicable,
            "seconds": self.seconds,
        }


def chosen_metrics(only: Sequence[str] | None) -> tuple[str, ...]:
    """The metrics to measure, in the report's order: those named, "all", or the default ones for None.

    Raises InputError for an unknown name.
    """
    if only is None:
        return tuple(name for name, metric in METRICS.items() if metric.default)
    for name in only:
        if name not in METRICS and name != "all":
            raise unknown_name("metric", name, (*METRICS, "all"))
    return tuple(name for name in METRICS if name in only or "all" in only)


def analyze(
    source: Source,
    images: ImageSet,
    names: Sequence[str],
    options: Options,
    *,
    cache: Path | None = None,
    quiet: bool = False,
) -> Analysis:
    """Measure `names` (of METRICS) in evaluation mode; modes, hooks and gradients are as before afterwards.

    With `cache`, a folder, results measured before of the same weights, images and options are read from it, and new
    ones written to it one by one. What does not apply is listed with its reason, never an error.
    """
    analysis = Analysis(source, images, options)
    store = _Store(cache, {"model": source.checkpoint_sha256, "images": images.digest() if cache else ""}, options)
    missing = []
    for name in names:
        reason = _labels_missing(METRICS[name], source, images)
        if reason:
            analysis.not_applicable[name] = reason
        elif not store.read(name, analysis):
            missing.append(name)
    shared = [name for name in missing if METRICS[name].activation is not None]
    _measure_shared(analysis, shared, store, quiet=quiet)
    for name in missing:
        measure = METRICS[name].measure
        if measure is not None:
            log(f"analyze: {METRICS[name].title}", quiet=quiet)
            measured = Measured(source, images, options, quiet)
            start = time.perf_counter()
            try:
                analysis.results[name] = measure(measured)
            except NotApplicable as reason:
                analysis.not_applicable[name] = str(reason)
            analysis.seconds[name] = time.perf_counter() - start
            store.write(name, analysis)
    analysis.results = {name: analysis.results[name] for name in METRICS if name in analysis.results}
    return analysis


def compare_representations(
    first: Source, second: Source, images: ImageSet, options: Options, *, quiet: bool = False
) -> SimilarityMatrix:
    """CKA between the units of two networks on the same images; NotApplicable when one has none that are known."""
    orders = [stream_order(source.model) for source in (first, second)]
    if min(map(len, orders)) < 2:
        raise NotApplicable("one of the networks has no residual units that are known")
    cka = MinibatchCKA()
    passes = [
        stream_activations(source.model, images, source.preprocessing, batch_size=options.batch_size, maps=False)
        for source in (first, second)
    ]
    with progress("CKA of both", len(images), quiet=quiet) as bar:
        done = 0
        for one, other in zip(*passes, strict=True):
            if one.images >= SMALLEST_BATCH:
                cka.add([one.streams[name] for name in orders[0]], [other.streams[name] for name in orders[1]])
            done += one.images
            bar.update(done)
    return cka_matrix(cka, *orders)


def _measure_shared(analysis: Analysis, names: Sequence[str], store: "_Store", *, quiet: bool) -> None:
    if not names:
        return
    measured = Measured(analysis.source, analysis.images, analysis.options, quiet)
    collectors = {name: METRICS[name].collector(measured) for name in names}
    start = time.perf_counter()
    passes = stream_activations(
        analysis.source.model,
        analysis.images,
        analysis.source.preprocessing,
        batch_size=analysis.options.batch_size,
        streams=any(METRICS[name].streams for name in names),
        maps=any(METRICS[name].maps for name in names),
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
        store.write(name, analysis)


def _labels_missing(metric: Metric, source: Source, images: ImageSet) -> str | None:
    """Why the images' labels cannot serve this network, if the metric needs them."""
    if not metric.labels:
        return None
    if not images.class_names:
        return "the images have no labels"
    if len(images.class_names) != len(source.class_names):
        return f"the images are of {len(images.class_names)} classes, the network knows {len(source.class_names)}"
    return None


class _Store:
    """Results as files METRIC-KEY.json of one folder; a changed network, image, option or version is another key."""

    def __init__(self, folder: Path | None, subject: Mapping[str, str], options: Options) -> None:
        self._folder, self._subject, self._options = folder, subject, options

    def read(self, name: str, analysis: Analysis) -> bool:
        """Take the result of `name` from its file, if there is one."""
        path = self._path(name)
        if path is None or not path.is_file():
            return False
        kept = read_record(path, _Kept)
        if kept.result is not None:
            analysis.results[name] = METRICS[name].record.model_validate(kept.result)
        else:
            analysis.not_applicable[name] = kept.not_applicable or ""
        analysis.seconds[name] = kept.seconds
        return True

    def write(self, name: str, analysis: Analysis) -> None:
        path = self._path(name)
        if path is not None:
            result = analysis.results.get(name)
            kept = _Kept(
                metric=name,
                key=self._key(name),
                seconds=analysis.seconds[name],
                result=None if result is None else result.model_dump(mode="json"),
                not_applicable=analysis.not_applicable.get(name),
            )
            write_json(path, kept)

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(json.dumps(self._key(name), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{name}-{digest[:16]}.json"

    def _key(self, name: str) -> dict[str, Any]:
        metric = METRICS[name]
        options = self._options.model_dump(mode="json", include={"batch_size", *metric.options})
        return {"metric": name, "version": VERSION, **self._subject, "options": options}
