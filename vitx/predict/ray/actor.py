"""The actor that runs on the nodes of a Ray cluster: a worker that writes temporary files, which the driver renames."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, VitxError
from vitx.core.preprocess import ignore_bomb_warnings
from vitx.parity.executables.choice import load_fastest
from vitx.parity.executables.first_load import require_verdict
from vitx.predict.inputs.inventory import Shard
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.ledger import Claim, ShardRecord
from vitx.predict.outputs.parts import Part, part_path, warm_up
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.worker import Job, Worker
from vitx.predict.summary import bundle_digest

# Errors that travel to the driver as text and are raised there again.
ERRORS = (CheckFailed, EnvironmentMissing, InputError)
# Actors that may die while working on the same shard. Ray itself would restart them for ever.
ATTEMPTS = 10
# Columns of Ray's blocks, with one JSON text a shard: what the driver sends, and what it gets back.
CLAIM, RESULT = "claim", "result"
Column = dict[str, npt.NDArray[np.object_] | list[str]]


@dataclass(frozen=True)
class Assignment:
    """What an actor needs to work on shards of a job.

    token: a file that the driver wrote beside the ledger, with its own name as content: an actor that reads it shares
    the output folder. sample: a local file of the input that the driver sees, to be seen by the actor too, or None.
    """

    job: Job
    bundle: Path
    bundle_sha256: str
    runtime: str
    device: str
    threads: int | None
    token: Path
    sample: str | None


class QueuedShards:
    """Shards that the calls of an actor submit one by one; each call gets a future of the finished file."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
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

    def temporary_suffix(self) -> str:
        return f"{self._prefix}.{uuid.uuid4().hex}"

    def claims(self) -> Iterator[Claim]:
        while (claim := self._queue.get()) is not None:
            yield claim

    def commit(self, claim: Claim, part: Part) -> bool:
        with self._lock:
            self._parts.pop(claim.id).set_result(part)
        return True

    def release(self, claim: Claim) -> None:
        self._queue.put(claim)

    def stop(self) -> None:
        self._queue.put(None)

    def close(self) -> None:
        self.stop()


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
            return {RESULT: [self._do(claim_from_text(str(text))) for text in claims[CLAIM]]}
        except ERRORS as error:
            failed = {"error": type(error).__name__, "message": str(error)}
            return {RESULT: [json.dumps(failed)] * len(claims[CLAIM])}

    def _start(self, assignment: Assignment) -> None:
        self._token = assignment.token
        _check_storage(assignment)
        bundle = Bundle.open(assignment.bundle)
        session = load_fastest(
            bundle,
            assignment.runtime,
            device=assignment.device,
            threads=assignment.threads,
            outputs=assignment.job.outputs,
        )
        job = assignment.job
        if job.certified:
            require_verdict(bundle, session, quiet=True)
        warm_up()
        self._shards = QueuedShards(assignment.token.name)
        self._worker = Worker(job, session, self._shards, DiskFullBackoff(job.out))
        self._runtime = session.describe()
        self._started: float | None = None
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._worker.session:
                self._worker.run()
        # Any error is raised again in the calls that wait for a shard.
        except BaseException as error:  # noqa: BLE001
            self._shards.fail(error)

    def _do(self, claim: Claim) -> str:
        self._started = self._started or time.perf_counter()
        # Each attempt appends a byte. A finished shard removes the file, so what is left is the attempts that died.
        attempts = self._token.with_name(f"{self._token.name}.{claim.id}")
        with attempts.open("ab") as file:
            file.write(b".")
            if file.tell() > ATTEMPTS:
                raise EnvironmentMissing(
                    f"{ATTEMPTS} actors died while working on shard {claim.id} ({claim.shard}): Ray's logs on the "
                    "nodes say why, for example that memory ran out; finished shards are kept"
                )
        part = self._shards.submit(claim).result()
        attempts.unlink(missing_ok=True)
        return self._result_text(claim, part)

    def _result_text(self, claim: Claim, part: Part) -> str:
        import ray

        assert self._started is not None
        shares = self._worker.timer.shares(time.perf_counter() - self._started)
        return json.dumps(
            {
                "id": claim.id,
                "file": part.temporary.name,
                "record": [*part.record[:-1], asdict(part.record.skipped)],
                "actor": self._name,
                "node": ray.get_runtime_context().get_node_id(),
                "stages": shares,
                "runtime": self._runtime,
            }
        )


def claim_to_text(claim: Claim) -> str:
    shard = claim.shard
    again, attempt = sorted(claim.again), claim.attempt
    return json.dumps([claim.id, claim.kept, again, attempt, shard.kind, shard.location, shard.start, shard.count])


def claim_from_text(text: str) -> Claim:
    number, kept, again, attempt, *shard = json.loads(text)
    return Claim(number, Shard(*shard), kept, frozenset(again), attempt)


def part_from_result(result: dict[str, Any], out: Path) -> Part:
    """The finished file of an actor's result; raises the error that the actor returned instead, if it did."""
    if "error" in result:
        raise next(kind for kind in ERRORS if kind.__name__ == result["error"])(result["message"])
    digest, images, errors, classes, listed, skipped = result["record"]
    # JSON has made the classes' indices text.
    counts = {int(index): count for index, count in classes.items()}
    record = ShardRecord(digest, images, errors, counts, listed, SkippedNames(**skipped))
    path = part_path(out, result["id"])
    return Part(path, path.with_name(result["file"]), record)


def _check_storage(assignment: Assignment) -> None:
    """Raise InputError unless this node sees the output, the bundle and the input of the driver."""
    node, job = socket.gethostname(), assignment.job
    try:
        same = assignment.token.read_text() == assignment.token.name
    except OSError:
        same = False
    if not same:
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
