"""One process's work: take a shard → read → decode → batch → infer → write, all at the same time."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.predict.inputs.inventory import Item, read_item, read_shard
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.ledger import Claim, Shard
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import KeptRows, Part, PartWriter, Rows, part_path, rank
from vitx.predict.pipeline.disk import DiskFullBackoff, is_full
from vitx.predict.pipeline.stages import BackgroundGenerator, StageTimer, results, submitted
from vitx.runtimes.session import LOGITS, Float32Array, Session

STAGES = ("read", "decode", "infer", "write")
# Batches that are decoded or being decoded ahead of the one in the model, and batches that wait to be written.
BATCHES_AHEAD, BATCHES_TO_WRITE = 3, 2


def slice_size(batch_size: int, decode_threads: int) -> int:
    """Images that a thread decodes in one call: the overhead of a call is as much as decoding a tiny image.

    Half a thread's share of a batch, so that the threads end a batch at about the same time.
    """
    return max(1, batch_size // (2 * decode_threads))


@dataclass(frozen=True)
class Job:
    """What is predicted and how.

    listing: where the paths of single images are, see `names_of`; base: the folder or URL that they are relative to.
    """

    out: Path
    listing: Path
    base: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    options: PredictOptions
    read_threads: int
    decode_threads: int
    # Of Parquet files.
    columns: TableColumns = field(default_factory=TableColumns)
    # Whether some shards are ranges of single image files; tar and Parquet files are read by one thread.
    has_single_files: bool = True
    # Whether what runs the bundle must have a passing verdict; without --allow-uncertified it must.
    certified: bool = True
    # Of each file of the output: its key-value metadata.
    footer: Mapping[str, str] = field(default_factory=dict)


class Shards(Protocol):
    """Where a worker's shards come from and go to. `claims` runs in the reading thread, the others in the worker's."""

    def claims(self) -> Iterator[Claim]:
        """Yield shards to work on; ends when there will be no more."""

    def commit(self, claim: Claim, part: Part) -> None:
        """Take a shard's finished file."""

    def release(self, claim: Claim) -> None:
        """Give a shard back whose rows were lost: it has to be done again."""

    def stop(self) -> None:
        """End `claims`."""


@dataclass
class Reading:
    """What is found in a shard while it is read. kept: rows of its last file, which are not made again."""

    skipped: SkippedNames
    kept: KeptRows | None
    images: int = 0

    def remaining(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            self.images += 1
            if self.kept is None or not self.kept.keep(item.key):
                yield item

    def listed(self, shard: Shard) -> tuple[int, SkippedNames]:
        """How many names the shard has, as it was listed where images are counted then; and which are no images."""
        return (self.images if shard.count is None else shard.count) + self.skipped.count, self.skipped


class BatchOutputs(NamedTuple):
    """A batch of N images: items and errors of all; outputs (M, …) by name, of the M without an error."""

    items: list[Item]
    errors: list[str | None]
    outputs: dict[str, Float32Array]


class Worker:
    """Runs the pipeline over shards until there are no more.

    Three kinds of threads work at once: readers, decoders, and those that call the session; the caller's own writes.
    The queues between them are bounded, so memory does not grow with the input.
    """

    def __init__(self, job: Job, session: Session, shards: Shards, backoff: DiskFullBackoff) -> None:
        wanted = job.options.outputs
        missing = [name for name in wanted if name not in session.outputs]
        if missing:
            raise InputError(f"the session gives no {missing[0]}: load_session(…, outputs={wanted})")
        self.job, self.session, self.shards, self.backoff = job, session, shards, backoff
        # Images that were predicted, those of finished shards, and finished shards.
        self.images = self.committed = self.shards_done = 0
        self._slice_size = slice_size(job.options.batch_size, job.decode_threads)
        # Images within a tar or Parquet file are read by one thread, whatever the number of readers.
        readers = job.read_threads if job.has_single_files else 1
        threads = (readers, job.decode_threads, session.callers, 1)
        self.timer = StageTimer(dict(zip(STAGES, threads, strict=True)))
        self.on_progress: Callable[[], None] = lambda: None
        # By shard, from when it was read until it is recorded.
        self._readings: dict[int, Reading] = {}
        self._writer: PartWriter | None = None
        # The shard whose remaining rows are ignored: its first ones were lost to a full disk.
        self._dropped: Claim | None = None

    def run(self) -> None:
        """Work until there are no more shards.

        Raises CheckFailed for an unreadable image of a strict job, EnvironmentMissing if the disk stays full or the
        ledger is locked.
        """
        readers = ThreadPoolExecutor(self.job.read_threads, thread_name_prefix="read")
        decoders = ThreadPoolExecutor(self.job.decode_threads, thread_name_prefix="decode")
        callers = ThreadPoolExecutor(self.session.callers, thread_name_prefix="infer")
        per_batch = -(-self.job.options.batch_size // self._slice_size)
        depth = max(per_batch, self.job.read_threads)
        read = BackgroundGenerator(submitted(readers, self._read, self._slices()), depth, "read-ahead")
        decoding = submitted(decoders, self._decode, results(read))
        # One less: the thread itself holds a slice while the queue is full.
        decoded = BackgroundGenerator(decoding, BATCHES_AHEAD * per_batch - 1, "decode-ahead")
        inferring = submitted(callers, self._infer, self._batches(results(decoded)))
        inferred = BackgroundGenerator(inferring, max(1, self.session.callers - 1) + BATCHES_TO_WRITE, "infer-ahead")
        try:
            for claim, outputs in results(inferred):
                self._write(claim, outputs)
                if outputs is not None:
                    self.images += len(outputs.items)
                    self.on_progress()
        finally:
            self.shards.stop()
            self.backoff.stopped.set()
            for stage in (inferred, decoded, read):  # the last first: it may be waiting for values of the one before
                stage.close()
            callers.shutdown(cancel_futures=True)
            readers.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)
            if self._writer is not None:
                self._writer.abandon()

    def _slices(self) -> Generator[tuple[Claim, list[Item]], None, None]:
        """Yield the images of each shard, a slice at a time, and an empty slice at the end of the shard."""
        job = self.job
        for claim in self.shards.claims():
            reading = Reading(SkippedNames(), KeptRows.of(part_path(job.out, claim.id), claim.kept, claim.again))
            given = (claim.shard, job.base, job.listing, job.columns, reading.skipped)
            items = read_shard(*given, versions=job.options.incremental, stopped=self.backoff.stopped)
            remaining = reading.remaining(items)
            with closing(items):
                while True:
                    with self.timer.busy("read"):
                        images = list(islice(remaining, self._slice_size))
                    if not images:
                        self._readings[claim.id] = reading
                    yield claim, images
                    if not images:
                        break

    def _read(self, images: tuple[Claim, list[Item]]) -> tuple[Claim, list[Item]]:
        with self.timer.busy("read"):
            versions, stopped = self.job.options.incremental, self.backoff.stopped
            return images[0], [read_item(item, versions=versions, stopped=stopped) for item in images[1]]

    def _decode(self, images: tuple[Claim, list[Item]]) -> tuple[Claim, list[Item]]:
        with self.timer.busy("decode"):
            return images[0], [self._prepare(item) for item in images[1]]

    def _prepare(self, item: Item) -> Item:
        """The image with its pixels, or with the reason why there are none."""
        if not isinstance(item.source, bytes):
            return item
        try:
            return item._replace(source=self.job.preprocessing.from_bytes(item.source, draft=self.job.options.draft))
        except ImageError as error:
            return item._replace(source=error)

    def _batches(self, decoded: Iterator[tuple[Claim, list[Item]]]) -> Generator[tuple[Claim, list[Item]], None, None]:
        """Yield batches, and an empty one at the end of each shard.

        A batch has images of one shard only: logits may depend in their last bits on the batch, and a shard's file
        must be the same whichever worker makes it, after whichever other shard.
        """
        waiting: list[Item] = []
        size = self.job.options.batch_size
        for claim, images in decoded:
            waiting += images
            # A full batch, or at the end of the shard what is left.
            while len(waiting) >= size or (waiting and not images):
                yield claim, waiting[:size]
                del waiting[:size]
            if not images:
                yield claim, []

    def _infer(self, images: tuple[Claim, list[Item]]) -> tuple[Claim, BatchOutputs | None]:
        """Run the model; None at the end of a shard. Called in several threads at once."""
        claim, batch = images
        if not batch:
            return claim, None
        errors = [str(item.source) if isinstance(item.source, ImageError) else None for item in batch]
        if self.job.options.strict:
            refuse_unreadable((item.key for item in batch), errors)
        outputs: dict[str, Float32Array] = {LOGITS: np.zeros((0, len(self.job.labels)), dtype=np.float32)}
        pixels = [item.source for item in batch if isinstance(item.source, np.ndarray)]
        if pixels:
            with self.timer.busy("infer"):
                outputs = self._run(np.stack(pixels))
        return claim, BatchOutputs([item._replace(source=b"") for item in batch], errors, outputs)

    def _run(self, images: UInt8Array) -> dict[str, Float32Array]:
        if not (wanted := self.job.options.outputs):
            return {LOGITS: self.session.infer(images)}
        found = self.session.infer_outputs(images)
        return {name: found[name] for name in (LOGITS, *wanted)}

    def _rows(self, batch: BatchOutputs) -> Rows:
        """Rank the classes; an image of whose outputs a value is not finite becomes one with an error."""
        items, errors, outputs = batch
        finite = np.all([np.isfinite(values).all(axis=1) for values in outputs.values()], axis=0)
        if not finite.all():
            predicted = [row for row, error in enumerate(errors) if error is None]
            for row in np.array(predicted)[~finite]:
                errors[row] = "the model's output is not finite"
            outputs = {name: values[finite] for name, values in outputs.items()}
        indices, scores = rank(outputs[LOGITS], self.job.options.top_k)
        lists = {name: outputs[name] for name in self.job.options.lists if name in outputs}
        keys, copied, versions = ([getattr(item, name) for item in items] for name in ("key", "copied", "version"))
        return Rows(keys, errors, indices, scores, lists, copied, versions)

    def _write(self, claim: Claim, outputs: BatchOutputs | None) -> None:
        """Write a batch, or commit the shard when there are no outputs."""
        if self._dropped == claim:
            self._dropped = None if outputs is None else claim  # at its end: it comes again
            return
        with self.timer.busy("write"):
            try:
                self._put(claim, None if outputs is None else self._rows(outputs))
            except OSError as error:
                if not is_full(error):
                    raise
                self._drop(claim, complete=outputs is None)
                self.backoff.wait(error)

    def _put(self, claim: Claim, rows: Rows | None) -> None:
        if self._writer is None:
            job = self.job
            self._writer = PartWriter(
                *(job.out, claim.id, job.labels),
                lists=job.options.lists,
                versions=job.options.incremental,
                copied=job.columns.schema,
                footer=job.footer,
            )
        if rows is not None:
            self._writer.add(rows)
            return
        reading = self._readings.pop(claim.id)
        self._writer.listed, self._writer.kept = reading.listed(claim.shard), reading.kept
        try:
            part = self._writer.finish()
        except FileNotFoundError:  # removed, or of rows that are kept: another actor of Ray has finished the shard
            self._drop(claim, complete=True)
            return
        self.shards.commit(claim, part)
        self._writer = None
        self.committed += part.record.images
        self.shards_done += 1

    def _drop(self, claim: Claim, *, complete: bool) -> None:
        """Give a shard back whose rows are lost. complete: all its rows have come, so there are none to ignore."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer, self._dropped = None, None if complete else claim
        self.shards.release(claim)


def refuse_unreadable(keys: Iterator[str], errors: Sequence[str | None]) -> None:
    """Raise CheckFailed naming the first image that has an error."""
    for key, error in zip(keys, errors, strict=True):
        if error is not None:
            raise CheckFailed(f"unreadable image {key}: {error}; without --strict it becomes a row")
