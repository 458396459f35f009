"""`summary.json`: what was predicted, how fast, and what held it back."""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitx.core.bundle import Bundle, timestamp
from vitx.core.console import counted
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import Record, escape_invalid_utf8, read_record, remove_unfinished, write_json
from vitx.core.machine import installed_versions
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.stores import shown
from vitx.predict.ledger import Ledger
from vitx.predict.options import WHOLE, Share
from vitx.predict.outputs.parts import PREDICTIONS
from vitx.predict.pipeline.draft import DraftCheck
from vitx.predict.pipeline.executor import Performance
from vitx.predict.pipeline.stages import busiest

SUMMARY = "summary.json"
# What a run, and the jobs of a --shard, write into the output's folder, beside names that begin with a dot.
OUTPUT_NAMES = re.compile(rf"(?s){re.escape(PREDICTIONS)}/.*|summary(-[0-9]{{5,}}-of-[0-9]{{5,}})?\.json")
# What the summary says of the process that wrote it alone.
OF_THE_PROCESS = ("images_here", "seconds", "images_per_second", "binding", "stages", "runtime", "versions", "created")


def summary_name(share: Share) -> str:
    """Of the summary's file: with --shard each job has one."""
    return SUMMARY.replace(".", f"{share.suffix}.")


class SourceCounts(Record):
    """Names of one kind of source: all that were listed, and what became of them."""

    listed: int = 0
    predicted: int = 0
    unreadable: int = 0
    skipped: int = 0

    @property
    def missing(self) -> int:
        return self.listed - self.predicted - self.unreadable - self.skipped


class Increment(Record):
    """Names (single images, tar and Parquet files) of an input, compared with the output when the process began.

    new: not in the output. changed: of another version than was read. gone: no longer in the input; their rows stay.
    """

    new: int = 0
    changed: int = 0
    unchanged: int = 0
    gone: int = 0

    def __str__(self) -> str:
        return f"{self.new} new, {self.changed} changed, {self.unchanged} unchanged, {self.gone} gone"


class PredictionSummary(Record):
    """Counts of the whole input (with `shard` I/N, of that part), and the speed of the process that wrote the file.

    images: rows. errors: unreadable images. classes: images by label. uncounted: files and folders not read to their
    end. complete: there are none, and all names that were listed are among `sources`. Of this process alone:
    images_here, seconds, images_per_second, stages (the part of the time that each was busy, 0 to 1), binding (the
    busiest), runtime. draft: what `--draft` changed on the sample.
    """

    format_version: int = 4
    bundle: str
    bundle_sha256: str
    certified: bool
    input: str
    images: int
    errors: int
    uncounted: int = 0
    shards: int
    classes: dict[str, int]
    complete: bool
    sources: dict[str, SourceCounts]
    skipped_names: SkippedNames
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
    increment: Increment | None = None

    def check_errors(self, max_error_rate: float, share: Share = WHOLE) -> None:
        """Raise CheckFailed unless complete, and if a larger share of images is unreadable than `max_error_rate`.

        With a rate of 1 files may be `uncounted`: of their images no rate is known.
        share: of the input that was predicted; how to begin anew depends on it.
        """
        for source, counts in self.sources.items():
            if counts.missing:
                raise CheckFailed(
                    f"not complete: of {counts.listed} names listed ({source}) {counts.predicted} were predicted, "
                    f"{counts.unreadable} are unreadable and {counts.skipped} were skipped. The input or the ledger in "
                    f".vitx was changed meanwhile: choose another folder, or {share.anew}"
                )
        if self.uncounted and max_error_rate < 1:
            raise CheckFailed(
                f"not complete: files and folders that could not be read to their end: {self.uncounted}. How many "
                "images are missing is not known; the column `error` has the reasons. Mend them and pass "
                "--retry-errors (for a folder begin anew), or --max-error-rate 1 to do without them"
            )
        if self.images and self.errors / self.images > max_error_rate:
            raise CheckFailed(
                f"{self.errors} of {counted(self.images, 'image')} {'is' if self.errors == 1 else 'are'} unreadable, "
                f"more than --max-error-rate {max_error_rate:g}: the column `error` has the reasons; "
                "all others are predicted"
            )


def summarize(
    ledger: Ledger,
    bundle: Bundle,
    performance: Performance,
    certified: bool,
    shard: Share | None = None,
    increment: Increment | None = None,
) -> PredictionSummary:
    """The summary of a ledger whose shards are all done."""
    totals, run = ledger.totals(), ledger.description()
    labels = bundle.manifest.labels
    images_by_label = dict.fromkeys(labels, 0)  # two classes may have the same label; they are one entry
    source, skipped = run["source"], SkippedNames(**run["skipped"])
    counted, uncounted = defaultdict[str, Counter[str]](Counter), 0
    if skipped.count:
        counted[source].update(listed=skipped.count, skipped=skipped.count)
    for _, kind, record in ledger.records():
        of_shard = {"listed": record.listed, "unreadable": record.errors, "skipped": record.skipped.count}
        counted[source if kind == "images" else kind].update(of_shard, predicted=record.images - record.errors)
        skipped.merge(record.skipped)
        uncounted += record.uncounted
        for index, images in record.classes.items():
            images_by_label[labels[index]] += images
    sources = {name: SourceCounts(**counts) for name, counts in counted.items()}
    return PredictionSummary(
        bundle=bundle.manifest.name,
        bundle_sha256=run["bundle"],  # not of the folder, where another may lie by now
        certified=certified,
        input=escape_invalid_utf8(shown(run["input"])),
        images=totals.images,
        errors=totals.errors,
        shards=totals.shards,
        classes=images_by_label,
        uncounted=uncounted,
        complete=not uncounted and not any(counts.missing for counts in sources.values()),
        sources=sources,
        skipped_names=SkippedNames(
            {escape_invalid_utf8(suffix): count for suffix, count in skipped.by_suffix.items()},
            [escape_invalid_utf8(name) for name in skipped.first],
        ),
        **performance._asdict(),
        images_per_second=performance.images_here / performance.seconds,
        binding=busiest(performance.stages),
        versions=installed_versions(),
        created=timestamp(),
        draft=run["measured"].get("draft"),
        shard=None if shard is None else f"{shard.number}/{shard.jobs}",
        increment=increment,
    )


def write_summary(path: Path, summary: PredictionSummary) -> PredictionSummary:
    """Write it and return it as written: if this process did no image, with the speed of the last one that did."""
    remove_unfinished(path)
    before = None
    with suppress(InputError):  # it is not there, or damaged: all that counts is in the ledger
        before = read_record(path, PredictionSummary)
    if before is not None and not summary.images_here:
        summary = summary.model_copy(update=before.model_dump(include=set(OF_THE_PROCESS)))
    if summary != before:
        write_json(path, summary)
    return summary
