"""The actor that runs on the nodes of a Ray cluster: a worker that writes temporary files, which the driver renames."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError, VitxError
from vitx.core.preprocess import ignore_bomb_warnings
from vitx.parity.executables.choice import load_fastest
from vitx.parity.executables.first_load import require_verdict
from vitx.predict.ledger import Claim
from vitx.predict.outputs.parts import Part, part_path, warm_up
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.worker import Job, Worker
from vitx.predict.summary import bundle_digest

# Actors that may die while working on the same shard. Ray itself would restart them for ever.
ATTEMPTS = 10
# Columns of Ray's blocks: the `Claim`s that the driver sends, and what becomes of each: a `Finished`, a VitxError, or
# the Claim itself if it is given up after ATTEMPTS.
CLAIM, RESULT = "claim", "result"
Column = dict[str, npt.NDArray[np.object_] | list[Any]]


@dataclass(frozen=True)
class Assignment:
    """What an actor needs to work on shards of a job.

    sample: a local file of the input that the driver sees, to be seen by the actor too, or None.
    """

    job: Job
    bundle: Path
    bundle_sha256: str
    runtime: str
    device: str
    threads: int | None
    sample: str | None


@dataclass(frozen=True)
class Finished:
    """A shard's file. stages: how busy the actor has been, as in `Performance`. actor, node: who and where it is."""

    claim: Claim
    part: Part
    actor: str
    node: str
    stages: dict[str, float]
    runtime: dict[str, Any]


class QueuedShards:
    """Shards that the calls of an actor submit one by one; each call gets a future of the finished file."""

    def __init__(self) -> None:
        self._queue: Queue[Claim | None] = Queue()
        # Shards that are submitted and not finished, by id.
        self._parts: dict[int, Future[Part]] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, claim: Claim) -> Future[Part]:
        """Queue a shard. One that is queued already is not begun again: Ray may repeat a call."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if claim.id not in self._parts:
                self._parts[claim.id] = Future()
                self._queue.put(claim)
            return self._parts[claim.id]

    def fail(self, error: BaseException) -> None:
        """Give this error to all that wait, and raise it to all that come later."""
        with self._lock:
            self._error = error
            for part in self._parts.values():
                part.set_exception(error)

    def claims(self) -> Iterator[Claim]:
        while (claim := self._queue.get()) is not None:
            yield claim

    def commit(self, claim: Claim, part: Part) -> None:
        with self._lock:
            self._parts.pop(claim.id).set_result(part)

    def release(self, claim: Claim) -> None:
        self._queue.put(claim)

    def stop(self) -> None:
        self._queue.put(None)


class PredictionActor:
    """A worker whose pipeline stays full from one shard to the next.

    Ray makes several calls at the same time; each submits its shard and waits for it, so that the worker reads the next
    shard while it writes the last one.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._name = uuid.uuid4().hex
        self._failure: VitxError | None = None
        ignore_bomb_warnings()
        try:
            self._start(assignment)
        except VitxError as error:  # returned by the first call: Ray would wrap what is raised here in a traceback
            self._failure = error

    def __call__(self, claims: Column) -> Column:
        """Do the shards of a batch. Errors of vitx are returned as results, so that Ray adds no traceback to them."""
        try:
            if self._failure is not None:
                raise self._failure
            return {RESULT: [self._do(claim) for claim in claims[CLAIM]]}
        except VitxError as error:
            return {RESULT: [error] * len(claims[CLAIM])}

    def _start(self, assignment: Assignment) -> None:
        job = assignment.job
        self._out = job.out
        _check_storage(assignment)
        bundle = Bundle.open(assignment.bundle)
        session = load_fastest(
            *(bundle, assignment.runtime),
            device=assignment.device,
            threads=assignment.threads,
            outputs=job.options.outputs,
        )
        if job.certified:
            require_verdict(bundle, session, quiet=True)
        warm_up()
        self._shards = QueuedShards()
        self._worker = Worker(job, session, self._shards, DiskFullBackoff(job.out))
        self._runtime = session.describe()
        self._started: float | None = None
        self._suspects = threading.Lock()
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._worker.session:
                self._worker.run()
        # Any error is raised again in the calls that wait for a shard.
        except BaseException as error:  # noqa: BLE001
            self._shards.fail(error)

    def _do(self, claim: Claim) -> Finished | Claim:
        import ray

        self._started = self._started or time.perf_counter()
        # Each attempt appends a byte. A finished shard removes the file, so what is left is the attempts that died.
        part_file = part_path(self._out, claim.id)
        attempts = part_file.with_name(f".{part_file.name}.attempts")
        # One at a time of those that were begun before: the next death is counted for that one alone.
        with self._suspects if attempts.exists() else nullcontext():
            with attempts.open("ab") as file:
                file.write(b".")
                if file.tell() > ATTEMPTS:
                    return claim
            part = self._shards.submit(claim).result()
            attempts.unlink(missing_ok=True)
        stages = self._worker.timer.shares(time.perf_counter() - self._started)
        node = ray.get_runtime_context().get_node_id()
        return Finished(claim, part, self._name, node, stages, self._runtime)


def _check_storage(assignment: Assignment) -> None:
    """Raise InputError unless this node sees the output, the bundle and the input of the driver."""
    node, job = socket.gethostname(), assignment.job
    if not job.listing.is_file():  # its name is random, so it is that of this run
        raise _unseen(node, "the output folder", job.out)
    try:
        digest = bundle_digest(assignment.bundle)
    except OSError:
        raise _unseen(node, "the bundle", assignment.bundle) from None
    if digest != assignment.bundle_sha256:
        raise InputError(
            f"the bundle '{assignment.bundle}' on the node {node} differs from this machine's: give every node the same"
        )
    if assignment.sample is not None and not os.path.lexists(assignment.sample):
        raise _unseen(node, "the input", assignment.sample)


def _unseen(node: str, what: str, path: object) -> InputError:
    return InputError(
        f"the node {node} does not see {what} '{path}' of this machine: with --ray the output, the bundle and the "
        "input must lie where every node finds them under the same path (the input may be a URL)"
    )
