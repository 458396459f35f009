"""One process's work: take a shard → read → decode → batch → infer → write → commit, all at the same time."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import escape_invalid_utf8
from vitx.core.preprocess import ImageError, Preprocessing
from vitx.predict.inputs.inventory import Item, Source, read_item, read_shard
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.stores import Gone
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.ledger import Claim
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import KeptRows, Part, PartWriter, Rows, output_schema, part_path, rank
from vitx.predict.pipeline.disk import lost_disk_explained
from vitx.predict.pipeline.stages import BackgroundGenerator, StageTimer
from vitx.runtimes.session import LOGITS, Float32Array, Session

T = TypeVar("T")
V = TypeVar("V")
STAGES = ("read", "decode", "infer", "write", "commit")
# Batches that are decoded or being decoded ahead of the one in the model; batches that wait to be written; and batches
# that are written, to files, while an earlier part is committed: a store may take as long for it as a shard's images.
BATCHES_AHEAD, BATCHES_TO_WRITE, BATCHES_TO_COMMIT = 3, 2, 256


def slice_size(batch_size: int, decode_threads: int) -> int:
    """Images to a call: a call costs as much as decoding a tiny image, and threads shall end a batch at one time."""
    return max(1, batch_size // (2 * decode_threads))


@dataclass(frozen=True)
class Job:
    """What is predicted and how. listing: see `names_of`; base: the folder or URL that names are relative to.

    has_single_files: whether some shards are ranges of single image files; source: what names them. certified: whether
    what runs the bundle must have a passing verdict; without --allow-uncertified it must. footer: key-value metadata of
    each file of the output. unlisted: see `read_item`.
    """

    out: Path
    listing: Path
    base: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    options: PredictOptions
    read_threads: int
    decode_threads: int
    certified: bool
    columns: TableColumns = field(default_factory=TableColumns)
    unlisted: frozenset[str] = frozenset()
    has_single_files: bool = True
    source: Source = "folder"
    footer: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Reading:
    """A shard, and what is found in it while it is read. kept: rows of its last file, which are not made again.

    gone: the tar or Parquet file is no longer there, and all its rows are kept. uncounted: see `Item`.
    """

    claim: Claim
    kept: KeptRows | None
    skipped: SkippedNames = field(default_factory=SkippedNames)
    images: int = 0
    uncounted: int = 0
    gone: bool = False

    def remaining(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if self.kept is not None and isinstance(item.source, Gone):  # single images are not read yet
                self.images, self.gone = self.kept.keep_all(), True
                self.uncounted = self.kept.keys.count(escape_invalid_utf8(self.claim.shard.location))
                return
            self.images += 1
            if self.kept is None or not self.kept.keep(item.key):
                yield item._replace(place=self.images - 1)

    def stays(self, item: Item) -> bool:
        """Whether the row of an image is kept that was to be read again and is gone."""
        gone = isinstance(item.source, Gone) and self.claim.shard.kind == "images"
        return gone and self.kept is not None and self.kept.keep_gone(item.place)

    def listed(self) -> int:
        """How many names the shard has, as it was listed where images are counted then."""
        count = self.claim.shard.count
        return (self.images if count is None or self.gone else count) + self.skipped.count


# Images of one shard on their way through the pipeline. None follow when all of it has been read.
Images = tuple[Reading, list[Item]]


# A batch of N images: items and errors of all; outputs (M, …) by name, of the M without an error.
BatchOutputs = tuple[list[Item], list[str | None], dict[str, Float32Array]]


class Worker:
    """Runs the pipeline over shards, in threads with bounded queues between them: memory stays flat."""

    def __init__(self, job: Job, session: Session) -> None:
        wanted = job.options.outputs
        if missing := [name for name in wanted if name not in session.outputs]:
            raise InputError(f"the session gives no {missing[0]}: load_session(…, outputs={wanted})")
        self.job, self.session = job, session
        self._slice_size = slice_size(job.options.batch_size, job.decode_threads)
        # Images within a tar or Parquet file are read by one thread, whatever the number of readers.
        threads = (job.read_threads if job.has_single_files else 1, job.decode_threads, session.callers, 1, 1)
        self.timer = StageTimer(dict(zip(STAGES, threads, strict=True)))
        self._pools = {name: ThreadPoolExecutor(self.timer.threads[name], name) for name in STAGES[:3]}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def run(
        self,
        claims: Iterable[Claim],
        commit: Callable[[Claim, Part], None],
        predicted: Callable[[int], None] = lambda images: None,
    ) -> None:
        """Work on all shards; `commit` takes their finished files in order. May be called in several threads at once.

        predicted: called with the number of images of each batch that was written. Raises CheckFailed for an unreadable
        image of a strict job, EnvironmentMissing if a file cannot be written, OSError if the disk is full.
        """
        per_batch = -(-self.job.options.batch_size // self._slice_size)
        stopped = threading.Event()
        with ExitStack() as stages:

            def ahead(values: Generator[T, None, None], depth: int, name: str) -> Iterator[T]:
                # Closed the last first: it may be waiting for values of the one before.
                return iter(stages.enter_context(closing(BackgroundGenerator(values, depth, name))))

            def mapped(stage: str, function: Callable[[V], T], values: Iterator[V], depth: int) -> Iterator[T]:
                # `Executor.map` would take all values before it returns the first result.
                futures = (self._pools[stage].submit(function, value) for value in values)
                return (future.result() for future in ahead(futures, depth, f"{stage}-ahead"))

            versions, unlisted = self.job.options.incremental, self.job.unlisted
            one = partial(read_item, versions=versions, unlisted=unlisted, stopped=stopped)

            def read_one(given: Images) -> Images:
                single = given[0].claim.shard.kind == "images"
                found = single and self.job.source in ("folder", "pattern")
                return self._each("read", partial(one, single=single, found=found), given)

            decode_one = partial(self._each, "decode", self._decoded)
            read = mapped("read", read_one, self._slices(claims, stopped), max(per_batch, self.job.read_threads))
            # One less: the thread itself holds a slice while the queue is full.
            decoded = mapped("decode", decode_one, read, BATCHES_AHEAD * per_batch - 1)
            batches_ahead = max(1, self.session.callers - 1) + BATCHES_TO_WRITE
            inferred = mapped("infer", self._infer, self._batches(decoded), batches_ahead)
            written = ahead(self._written(inferred), BATCHES_TO_COMMIT, "write")
            stages.callback(stopped.set)
            for claim, done in written:
                if isinstance(done, int):
                    predicted(done)
                    continue
                with self.timer.busy("commit"):
                    commit(claim, done)

    def _slices(self, claims: Iterable[Claim], stopped: threading.Event) -> Generator[Images, None, None]:
        """Yield the images of each shard, a slice at a time, and an empty slice at the end of the shard."""
        job = self.job
        for claim in claims:
            reading = Reading(claim, KeptRows.of(part_path(job.out, claim.id), claim.kept, claim.again))
            given = (claim.shard, job.base, job.listing, job.columns, reading.skipped)
            items = read_shard(*given, versions=job.options.incremental, stopped=stopped)
            remaining = reading.remaining(items)
            images: list[Item] | None = None
            with closing(items):
                while images != []:
                    with self.timer.busy("read"):
                        images = list(islice(remaining, self._slice_size))
                    yield reading, images

    def _each(self, stage: str, work: Callable[[Item], Item], given: Images) -> Images:
        with self.timer.busy(stage):
            return given[0], [work(item) for item in given[1]]

    def _decoded(self, item: Item) -> Item:
        """The image with its pixels, or with the reason why there are none."""
        if not isinstance(item.source, bytes):
            return item
        try:
            return item._replace(source=self.job.preprocessing.from_bytes(item.source, draft=self.job.options.draft))
        except ImageError as error:
            return item._replace(source=error)

    def _batches(self, decoded: Iterator[Images]) -> Generator[Images, None, None]:
        """Yield batches, and an empty one at the end of each shard.

        A batch has images of one shard: logits may depend in their last bits on the batch, and a file must be the same
        whichever worker makes it.
        """
        waiting: list[Item] = []
        size = self.job.options.batch_size
        for reading, images in decoded:
            waiting += [item for item in images if not reading.stays(item)]
            reading.uncounted += sum(item.uncounted for item in images)
            # A full batch, or at the end of the shard what is left.
            while len(waiting) >= size or (waiting and not images):
                yield reading, waiting[:size]
                del waiting[:size]
            if not images:
                yield reading, []

    def _infer(self, given: Images) -> tuple[Reading, BatchOutputs | None]:
        """Run the model; None at the end of a shard. Called in several threads at once."""
        reading, batch = given
        if not batch:
            return reading, None
        errors = [str(item.source) if isinstance(item.source, ImageError) else None for item in batch]
        if self.job.options.strict:
            refuse_unreadable((item.key for item in batch), errors)
        outputs: dict[str, Float32Array] = {LOGITS: np.zeros((0, len(self.job.labels)), dtype=np.float32)}
        pixels = [item.source for item in batch if isinstance(item.source, np.ndarray)]
        if pixels:
            with self.timer.busy("infer"):
                found = self.session.infer_outputs(np.stack(pixels))
            outputs = {name: found[name] for name in (LOGITS, *self.job.options.outputs)}
        return reading, ([item._replace(source=b"") for item in batch], errors, outputs)

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

    def _written(
        self, inferred: Iterator[tuple[Reading, BatchOutputs | None]]
    ) -> Generator[tuple[Claim, int | Part], None, None]:
        """Write each batch and yield its number of images; at the end of a shard yield its file."""
        job, options = self.job, self.job.options
        schema = output_schema(options.lists, versions=options.incremental, footer=job.footer)
        writer: PartWriter | None = None
        try:
            for reading, batch in inferred:
                done: int | Part
                with self.timer.busy("write"), lost_disk_explained(job.out):
                    writer = writer or PartWriter(job.out, reading.claim.id, job.labels, schema, job.columns.schema)
                    if batch is not None:
                        writer.add(self._rows(batch))
                        done = len(batch[0])
                    else:
                        found = (reading.listed(), reading.skipped, reading.uncounted)
                        done, writer = writer.finish(*found, reading.kept), None
                yield reading.claim, done
        finally:
            if writer is not None:
                writer.abandon()


def refuse_unreadable(keys: Iterable[str | None], errors: Iterable[str | None]) -> None:
    """Raise CheckFailed naming the first image that has an error."""
    for key, error in zip(keys, errors, strict=True):
        if error is not None:
            raise CheckFailed(f"unreadable image {key}: {error}; without --strict it becomes a row")
