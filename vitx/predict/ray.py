"""Shards through Ray Data: actors on a cluster write temporary files; this process, the driver, commits them."""

import logging
import math
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.console import counted, log
from vitx.core.errors import EnvironmentMissing, InputError, VitxError, naming_extra
from vitx.core.files import sha256_file
from vitx.core.machine import installed_version
from vitx.core.preprocess import ignore_image_warnings
from vitx.core.ray_connection import LOCAL, cluster_nodes, joined
from vitx.parity.executables.choice import AUTO, load_fastest
from vitx.parity.executables.first_load import require_verdict
from vitx.predict.inputs.stores import is_url, join
from vitx.predict.ledger import Claim, Ledger, names_of
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import Part, part_path, warm_up
from vitx.predict.pipeline.disk import full_disk_explained, lost_disk_explained
from vitx.predict.pipeline.executor import Output, Performance
from vitx.predict.pipeline.worker import BATCHES_AHEAD, STAGES, Job, Worker
from vitx.runtimes.requirements import RUNTIMES

with naming_extra("ray"):
    import ray
    import ray.data
    from ray._private.state import available_resources_per_node  # in public there is their sum alone
    from ray.data import Dataset
    from ray.exceptions import RayError

# Distributions, each of the runtime that its name begins with.
_RUNTIME_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx")
# Shards of one dataset. Each dataset starts its actors anew, so this is large.
SHARDS_PER_DATASET = 10_000
# For a cluster that is started here: its object store holds only claims and results.
OBJECT_STORE_BYTES = 100 << 20
# Threads of Ray Data that use the connection and that it does not wait for, and what they may take to end.
DATA_THREADS = ("StreamingExecutor", "ray-data-metadata-prefetch", "iter_threaded")
DATA_THREAD_SECONDS = 20.0
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
    """A worker whose stages stay busy from one shard to the next: Ray makes several calls at the same time."""

    def __init__(self, job: Job, bundle: Path, sample: str | None, versions: dict[str, str]) -> None:
        """versions: `_versions` of the driver."""
        self._name = uuid.uuid4().hex
        self._out = job.out
        self._failure: VitxError | None = None
        self._suspects = threading.Lock()
        self._started: float | None = None
        ignore_image_warnings()
        try:
            _check_storage(job, bundle, sample)
            _check_versions(versions)
            opened, options = Bundle.open(bundle), job.options
            given: dict[str, Any] = {"device": options.device, "threads": options.threads, "outputs": options.outputs}
            session = load_fastest(opened, options.runtime, **given)
            if job.certified:
                require_verdict(opened, session, quiet=True)
            warm_up()
            self._worker, self._runtime = Worker(job, session), session.describe()
        except VitxError as error:  # returned by the first call: Ray would wrap what is raised here in a traceback
            self._failure = type(error)(f"the node {socket.gethostname()}: {error}")

    def __call__(self, row: dict[str, Claim]) -> dict[str, Finished | Claim | VitxError]:
        """Do a shard. Errors of vitx are returned as results, so that Ray adds no traceback to them."""
        try:
            if self._failure is not None:
                raise self._failure
            with full_disk_explained(self._out):
                return {RESULT: self._do(row[CLAIM])}
        except VitxError as error:
            return {RESULT: error}

    def _do(self, claim: Claim) -> Finished | Claim:
        self._started = self._started or time.perf_counter()
        # Each attempt appends a byte. A finished shard removes the file, so what is left is the attempts that died.
        part_file = part_path(self._out, claim.id)
        attempts = part_file.with_name(f".{part_file.name}.attempts")
        parts: list[Part] = []
        # One at a time of those that were begun before: the next death is counted for that one alone.
        with self._suspects if attempts.exists() else nullcontext():
            with lost_disk_explained(self._out), attempts.open("ab") as file:
                file.write(b".")
                if file.tell() > ATTEMPTS:
                    return claim
            self._worker.run([claim], lambda _, part: parts.append(part))
            attempts.unlink(missing_ok=True)
        stages = self._worker.timer.shares(time.perf_counter() - self._started)
        node = ray.get_runtime_context().get_node_id()
        return Finished(claim, parts[0], self._name, node, stages, self._runtime)


def _check_storage(job: Job, bundle: Path, sample: str | None) -> None:
    """Raise InputError unless this node sees the output, the bundle and, of the input, `sample` of the driver."""
    # The name of the listing is random, so it is that of this run.
    seen = {
        "the output folder": (job.out, job.listing),
        "the bundle": (bundle, bundle / MANIFEST),
        "the input": (sample,) * 2,
    }
    for what, (named, path) in seen.items():
        if path is not None and not os.path.lexists(path):
            raise InputError(
                f"it does not see {what} '{named}' of this machine: with --ray the output, the bundle and the input "
                "must lie where every node finds them under the same path (the input may be a URL)"
            )
    if sha256_file(bundle / MANIFEST) != job.footer["vitx.bundle_sha256"]:
        raise InputError(f"its bundle '{bundle}' differs from this machine's: give every node the same")


def _versions(runtime: str) -> dict[str, str]:
    """Of what decides a prediction by `runtime`, as far as it is installed here."""
    runtimes = (name for name in _RUNTIME_PACKAGES if runtime == AUTO or name.partition("-")[0] in runtime)
    names = ("vitx", "numpy", "pillow", *runtimes)
    return {name: found for name in names if (found := installed_version(name)) is not None}


def _check_versions(versions: dict[str, str]) -> None:
    """Raise EnvironmentMissing if this node has another version of a package than the driver."""
    for name, expected in versions.items():
        found = installed_version(name)
        if found not in (expected, None):  # a runtime may be on the nodes alone, or be another build
            raise EnvironmentMissing(
                f"its {name} is {found}, and this machine's is {expected}: install the same version on every node"
            )


class PoolSize(NamedTuple):
    """cpus and gpus: reserved for each actor; the others: numbers of actors."""

    cpus: int
    gpus: int
    min_actors: int
    initial_actors: int
    max_actors: int


class RayPool:
    """An Executor on a Ray cluster, by `options`.

    ray: "local" starts a cluster on this machine and ends it afterwards; any other is joined, as by `ray.init`. threads
    and decode_threads: of one actor; by default a GPU's share of its node's CPUs, or all CPUs of the smallest node.
    Raises InputError for the address of a Ray client (ray://).
    """

    def __init__(self, bundle: Bundle, options: PredictOptions) -> None:
        self._bundle, self._options = bundle, options
        self._address = options.ray or LOCAL
        if self._address.startswith("ray://"):
            raise InputError(
                f"--ray {self._address}: Ray Data does not run through a Ray client; run the command on a machine of "
                "the cluster with --ray auto, or give the cluster's own address HOST:PORT"
            )

    def __call__(self, job: Job, ledger: Ledger, output: Output) -> Performance:
        """Raises EnvironmentMissing if the cluster cannot be joined or is too small for an actor, or if shards were
        given up; InputError if a node does not see this machine's input, bundle or output.
        """
        unfinished = ledger.unfinished()
        claims = list(islice(unfinished, SHARDS_PER_DATASET))
        if not claims:
            return output.performance(lambda _: dict.fromkeys(STAGES, 0.0), {})
        # The last result of each actor; its busy shares are since the actor's start.
        latest: dict[str, Finished] = {}

        def shares(_: float) -> dict[str, float]:
            """The mean of the actors' busy shares, each measured over the actor's own time."""
            return {stage: sum(one.stages[stage] for one in latest.values()) / len(latest) for stage in STAGES}

        # Ray prints what happens to its actors on standard output, which is for the result of the command.
        with redirect_stdout(sys.stderr), ledger.copied() as copy, _connected(self._address):
            size = self._pool_size()
            if self._address != LOCAL and not _has_room(size):  # Ray would wait for ever without a word
                needed = f"{counted(size.cpus, 'CPU')}{' and a GPU' if size.gpus else ''}"
                log(f"predict: no node of the cluster has {needed} free, as an actor needs: waiting until one has")
            options = self._options
            threads = options.threads or (None if size.gpus else size.cpus)
            how = {"runtime": options.runtime, "device": "cuda" if size.gpus else "cpu", "threads": threads}
            job = replace(
                job,
                listing=copy,
                options=job.options.model_copy(update=how),
                decode_threads=options.decode_threads or size.cpus,
            )
            given = (job, self._bundle.path.absolute(), _sample_path(job, claims[0]), _versions(options.runtime))
            while claims:
                with closing(_finished(claims, _dataset(claims, given, size))) as finished:
                    for result in finished:
                        latest[result.actor] = result
                        output.commit(result.claim, result.part)
                        output.report(result.part.record.images, shares)
                claims = list(islice(unfinished, SHARDS_PER_DATASET))
            nodes = {one.node for one in latest.values()}
            runtime = {"ray": version("ray"), "actors": len(latest), "nodes": len(nodes)}
            return output.performance(shares, next(iter(latest.values())).runtime | runtime)

    def _pool_size(self) -> PoolSize:
        """From the CPUs and GPUs that the nodes have now."""
        nodes = [{"CPU": 0, "GPU": 0} | node["Resources"] for node in cluster_nodes()]
        actors, decode_threads = self._options.ray_actors, self._options.decode_threads
        gpus = int(self._wants_gpu(any(node["GPU"] for node in nodes)))
        nodes = [node for node in nodes if node["GPU" if gpus else "CPU"] >= 1]
        cpus = decode_threads if gpus else max(self._options.threads or 0, decode_threads or 0)
        # An actor's share of its node.
        cpus = cpus or max(1, min((int(node["CPU"] / (node["GPU"] if gpus else 1)) for node in nodes), default=1))
        fit = sum(int(min(node["CPU"] // cpus, node["GPU"] if gpus else math.inf)) for node in nodes)
        # A cluster without nodes may be one that an autoscaler is to fill: with --ray-actors that is no error.
        if not fit and (nodes or not actors):
            largest = max((node["CPU"] for node in nodes), default=0)
            raise EnvironmentMissing(
                f"an actor needs {counted(cpus, 'CPU')}{' and a GPU' if gpus else ''}, and the largest node"
                f"{' with a GPU' if gpus else ''} of the cluster has {counted(round(largest), 'CPU')}: lower --threads "
                "and --decode-threads, or choose another --device"
            )
        min_actors, max_actors = actors or (1, fit)
        return PoolSize(cpus, gpus, min_actors, min_actors if actors else fit, max_actors)

    def _wants_gpu(self, has_gpu: bool) -> bool:
        runtime = RUNTIMES.get(self._options.runtime)
        device = self._options.device if runtime is None or runtime.device == "auto" else runtime.device
        return device == "cuda" or (device == "auto" and has_gpu)


def _has_room(size: PoolSize) -> bool:
    """Whether a node has now what an actor reserves."""
    free = available_resources_per_node().values()  # type: ignore[no-untyped-call]  # Ray has no annotation
    return any(node.get("CPU", 0) >= size.cpus and node.get("GPU", 0) >= size.gpus for node in free)


def _finished(claims: list[Claim], dataset: Dataset) -> Generator[Finished, None, None]:
    """Yield each claim's result, once; at the end raise EnvironmentMissing for shards that were given up."""
    left = dict.fromkeys(claims)
    batches = cast(
        "Generator[dict[str, Any], None, None]", iter(dataset.iter_batches(batch_size=None, prefetch_batches=0))
    )
    with closing(batches), _ray_explained():  # closing ends the actors, also after an error
        for result in (result for batch in batches for result in batch[RESULT]):
            if isinstance(result, VitxError):
                raise result
            if isinstance(result, Finished) and result.claim in left:  # Ray may give a result twice
                if not (folder := result.part.temporary.parent).is_dir():
                    raise EnvironmentMissing(f"the folder '{folder}' was removed meanwhile: run the same command again")
                if not result.part.temporary.exists():
                    raise InputError(
                        f"a node has written '{result.part.temporary}', which this machine does not see: --out must "
                        "lie on storage that all machines share"
                    )
                del left[result.claim]
                yield result
    if left:
        raise EnvironmentMissing(
            f"{ATTEMPTS} actors died while working on each of {counted(len(left), 'shard')}, such as "
            f"{next(iter(left))}: Ray's logs on the nodes say why, for example that memory ran out; finished shards "
            "are kept"
        )


@contextmanager
def _ray_explained() -> Iterator[None]:
    """Raise EnvironmentMissing, which names the node, where Ray says in a traceback what it could not do there."""
    try:
        yield
    except RayError as error:
        text = str(error)
        node = re.search(r"\bip=([^,)\s]+)", text)
        raise EnvironmentMissing(
            f"Ray cannot work on {f'the node {node[1]}' if node else 'a node'}: {text.strip().splitlines()[-1]}. Every "
            "node needs the same Python, Ray and vitx; finished shards are kept"
        ) from None


def _dataset(claims: list[Claim], given: tuple[Job, Path, str | None, dict[str, str]], size: PoolSize) -> Dataset:
    """A lazy dataset of one row for each claim, mapped by the actors, which get `given`, to results."""
    batch_size = given[0].options.batch_size
    shortest = min(claim.shard.count or batch_size for claim in claims)
    # Calls at once of an actor: the shard in the model, and enough more of them to fill the batches decoded ahead.
    concurrent_calls = 1 + -(-BATCHES_AHEAD * batch_size // max(shortest, batch_size))
    max_actors = min(size.max_actors, len(claims))
    pool = ray.data.ActorPoolStrategy(
        min_size=min(size.min_actors, max_actors),
        max_size=max_actors,
        initial_size=min(size.initial_actors, max_actors),
        max_tasks_in_flight_per_actor=2 * concurrent_calls,
        max_concurrent_calls_per_actor=concurrent_calls,
        enable_true_multi_threading=True,
    )
    # A block is the unit that Ray gives to an actor: one claim.
    dataset = ray.data.from_items([{CLAIM: claim} for claim in claims], override_num_blocks=len(claims))
    dataset.context.enable_progress_bars = False
    dataset.context.execution_no_progress_timeout_s = -1  # no limit: one large shard may take hours
    options: dict[str, Any] = {"compute": pool, "num_cpus": size.cpus, "num_gpus": size.gpus}
    return dataset.map(PredictionActor, fn_constructor_args=given, **options)  # type: ignore[arg-type]  # of its instances


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Within the block this process is a driver of the cluster at `address`, unless it is connected to one already."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its tracebacks are one line, see `_ray_explained`
    if ray.is_initialized():
        yield
        return
    with joined(address, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES):
        try:
            yield
        finally:
            # A thread of Ray Data that outlives the connection would end the process with exit code 1.
            for thread in threading.enumerate():
                if thread.name.startswith(DATA_THREADS):
                    thread.join(DATA_THREAD_SECONDS)


def _sample_path(job: Job, claim: Claim) -> str | None:
    """The first file of a shard, or None if it is a URL or not there."""
    shard, name = claim.shard, claim.shard.location
    if shard.kind == "images":
        name = next(names_of(shard, job.listing))
    location = join(job.base, name)
    return location if not is_url(location) and os.path.lexists(location) else None
