"""One process's work: take a shard → read → decode → batch → infer → write, all at the same time."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.predict.inputs.inventory import Item, read_item, read_shard
from vitx.predict.ledger.ledger import Claim
from vitx.predict.outputs.parts import Part, PartWriter, Rows, rank
from vitx.predict.pipeline.disk import Patience, is_full
from vitx.predict.pipeline.stages import Background, Clock, Sink, results, submitted
from vitx.runtimes.session import FeatureArray, FeatureSession, Float32Array, Session

STAGES = ("read", "decode", "infer", "write")
# Batches that are decoded, or being decoded, ahead of the one in the model; and that wait to be written.
BATCHES_AHEAD, BATCHES_TO_WRITE = 3, 2


def slice_size(batch_size: int, decode_threads: int) -> int:
    """Images that one thread decodes at a time: a call for each would cost as much as a tiny image."""
    return max(1, batch_size // (2 * decode_threads))


@dataclass(frozen=True)
class Job:
    """What every worker of a ledger does alike, and how this one does it."""

    out: Path
    listing: Path
    base: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    batch_size: int
    top_k: int
    logits: bool
    image_column: str | None
    strict: bool
    read_threads: int
    decode_threads: int
    # Whether some shards are ranges of single files.
    has_lists: bool = True
    # A column of features; the session is a FeatureSession then.
    embeddings: bool = False
    # See Preprocessing.from_bytes.
    draft: bool = False

    @property
    def slice_size(self) -> int:
        """See `slice_size`."""
        return slice_size(self.batch_size, self.decode_threads)


class Shards(Protocol):
    """Where a worker's shards come from and where they go. `claimed` and `commit` run in threads of their own."""

    def suffix(self) -> str:
        """Of the next file's temporary name, which no file of the same shard that others write may have."""
        ...

    def claimed(self) -> Iterator[Claim]:
        """Yield shards until there will be no more."""
        ...

    def commit(self, claim: Claim, part: Part) -> bool:
        """A shard is complete; return False, and remove its file, if it was no longer this worker's."""
        ...

    def release(self, claim: Claim) -> None:
        """The rows of a shard were lost: it is to be done again."""
        ...

    def stop(self) -> None:
        """End `claimed`."""
        ...

    def close(self) -> None:
        """Stop, and give back the shards that are not complete."""
        ...


class Prepared(NamedTuple):
    """An image's key and its pixels uint8 (S, S, 3), or why there are none."""

    key: str
    pixels: UInt8Array | ImageError


class Outputs(NamedTuple):
    """What the model said of a batch: logits (M, C) and features (M, D) of those whose error is None."""

    keys: list[str]
    errors: list[str | None]
    logits: Float32Array
    features: FeatureArray | None


class Worker:
    """Works until there are no more shards."""

    def __init__(self, job: Job, session: Session, shards: Shards, patience: Patience) -> None:
        if job.embeddings and not hasattr(session, "infer_features"):
            raise InputError("embeddings need a session that gives features: load_session(…, features=True)")
        self.job, self.session, self.shards, self.patience = job, session, shards, patience
        self.images = self.committed = 0
        # Reading from a container is one thread's work, whatever the number of readers.
        readers = job.read_threads if job.has_lists else 1
        self.clock = Clock(dict(zip(STAGES, (readers, job.decode_threads, 1, 1), strict=True)))
        self.on_progress: Callable[[], None] = lambda: None
        self._part: PartWriter | None = None
        self._dropped: Claim | None = None

    def run(self) -> None:
        """Raise CheckFailed for an unreadable image of a strict job, EnvironmentMissing when the disk stays full.

        Whatever ends the work, the shards that were begun are given back.
        """
        sink = Sink(self._write, BATCHES_TO_WRITE, "write")
        readers = ThreadPoolExecutor(self.job.read_threads, thread_name_prefix="read")
        decoders = ThreadPoolExecutor(self.job.decode_threads, thread_name_prefix="decode")
        per_batch = -(-self.job.batch_size // self.job.slice_size)
        depth = max(per_batch, self.job.read_threads)
        read = Background(submitted(readers, self._read, self._slices()), depth, "read-ahead")
        calls = submitted(decoders, self._decode, results(read))
        decoded = Background(calls, BATCHES_AHEAD * per_batch - 1, "decode-ahead")
        try:
            self._infer_all(results(decoded), sink)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise
        finally:
            self.shards.stop()
            decoded.close()  # first: it reads from the other to the end
            read.close()
            readers.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)
            if self._part is not None:
                self._part.abandon()
            self.shards.close()

    def _slices(self) -> Generator[tuple[Claim, list[Item]], None, None]:
        """Yield the images of each shard, a few at a time, and an empty list after the last of it."""
        for claim in self.shards.claimed():
            items = read_shard(claim.shard, self.job.base, self.job.listing, self.job.image_column)
            with closing(items):
                while True:
                    with self.clock.busy("read"):
                        part = list(islice(items, self.job.slice_size))
                    yield claim, part
                    if not part:
                        break

    def _read(self, part: tuple[Claim, list[Item]]) -> tuple[Claim, list[Item]]:
        with self.clock.busy("read"):
            return part[0], [read_item(item) for item in part[1]]

    def _decode(self, part: tuple[Claim, list[Item]]) -> tuple[Claim, list[Prepared]]:
        with self.clock.busy("decode"):
            return part[0], [self._prepare(item) for item in part[1]]

    def _prepare(self, item: Item) -> Prepared:
        try:
            if isinstance(item.source, bytes):
                return Prepared(item.key, self.job.preprocessing.from_bytes(item.source, draft=self.job.draft))
        except ImageError as error:
            return Prepared(item.key, error)
        assert isinstance(item.source, ImageError)  # read_item left no location
        return Prepared(item.key, item.source)

    def _infer_all(
        self, decoded: Iterator[tuple[Claim, list[Prepared]]], sink: Sink[tuple[Claim, Outputs | None]]
    ) -> None:
        """Batch what comes decoded; a batch is of one shard, so that its rows do not depend on who did the others."""
        waiting: list[Prepared] = []
        size = self.job.batch_size
        for claim, part in decoded:
            waiting += part
            while len(waiting) >= size or (waiting and not part):
                sink.put((claim, self._infer(waiting[:size])))
                self.images += len(waiting[:size])
                del waiting[:size]
                self.on_progress()
            if not part:
                sink.put((claim, None))

    def _infer(self, batch: Sequence[Prepared]) -> Outputs:
        errors = [str(item.pixels) if isinstance(item.pixels, ImageError) else None for item in batch]
        if self.job.strict:
            refuse_unreadable((item.key for item in batch), errors)
        classes = len(self.job.labels)
        logits: Float32Array = np.zeros((0, classes), dtype=np.float32)
        features: FeatureArray | None = None
        pixels = [item.pixels for item in batch if not isinstance(item.pixels, ImageError)]
        if pixels:
            with self.clock.busy("infer"):
                logits, features = self._run(np.stack(pixels))
        return Outputs([item.key for item in batch], errors, logits, features)

    def _run(self, images: UInt8Array) -> tuple[Float32Array, FeatureArray | None]:
        if self.job.embeddings:
            return cast(FeatureSession, self.session).infer_features(images)
        return self.session.infer(images), None

    def _rows(self, outputs: Outputs) -> Rows:
        """Runs in the thread of the sink: the model waits for none of it."""
        keys, errors, logits, features = outputs
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            predicted = [row for row, error in enumerate(errors) if error is None]
            for row in np.array(predicted)[~finite]:
                errors[row] = "the model's output is not finite"
            logits = logits[finite]
            features = None if features is None else features[finite]
        indices, scores = rank(logits, self.job.top_k)
        return Rows(keys, errors, indices, scores, logits if self.job.logits else None, features)

    def _write(self, message: tuple[Claim, Outputs | None]) -> None:
        """Runs in the thread of the sink. Without outputs: the shard is complete."""
        claim, outputs = message
        if self._dropped == claim:
            self._dropped = None if outputs is None else claim
            return
        try:
            with self.clock.busy("write"):
                self._put_or_drop(claim, None if outputs is None else self._rows(outputs))
        except BaseException:
            self.shards.stop()  # or the readers would wait for a shard that this worker itself holds
            raise

    def _put_or_drop(self, claim: Claim, rows: Rows | None) -> None:
        try:
            self._put(claim, rows)
        except OSError as error:
            if not is_full(error):
                raise
            self._drop(claim, complete=rows is None)
            self.patience.wait(error)

    def _put(self, claim: Claim, rows: Rows | None) -> None:
        if self._part is None:
            job = self.job
            self._part = PartWriter(
                *(job.out, claim.id, self.shards.suffix(), job.labels), logits=job.logits, embeddings=job.embeddings
            )
        if rows is not None:
            self._part.add(rows)
            return
        try:
            part = self._part.finish()
        except FileNotFoundError:  # removed as a leftover by who did the last shard: others have done this one
            self._drop(claim, complete=True)
            return
        held = self.shards.commit(claim, part)
        self._part = None
        if held:
            self.committed += part.done.images

    def _drop(self, claim: Claim, *, complete: bool) -> None:
        """The rows of a shard are lost, to a full disk: give it back, to be done again if others have not done it."""
        if self._part is not None:
            self._part.abandon()
        self._part, self._dropped = None, None if complete else claim
        self.shards.release(claim)


def refuse_unreadable(keys: Iterator[str], errors: Sequence[str | None]) -> None:
    """Raise CheckFailed naming the first image that has an error."""
    for key, error in zip(keys, errors, strict=True):
        if error is not None:
            raise CheckFailed(f"unreadable image {key}: {error}; without --strict it becomes a row")
