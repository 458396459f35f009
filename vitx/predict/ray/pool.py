"""A job's shards through Ray Data: a pool of actors on a cluster does them; this process, the driver, commits them."""

import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vitx.core.bundle import Bundle
from vitx.core.console import Progress
from vitx.core.errors import EnvironmentMissing, InputError, missing_package
from vitx.core.ray_connection import LOCAL, cluster_nodes, joined
from vitx.predict.inputs.listing import Range, read_range
from vitx.predict.inputs.stores import is_url, join
from vitx.predict.ledger.ledger import Claim, Ledger
from vitx.predict.outputs.parts import Part, remove_leftovers
from vitx.predict.pipeline.disk import Patience
from vitx.predict.pipeline.executor import Performance, Told
from vitx.predict.pipeline.leases import LeasedShards
from vitx.predict.pipeline.worker import BATCHES_AHEAD, STAGES, Job
from vitx.predict.ray.actor import ANSWER, CLAIM, Assignment, PredictionActor, claim_to_text, part_from_answer
from vitx.predict.summary import bundle_digest
from vitx.runtimes.requirements import RUNTIMES
from vitx.runtimes.session import device_name

if TYPE_CHECKING:
    from ray.data import Dataset

# Shards that are claimed at once; between two such rounds the actors are begun anew.
ROUND = 10_000
# Of a cluster that we start: only claims and answers lie in it.
OBJECT_STORE_BYTES = 100 << 20


class Size(NamedTuple):
    """Of the pool: CPUs and GPUs that are reserved for an actor; actors at least, at first, and at most."""

    cpus: int
    gpus: int
    least: int
    first: int
    most: int


class RayPool:
    """An Executor on a Ray cluster.

    address: "local" starts a cluster of this machine and ends it; another one is joined as `ray.init` does. actors:
    (least, most); by default one a GPU or, on CPUs, as many as fit the nodes. threads (of a session) and
    decode_threads: of one actor; by default a GPU's share of its node's CPUs, or all CPUs of the smallest node.

    Raises EnvironmentMissing without ray, InputError for an unknown device or the address of a Ray client (ray://).
    """

    def __init__(
        self,
        bundle: Bundle,
        address: str = LOCAL,
        *,
        actors: tuple[int, int] | None = None,
        runtime: str = "onnxruntime",
        device: str = "auto",
        threads: int | None = None,
        decode_threads: int | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise missing_package("ray", "ray")
        if address.startswith("ray://"):
            raise InputError(
                f"--ray {address}: Ray Data does not run through a Ray client; run the command on a machine of the "
                "cluster with --ray auto, or give the cluster's own address HOST:PORT"
            )
        self._bundle, self._address, self._actors = bundle, address, actors
        self._runtime, self._device = runtime, device_name(device)
        self._threads, self._decode_threads = threads, decode_threads

    def execute(self, job: Job, ledger: Ledger, patience: Patience, bar: Progress) -> Performance:
        """See `Executor`. Raises EnvironmentMissing when the cluster cannot be joined or has too little, InputError
        when a node does not see the input, the bundle or the output of this machine."""
        told = Told(ledger, bar)
        shards = LeasedShards(ledger, patience)
        try:
            claims = shards.take(ROUND)
            if not claims:
                return Performance(0, told.seconds(), dict.fromkeys(STAGES, 0.0), {})
            # Ray writes to standard output what happens to its actors; that is for our result.
            with redirect_stdout(sys.stderr), _token(job) as token, _driving(self._address):
                size = self._size()
                assignment = self._assignment(job, token, size, claims[0])
                done = _Answers(shards, job, told)
                while claims:
                    done.commit(claims, _dataset(claims, assignment, size))
                    claims = shards.take(ROUND)
                return done.performance()
        finally:
            shards.close()

    def _size(self) -> Size:
        """Of the pool, from what the nodes have now."""
        nodes = [node["Resources"] for node in cluster_nodes()]
        cpus = max(self._threads or 0, self._decode_threads or 0)
        if self._wants_gpu(any("GPU" in node for node in nodes)):
            nodes = [node for node in nodes if node.get("GPU", 0) >= 1]
            share = min((node.get("CPU", 0) / node["GPU"] for node in nodes), default=1)
            cpus, gpus = self._decode_threads or max(1, int(share)), 1
            fit = sum(int(min(node["GPU"], node.get("CPU", 0) // cpus)) for node in nodes)
        else:
            nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
            cpus = cpus or min((int(node["CPU"]) for node in nodes), default=1)
            gpus, fit = 0, sum(int(node["CPU"] // cpus) for node in nodes)
        if not fit and (nodes or not self._actors):  # an empty cluster may grow
            most = max((node.get("CPU", 0) for node in nodes), default=0)
            raise EnvironmentMissing(
                f"an actor needs {cpus} CPUs{' and a GPU' if gpus else ''}, and the largest such node of the cluster "
                f"has {most:.0f} CPUs: lower --threads and --decode-threads, or choose another --device"
            )
        least, most = self._actors or (1, fit)
        return Size(cpus, gpus, least, least if self._actors else fit, most)

    def _wants_gpu(self, has_gpu: bool) -> bool:
        runtime = RUNTIMES.get(self._runtime)
        device = self._device if runtime is None or runtime.device == "auto" else runtime.device
        return device == "cuda" or (device == "auto" and has_gpu)

    def _assignment(self, job: Job, token: Path, size: Size, first: Claim) -> Assignment:
        return Assignment(
            replace(
                job,
                out=job.out.absolute(),
                listing=job.listing.absolute(),
                decode_threads=self._decode_threads or size.cpus,
            ),
            self._bundle.path.absolute(),
            bundle_digest(self._bundle.path),
            self._runtime,
            "cuda" if size.gpus else "cpu",
            self._threads or (None if size.gpus else size.cpus),
            token.absolute(),
            _sample(job, first),
        )


class _Answers:
    """Commits what the actors have finished, and adds up how they did."""

    def __init__(self, shards: LeasedShards, job: Job, told: Told) -> None:
        self._shards, self._job, self._told = shards, job, told
        self._images = 0
        self._latest: dict[str, dict[str, Any]] = {}

    def commit(self, claims: list[Claim], dataset: "Dataset") -> None:
        by_id = {claim.id: claim for claim in claims}
        batches = cast(
            "Generator[dict[str, Any], None, None]", iter(dataset.iter_batches(batch_size=None, prefetch_batches=0))
        )
        with closing(batches):  # ends the actors
            for batch in batches:
                for text in batch[ANSWER]:
                    answer = json.loads(text)
                    part = part_from_answer(answer, self._job.out)
                    self._latest[answer["actor"]] = answer
                    if self._publish(by_id[answer["id"]], part):
                        self._images += part.done.images
                    self._told.update(0, self._shares)

    def _publish(self, claim: Claim, part: Part) -> bool:
        try:
            return self._shards.commit(claim, part)
        except FileNotFoundError:
            raise InputError(
                f"a node has written '{part.temporary}', which this machine does not see: --out must lie on storage "
                "that all of them share"
            ) from None

    def performance(self) -> Performance:
        import ray

        seconds = self._told.seconds()
        answers = list(self._latest.values())
        nodes = {answer["node"] for answer in answers}
        runtime = answers[0]["runtime"] | {"ray": ray.__version__, "actors": len(answers), "nodes": len(nodes)}
        return Performance(self._images, seconds, self._shares(seconds), runtime)

    def _shares(self, _: float) -> dict[str, float]:
        """The mean over the actors, each over its own time."""
        answers = self._latest.values()
        return {stage: sum(answer["stages"][stage] for answer in answers) / len(answers) for stage in STAGES}


def _dataset(claims: list[Claim], assignment: Assignment, size: Size) -> "Dataset":
    """The claims, a block each, through the actors."""
    import ray.data

    job = assignment.job
    shortest = min(claim.shard.count or job.batch_size for claim in claims)
    # The next shard is read while the last batches of one are in the model.
    at_once = 1 + -(-BATCHES_AHEAD * job.batch_size // max(shortest, job.batch_size))
    most = min(size.most, len(claims))
    pool = ray.data.ActorPoolStrategy(
        min_size=min(size.least, most),
        max_size=most,
        initial_size=min(size.first, most),
        max_tasks_in_flight_per_actor=2 * at_once,
        max_concurrent_calls_per_actor=at_once,
        enable_true_multi_threading=True,
    )
    rows = [{CLAIM: claim_to_text(claim)} for claim in claims]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    dataset.context.enable_progress_bars = False
    dataset.context.execution_no_progress_timeout_s = -1  # a large shard may take a slow model long
    return dataset.map_batches(
        PredictionActor,
        fn_constructor_args=(assignment,),
        batch_size=1,
        compute=pool,
        num_cpus=size.cpus,
        num_gpus=size.gpus,
    )


@contextmanager
def _driving(address: str) -> Iterator[None]:
    """Inside, this process is the driver of the cluster at `address`, unless it is one already."""
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    with joined(address, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # which Ray has replaced by an exit
        yield


@contextmanager
def _token(job: Job) -> Iterator[Path]:
    """A file beside the ledger whose content is its name. At the end what the actors did not finish is removed."""
    token = job.listing.parent / f"ray-{uuid.uuid4().hex}"
    token.write_text(token.name)
    try:
        yield token
    finally:
        remove_leftovers(job.out, f"{token.name}.*")
        for path in token.parent.glob(f"{token.name}*"):
            path.unlink(missing_ok=True)


def _sample(job: Job, claim: Claim) -> str | None:
    """A file of the input that this machine has."""
    name = claim.shard.location
    if claim.shard.kind == "images":
        name = next(read_range(job.listing, Range(claim.shard.start, 1)))
    location = join(job.base, name)
    return location if not is_url(location) and os.path.lexists(location) else None
