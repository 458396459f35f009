"""What runs on the nodes of a Ray cluster: a worker in an actor. It writes files; the driver puts them in place."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, VitxError
from vitx.predict.inputs.inventory import Shard
from vitx.predict.ledger.ledger import Claim, Done
from vitx.predict.outputs.parts import Part, part_path, warm_up
from vitx.predict.pipeline.disk import Patience
from vitx.predict.pipeline.worker import Job, Worker
from vitx.predict.summary import bundle_digest
from vitx.runtimes import load_session

ERRORS = (CheckFailed, EnvironmentMissing, InputError)
# So many actors may die with a shard in hand. Ray would go on for ever with one that ends its process.
ATTEMPTS = 10
# A column of JSON: what the driver sends of each shard, and what it gets.
CLAIM, ANSWER = "claim", "answer"
Column = dict[str, npt.NDArray[np.object_] | list[str]]


@dataclass(frozen=True)
class Assignment:
    """What an actor needs to do shards of a job.

    token: a file in the output folder that the driver wrote for this run, with its name inside. sample: a local file of
    the input that the driver sees, or None.
    """

    job: Job
    bundle: Path
    bundle_sha256: str
    runtime: str
    device: str
    threads: int | None
    token: Path
    sample: str | None


class HandedShards:
    """Shards that come one by one from elsewhere; each is answered by its finished file."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._queue: Queue[Claim | None] = Queue()
        self._parts: dict[int, Future[Part]] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def hand(self, claim: Claim) -> Future[Part]:
        """The file of a shard, when it is complete. A shard that is already being done is not begun again."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if claim.id not in self._parts:
                self._parts[claim.id] = Future()
                self._queue.put(claim)
            return self._parts[claim.id]

    def fail(self, error: BaseException) -> None:
        """Answer all that waits, and all that comes, with an error."""
        with self._lock:
            self._error = error
            for part in self._parts.values():
                part.set_exception(error)

    def suffix(self) -> str:
        return f"{self._prefix}.{uuid.uuid4().hex}"

    def claimed(self) -> Iterator[Claim]:
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
    """A pipeline that stays full from one shard to the next: calls run at the same time, and each waits for its own."""

    def __init__(self, assignment: Assignment) -> None:
        self._name = uuid.uuid4().hex
        self._failure: VitxError | None = None
        try:
            self._start(assignment)
        except VitxError as error:  # it is the driver's to tell, in one line
            self._failure = error

    def __call__(self, claims: Column) -> Column:
        """Do the shards of a batch; errors of the user's are answers, so that no traceback goes with them."""
        try:
            if self._failure is not None:
                raise self._failure
            return {ANSWER: [self._do(claim_from_text(str(text))) for text in claims[CLAIM]]}
        except ERRORS as error:
            failed = {"error": type(error).__name__, "message": str(error)}
            return {ANSWER: [json.dumps(failed)] * len(claims[CLAIM])}

    def _start(self, assignment: Assignment) -> None:
        self._token = assignment.token
        _check_storage(assignment)
        session = load_session(
            Bundle.open(assignment.bundle),
            assignment.runtime,
            device=assignment.device,
            threads=assignment.threads,
            features=assignment.job.embeddings,
        )
        warm_up()
        job = assignment.job
        self._shards = HandedShards(assignment.token.name)
        self._worker = Worker(job, session, self._shards, Patience(job.out))
        self._runtime = session.describe()
        self._started: float | None = None
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def _run(self) -> None:
        try:
            self._worker.run()
        # Whatever it was, it belongs to those who wait.
        except BaseException as error:  # noqa: BLE001
            self._shards.fail(error)

    def _do(self, claim: Claim) -> str:
        self._started = self._started or time.perf_counter()
        attempts = self._token.with_name(f"{self._token.name}.{claim.id}")
        with attempts.open("ab") as file:  # a byte for each actor that had this shard in hand
            file.write(b".")
            if file.tell() > ATTEMPTS:
                raise EnvironmentMissing(
                    f"{ATTEMPTS} actors died with shard {claim.id} ({claim.shard}) in hand: the nodes' logs of Ray say "
                    "why, for example for want of memory; what is finished stays"
                )
        part = self._shards.hand(claim).result()
        attempts.unlink(missing_ok=True)
        return self._answer(claim, part)

    def _answer(self, claim: Claim, part: Part) -> str:
        import ray

        assert self._started is not None
        shares = self._worker.clock.shares(time.perf_counter() - self._started)
        return json.dumps(
            {
                "id": claim.id,
                "file": part.temporary.name,
                "done": part.done,
                "actor": self._name,
                "node": ray.get_runtime_context().get_node_id(),
                "stages": shares,
                "runtime": self._runtime,
            }
        )


def claim_to_text(claim: Claim) -> str:
    shard = claim.shard
    return json.dumps([claim.id, shard.kind, shard.location, shard.start, shard.count])


def claim_from_text(text: str) -> Claim:
    number, *shard = json.loads(text)
    return Claim(number, Shard(*shard))


def part_from_answer(answer: dict[str, Any], out: Path) -> Part:
    """The file that an answer tells of; raise the error if it tells of one."""
    if "error" in answer:
        raise next(kind for kind in ERRORS if kind.__name__ == answer["error"])(answer["message"])
    digest, images, errors, classes = answer["done"]
    done = Done(digest, images, errors, {int(index): count for index, count in classes.items()})
    path = part_path(out, answer["id"])
    return Part(path, path.with_name(answer["file"]), done)


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
            f"the bundle '{assignment.bundle}' is another one on the node {node}: give every node the same"
        )
    if assignment.sample is not None and not os.path.lexists(assignment.sample):
        raise _unseen(node, "the input", assignment.sample)


def _unseen(node: str, what: str, path: object) -> InputError:
    return InputError(
        f"the node {node} does not see {what} '{path}' of this machine: with --ray the output, the bundle and the "
        "input must lie where every node finds them under the same path (the input may be a URL)"
    )
