"""The actor that runs on the nodes of a Ray cluster: a worker that writes temporary files, which the driver renames."""

import os
import socket
import threading
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import InputError, VitxError
from vitx.core.preprocess import ignore_bomb_warnings
from vitx.parity.executables.choice import load_fastest
from vitx.parity.executables.first_load import require_verdict
from vitx.predict.ledger import Claim
from vitx.predict.outputs.parts import Part, part_path, warm_up
from vitx.predict.pipeline.disk import full_disk_explained
from vitx.predict.pipeline.worker import Job, Worker
from vitx.predict.summary import bundle_digest

# Actors that may die while working on the same shard. Ray itself would restart them for ever.
ATTEMPTS = 10
# Columns of Ray's blocks: the `Claim`s that the driver sends, and what becomes of each: a `Finished`, a VitxError, or
# the Claim itself if it is given up after ATTEMPTS.
CLAIM, RESULT = "claim", "result"


@dataclass(frozen=True)
class Finished:
    """A shard's file. stages: how busy the actor has been, as in `Performance`. actor, node: who and where it is."""

    claim: Claim
    part: Part
    actor: str
    node: str
    stages: dict[str, float]
    runtime: dict[str, Any]


class PredictionActor:
    """A worker whose stages stay busy from one shard to the next: Ray makes several calls at the same time.

    sample: a local file of the input that the driver sees, to be seen by the actor too, or None.
    """

    def __init__(self, job: Job, bundle: Path, sample: str | None) -> None:
        self._name = uuid.uuid4().hex
        self._out = job.out
        self._failure: VitxError | None = None
        self._suspects = threading.Lock()
        self._started: float | None = None
        ignore_bomb_warnings()
        try:
            self._start(job, bundle, sample)
        except VitxError as error:  # returned by the first call: Ray would wrap what is raised here in a traceback
            self._failure = error

    def __call__(self, row: dict[str, Claim]) -> dict[str, Finished | Claim | VitxError]:
        """Do a shard. Errors of vitx are returned as results, so that Ray adds no traceback to them."""
        try:
            if self._failure is not None:
                raise self._failure
            with full_disk_explained(self._out):
                return {RESULT: self._do(row[CLAIM])}
        except VitxError as error:
            return {RESULT: error}

    def _start(self, job: Job, bundle: Path, sample: str | None) -> None:
        _check_storage(job, bundle, sample)
        opened, options = Bundle.open(bundle), job.options
        given: dict[str, Any] = {"device": options.device, "threads": options.threads, "outputs": options.outputs}
        session = load_fastest(opened, options.runtime, **given)
        if job.certified:
            require_verdict(opened, session, quiet=True)
        warm_up()
        self._worker = Worker(job, session)
        self._runtime = session.describe()

    def _do(self, claim: Claim) -> Finished | Claim:
        import ray

        self._started = self._started or time.perf_counter()
        # Each attempt appends a byte. A finished shard removes the file, so what is left is the attempts that died.
        part_file = part_path(self._out, claim.id)
        attempts = part_file.with_name(f".{part_file.name}.attempts")
        parts: list[Part] = []
        # One at a time of those that were begun before: the next death is counted for that one alone.
        with self._suspects if attempts.exists() else nullcontext():
            with attempts.open("ab") as file:
                file.write(b".")
                if file.tell() > ATTEMPTS:
                    return claim
            self._worker.run([claim], lambda _, part: parts.append(part))
            attempts.unlink(missing_ok=True)
        stages = self._worker.timer.shares(time.perf_counter() - self._started)
        node = ray.get_runtime_context().get_node_id()
        return Finished(claim, parts[0], self._name, node, stages, self._runtime)


def _check_storage(job: Job, bundle: Path, sample: str | None) -> None:
    """Raise InputError unless this node sees the output, the bundle and the input of the driver."""
    node = socket.gethostname()
    # The name of the listing is random, so it is that of this run.
    seen = {
        "the output folder": (job.out, job.listing),
        "the bundle": (bundle, bundle / MANIFEST),
        "the input": (sample,) * 2,
    }
    for what, (named, path) in seen.items():
        if path is not None and not os.path.lexists(path):
            raise InputError(
                f"the node {node} does not see {what} '{named}' of this machine: with --ray the output, the bundle and "
                "the input must lie where every node finds them under the same path (the input may be a URL)"
            )
    if bundle_digest(bundle) != job.footer["vitx.bundle_sha256"]:
        raise InputError(
            f"the bundle '{bundle}' on the node {node} differs from this machine's: give every node the same"
        )
