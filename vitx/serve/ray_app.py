"""`vitx serve` as a Ray Serve application: the same models, batcher and routes, in replicas that Ray starts and ends.

The command line deploys it; a Ray Serve config file names it as `vitx.serve.ray_app:build`. Needs the extra `ray`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from pydantic import Field, ValidationError, model_validator
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import InputError
from vitx.core.files import sha256_file
from vitx.core.machine import describe_machine
from vitx.core.ray_connection import cluster_nodes
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.http.app import App
from vitx.serve.http.asgi import CONNECTION
from vitx.serve.http.decode import Decoder
from vitx.serve.http.gate import Gate
from vitx.serve.models.canary import replay_once
from vitx.serve.models.loading import Loader, open_offers
from vitx.serve.models.offer import Offer
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import configure_process, freeze_heap
from vitx.serve.process.worker_metrics import merge
from vitx.serve.protocol.shared_memory import SharedMemory
from vitx.serve.security import AllowedHosts, Tokens

# A replica that died is noticed, and one whose canary found something is replaced, after three of these.
_HEALTH_SECONDS = 2.0
_DRAIN_LOOK_SECONDS = 0.2  # between two looks at whether a replica that ends still has requests
_GATHER_SECONDS = 1.0  # for the metrics of the other replicas; one that is stuck is left out
_START_ATTEMPTS = 3  # of a replica, until the deployment is given up
_CPU_BATCH = 8  # full, where nothing was measured: on a CPU more images are seldom faster, each


# What replicas on Ray do not take, by what to do instead.
_NOT_ON_RAY = {
    "it is in Ray Serve's own http_options": "host port tls_cert tls_key",
    "give min_replicas and max_replicas": "ray replicas",
    "give --replicas": "workers",
    "name the bundles, and deploy again for new ones": "repository watch management management_token_file",
    "a region is known to one replica": "shared_memory",
    "Ray's proxies pass on HTTP": "grpc_port message_timeout",
    "Ray Serve has logs and traces of its own": "access_log otlp_endpoint",
    "the connections are those of Ray's proxies, and so are their limits": "max_header_kib max_connections "
    "header_timeout body_timeout write_timeout max_memory_mib",
}


class ServeArgs(ServeOptions):
    """What a config file gives under `args`: the options of `vitx serve` that make sense on Ray, and the replicas.

    max_replicas: None for a fixed number of them. target_ongoing_requests: of one replica, what autoscaling aims at;
    None for one full batch an instance. threads: of one instance; None for a replica's share of the cluster's cores.
    """

    bundles: tuple[Path, ...] = Field(min_length=1)
    instances: int = Field(default=1, ge=1)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)

    @classmethod
    def of(cls, options: ServeOptions) -> "ServeArgs":
        """The same for the command line; raise InputError for an option that is not offered on Ray."""
        if not options.bundles:
            raise InputError("no bundle to serve: give one or more")
        fewest, most = options.replicas or (1, 1)
        given = options.model_dump(exclude_unset=True, exclude={"ray", "replicas", "host", "port"})
        try:
            return cls(**given, min_replicas=fewest, max_replicas=most if most > fewest else None)
        except ValidationError as error:
            raise InputError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None

    @model_validator(mode="after")
    def _offered_on_ray(self) -> "ServeArgs":
        for instead, names in _NOT_ON_RAY.items():
            for name in self.model_fields_set.intersection(names.split()):
                raise ValueError(f"--{name.replace('_', '-')} is not offered with --ray: {instead}")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}: expected at least {self.min_replicas}")
        return self


@dataclass(frozen=True)
class Share:
    """What of the cluster one replica takes: `gpus` is 0 or 1, `threads` of an instance None on a GPU."""

    cpus: int
    gpus: int
    threads: int | None

    def fitting(self, nodes: Sequence[dict[str, float]]) -> int:
        """How many replicas fit on these nodes, by the resources of each."""
        return sum(self._on(node) for node in nodes)

    def _on(self, node: dict[str, float]) -> int:
        by_cpu = int(node.get("CPU", 0) // self.cpus)
        return min(by_cpu, int(node.get("GPU", 0))) if self.gpus else by_cpu


def share_of(args: ServeArgs, nodes: Sequence[dict[str, float]]) -> Share:
    """What one replica takes of a cluster whose nodes have these resources."""
    if args.device == "cuda" or (args.device == "auto" and any(node.get("GPU") for node in nodes)):
        return Share(args.instances * (args.threads or 1), 1, args.threads)
    cores = [int(node.get("CPU", 0)) for node in nodes]
    equal = sum(cores) // (args.max_replicas or args.min_replicas)
    threads = args.threads or max(1, min(equal, max(cores, default=1)) // args.instances)
    return Share(args.instances * threads, 0, threads)


def cluster_resources() -> list[dict[str, float]]:
    """The resources of each living node; without a cluster those of this machine."""
    if not ray.is_initialized():
        return [{"CPU": float(describe_machine()["cores"])}]
    return [node["Resources"] for node in cluster_nodes()]


def build(args: ServeArgs) -> serve.Application:
    """Return the application; raise InputError or CheckFailed for bundles that may not be served."""
    return application(
        args,
        open_offers(args.bundles, allow_uncertified=args.allow_uncertified, required_signature=args.require_signature),
    )


def application(args: ServeArgs, offers: Sequence[Offer]) -> serve.Application:
    """Return the application that serves `args.bundles`, which were verified to be these offers."""
    paths = [path.absolute() for path in args.bundles]
    Tokens.read(args)  # a file that is missing is said now
    share = share_of(args, cluster_resources())
    settled = args.model_copy(
        update={
            "bundles": tuple(paths),
            "threads": share.threads,
            "device": "cuda" if share.gpus else "cpu",
            "require_signature": args.require_signature and args.require_signature.absolute(),
        }
    )
    digests = tuple(sha256_file(path / MANIFEST) for path in paths)
    full = max(_full_batch(offer.bundle, args.max_batch, on_gpu=bool(share.gpus)) for offer in offers)
    target = args.target_ongoing_requests or float(args.instances * full)
    scaling: dict[str, Any] = {"num_replicas": args.min_replicas}
    if args.max_replicas is not None:
        replicas = {"min_replicas": args.min_replicas, "max_replicas": args.max_replicas}
        scaling = {"autoscaling_config": {**replicas, "target_ongoing_requests": target}}
    deployed = serve.deployment(
        **scaling,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        # Those that wait to be decoded, for a batch, and for its end: a replica refuses what is too much itself.
        max_ongoing_requests=max(int(target) + 1, 2 * args.queue + 2 * args.instances * args.max_batch),
        max_queued_requests=args.queue,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settled.limits.drain_seconds,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_SECONDS,
        max_constructor_retry_count=_START_ATTEMPTS,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    return deployed(Replica).bind(settled, digests)


def require_same(bundles: Sequence[Path], digests: Sequence[str]) -> None:
    """Raise InputError unless the bundles are on this node, and those that the application was built with."""
    for path, digest in zip(bundles, digests, strict=True):
        if not (path / MANIFEST).is_file():
            raise InputError(f"no bundle at '{path}': every node needs it there, in a shared folder or as a copy")
        if sha256_file(path / MANIFEST) != digest:
            raise InputError(f"the bundle at '{path}' is not the one that was deployed: deploy the application again")


def _full_batch(bundle: Bundle, max_batch: int, *, on_gpu: bool) -> int:
    """The size that the batcher will aim at, as far as `vitx bench` has measured the bundle, here or elsewhere."""
    known = bundle.latency()
    measured = [known] if known else list(bundle.latency_file().machines.values())
    points = {point.batch_size: point.median_ms / 1e3 for latency in measured[:1] for point in latency.points}
    return LatencyCurve(points).best_size(max_batch if points or on_gpu else min(max_batch, _CPU_BATCH))


@serve.ingress()
class Replica:
    """One server: Ray calls the constructor, `check_health` and the application, all on one event loop."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, args: ServeArgs, digests: Sequence[str]
    ) -> None:
        """Load and warm the models: Ray sends requests when this has returned.

        digests: sha256 of each bundle's manifest when the application was built, so that all replicas are the same.
        """
        configure_process()
        require_same(args.bundles, digests)
        offers = open_offers(
            args.bundles, allow_uncertified=args.allow_uncertified, required_signature=args.require_signature
        )
        loader = Loader(args.batching, args.device, args.runtime, args.instances, args.threads, args.allow_uncertified)
        self._metrics = Metrics()
        self._models = ModelSet((offer.key for offer in offers), freeze_heap, args.server_id)
        for offer in offers:
            warm = await asyncio.to_thread(loader.warm, offer)
            self._models.switch(ServedModel(warm, self._metrics), 0)
        observe = self._metrics.decode_seconds.observe
        self._decoder = Decoder(max_pixels=args.max_pixels, capacity=args.queue, on_decode=observe)
        self._memory = SharedMemory(enabled=False)
        self._canary_seconds = args.canary_seconds
        self._canary_due = time.monotonic() + args.canary_seconds
        self._context = serve.get_replica_context()
        self._metrics.gather = self._gather
        app = App(self._models, self._decoder, args.limits, self._metrics, self._memory)
        hosts = AllowedHosts(None, args.allow_host)
        gate = Gate(app, Tokens.read(args), hosts, self._metrics.reject, metrics=args.metrics != "off")
        self._app = _Application(gate, self._metrics, self.close)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        """Raise when a model is no longer itself: Ray replaces a replica that does so three times."""
        if self._canary_seconds and time.monotonic() >= self._canary_due:
            self._canary_due = time.monotonic() + self._canary_seconds
            await replay_once(self._models, self._metrics)
        faults = [f"model '{model.name}': {model.fault}" for model in self._models if model.fault is not None]
        if faults:
            raise RuntimeError("; ".join(faults))

    async def exposition(self) -> tuple[str, str]:
        """The replica's name, and its metrics in Prometheus' text format."""
        return self._context.replica_tag, self._metrics.exposition().decode()

    async def close(self) -> None:
        """Finish what was accepted. Ray has waited for the requests before, as long as they may take."""
        self._models.draining = True
        await self._models.close()
        self._decoder.close()
        self._memory.close()

    async def _gather(self) -> bytes:
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        asked = handle.broadcast("exposition").results_async(timeout_s=_GATHER_SECONDS, return_exceptions=True)
        try:
            answers = [answer for answer in await asked if isinstance(answer, tuple)]
        except TimeoutError:
            answers = [await self.exposition()]
        return merge(dict(answers), label="replica").encode()


@dataclass
class _Connection:
    """What the routes look at where our own HTTP protocol has a connection; Ray cancels a request whose client left."""

    lost: bool = False
    slow: bool = False
    on_lost: Any = field(default=None, repr=False)

    def reserve(self, size: int) -> None:
        """Ray's proxies have read the whole body before."""

    def hold(self, reading: Any) -> None:
        """Nor is it counted for longer."""


class _Application:
    """The routes as Ray calls them: below a prefix perhaps, cancelled when the client hangs up, and with an end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, close: Any) -> None:
        self._app = app
        self._metrics = metrics
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        scope = {**scope, "path": path, "root_path": "", CONNECTION: _Connection()}
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            self._metrics.reject("disconnected")
            raise

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._close()
        await send({"type": "lifespan.shutdown.complete"})
