"""`summary.json`: what was predicted, how fast, and what held it back."""

from pathlib import Path
from typing import Any

from vitx.core.bundle import MANIFEST, Bundle, timestamp
from vitx.core.errors import CheckFailed
from vitx.core.files import Record, sha256_file
from vitx.core.machine import installed_versions
from vitx.predict.ledger import Ledger
from vitx.predict.options import Share
from vitx.predict.outputs.parts import escape_invalid_utf8
from vitx.predict.pipeline.draft import DraftCheck
from vitx.predict.pipeline.executor import Performance
from vitx.predict.pipeline.stages import busiest

SUMMARY = "summary.json"


def summary_name(share: Share) -> str:
    """Of the summary's file: with --shard each job has one."""
    return SUMMARY.replace(".", f"{share.suffix}.")


class PredictionSummary(Record):
    """Counts of the whole input, and the speed of the process that wrote the file.

    Of the whole input: images (rows), errors (unreadable images), shards, classes (images by label). Of this process
    alone, as other processes or an earlier call may have done the rest: images_here, seconds, images_per_second, stages
    (the part of the time that each stage was busy, 0 to 1), binding (the busiest stage), runtime. draft: what `--draft`
    changed on the sample. shard: with `--shard` I/N, whose part of the input "whole input" is above.
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
    shard: str | None = None

    def check_errors(self, max_error_rate: float) -> None:
        """Raise CheckFailed when a larger share of the images is unreadable than `max_error_rate`."""
        if self.errors > max_error_rate * self.images:
            raise CheckFailed(
                f"{self.errors} of {self.images} images are unreadable, more than --max-error-rate {max_error_rate:g}: "
                "the column `error` has the reasons; all others are predicted"
            )


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
    images_by_label = dict.fromkeys(labels, 0)  # two classes may have the same label; they are one entry
    for counts in ledger.class_counts():
        for index, images in counts.items():
            images_by_label[labels[index]] += images
    return PredictionSummary(
        bundle=bundle.manifest.name,
        bundle_sha256=bundle_digest(bundle.path),
        certified=certified,
        input=escape_invalid_utf8(source),
        images=totals.images,
        errors=totals.errors,
        shards=totals.shards,
        classes=images_by_label,
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
