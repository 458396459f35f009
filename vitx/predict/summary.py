"""`summary.json`: what was predicted, how fast, and what held it back."""

from collections import Counter
from pathlib import Path
from typing import Any

from vitx.core.bundle import MANIFEST, Bundle, timestamp
from vitx.core.files import Record, sha256_file
from vitx.core.machine import installed_versions
from vitx.predict.ledger.ledger import Ledger
from vitx.predict.outputs.parts import readable
from vitx.predict.pipeline.draft import DraftCheck
from vitx.predict.pipeline.executor import Performance
from vitx.predict.pipeline.stages import busiest

SUMMARY = "summary.json"


class PredictionSummary(Record):
    """Of the whole input: images (rows), errors (those unreadable), shards, classes (images of each).

    Of the process that wrote it: images_here, seconds, images_per_second, stages (the part of the time that each stage
    was busy, 0 to 1), binding (the busiest), runtime. Another process may have done the rest, or an earlier run.
    draft: what `--draft` changed on the sample.
    """

    format_version: int = 2
    bundle: str
    bundle_sha256: str
    certified: bool
    input: str
    images: int
    errors: int
    shards: int
    classes: dict[str, int]
    images_here: int
    seconds: float
    images_per_second: float
    binding: str
    stages: dict[str, float]
    runtime: dict[str, Any]
    versions: dict[str, str]
    created: str
    draft: DraftCheck | None = None


def summarize(
    ledger: Ledger,
    bundle: Bundle,
    source: str,
    performance: Performance,
    *,
    certified: bool,
    draft: dict[str, Any] | None = None,
) -> PredictionSummary:
    """The summary of a ledger whose shards are all done."""
    totals = ledger.totals()
    labels = bundle.manifest.labels
    counts: Counter[int] = Counter()
    for classes in ledger.classes():
        counts.update(classes)
    return PredictionSummary(
        bundle=bundle.manifest.name,
        bundle_sha256=bundle_digest(bundle.path),
        certified=certified,
        input=readable(source),
        images=totals.images,
        errors=totals.errors,
        shards=totals.shards,
        # Labels may repeat: two classes of one name are one entry.
        classes={label: sum(counts[i] for i in indices) for label, indices in _by_label(labels).items()},
        images_here=performance.images,
        seconds=performance.seconds,
        images_per_second=performance.images / performance.seconds,
        binding=busiest(performance.stages),
        stages=performance.stages,
        runtime=performance.runtime,
        versions=installed_versions(),
        created=timestamp(),
        draft=None if draft is None else DraftCheck.model_validate(draft),
    )


def bundle_digest(path: Path) -> str:
    return sha256_file(path / MANIFEST)


def _by_label(labels: tuple[str, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        found.setdefault(label, []).append(index)
    return found
