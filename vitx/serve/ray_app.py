"""`vitx serve` as a Ray Serve application: the models and routes of one server process in every replica.

`vitx serve --ray` deploys it; a Ray Serve config file names it as `vitx.serve.ray_app:build`. Needs the extra `ray`.
"""

import asyncio
import platform
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import serve
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from vitx.core.bundle import MANIFEST, local_bundle, url_of
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.core.files import sha256_file
from vitx.core.ray_connection import cluster_nodes
from vitx.serve.http.app import App
from vitx.serve.http.asgi import CONNECTION
from vitx.serve.models.loading import Offer
from vitx.serve.observe.metrics import merged
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import configure_process
from vitx.serve.security import AllowedHosts, Tokens
from vitx.serve.server_core import ServerCore, verified

# What replicas do not take, by what to do instead.
_NOT_ON_RAY = {
    "it is a matter of the cluster and of Ray Serve's http_options": "ray host port tls_cert tls_key tls_client_ca",
    "give --replicas": "workers",
    "name the bundles, and deploy again for new ones": "repository versions watch management management_token_file",
    "a region is known to one replica": "shared_memory",
    "Ray's proxies pass on HTTP": "grpc_port message_timeout",
    "Ray Serve has logs and traces of its own": "access_log otlp_endpoint",
    "the connections are those of Ray's proxies, and so are their limits": "max_header_kib max_connections "
    "header_timeout body_timeout write_timeout idle_timeout max_memory_mib",
}


def build(args: ServeOptions) -> serve.Application:
    """Return the application; `args` are those of a config file. Raises what `checked` raises."""
    checked(args)
    return application(args)


def checked(args: ServeOptions) -> list[Offer]:
    """Verify the bundles on this machine; raise InputError or CheckFailed for what may not be served on Ray."""
    for instead, names in _NOT_ON_RAY.items():
        for name in sorted(args.model_fields_set.intersection(names.split())):
            raise InputError(f"--{name.replace('_', '-')} is not offered with --ray: {instead}")
    _ = Tokens(args), AllowedHosts(None, args.allow_host)  # raise for a file, or a name, that is wrong
    return verified(args)


def share_of(args: ServeOptions, *, may_grow: bool) -> tuple[int, int, int | None]:
    """(CPUs, GPUs) of a replica, and threads of its instances, None on a GPU. Raises InputError where too few fit."""
    nodes = [node["Resources"] for node in cluster_nodes()]
    cores, gpus = [int(node.get("CPU", 0)) for node in nodes], sum(int(node.get("GPU", 0)) for node in nodes)
    on_gpu = args.device == "cuda" or (args.device == "auto" and gpus > 0)
    instances, (least, most) = args.batching.instances, args.replicas or (1, 1)
    threads = args.threads or (None if on_gpu else max(1, min(sum(cores) // most, max(cores)) // instances))
    cpus = instances * (threads or 1)
    if not may_grow and (least * cpus > sum(cores) or least * on_gpu > gpus):
        what = f"{counted(least, 'replica')} of {counted(cpus, 'CPU')}" + " and a GPU" * on_gpu
        raise InputError(f"{what} each do not fit: ask for fewer --replicas, --instances or --threads")
    return cpus, int(on_gpu), threads


def application(args: ServeOptions, *, may_grow: bool = True) -> serve.Application:
    """Return the application of checked options on this cluster. Raises what `share_of` raises."""
    cpus, gpus, threads = share_of(args, may_grow=may_grow)
    (least, most), instances = args.replicas or (1, 1), args.batching.instances
    update: dict[str, Any] = {name: value.absolute() for name, value in args if isinstance(value, Path)}
    bundles = tuple(path if url_of(path) else path.absolute() for path in args.bundles)
    update |= {"bundles": bundles, "device": "cuda" if gpus else "cpu"}
    settled = args.model_copy(update={**update, "instances": instances, "threads": threads})
    target = instances * (args.max_batch if gpus else min(args.max_batch, 8))  # on a CPU more are seldom faster, each
    scaling: dict[str, Any] = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
    deployed = serve.deployment(
        **({"num_replicas": least} if least == most else {"autoscaling_config": scaling}),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # Those that wait to be decoded, for a batch, and for its end: a replica refuses what is too much itself.
        max_ongoing_requests=2 * args.queue + 2 * instances * args.max_batch,
        max_queued_requests=args.queue,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        max_constructor_retry_count=1,  # a bundle that is refused would be refused again
        health_check_period_s=2,  # a replica is replaced after three that fail
        graceful_shutdown_timeout_s=args.limits.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,  # between two looks at whether a replica that ends still has requests
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployed(Replica).bind(settled, [sha256_file(local_bundle(path) / MANIFEST) for path in bundles])


@serve.ingress()
class Replica:
    """One server. Ray starts it, sends it requests once it is warm, and waits for their ends before it kills it."""

    async def __init__(self, args: ServeOptions, digests: Sequence[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        """`digests`: sha256 of each bundle's manifest when the application was built: all replicas are the same."""
        configure_process()
        for path, digest in zip(args.bundles, digests, strict=True):
            manifest = local_bundle(path) / MANIFEST
            if not manifest.is_file() or sha256_file(manifest) != digest:
                what = f"'{path}' on node {platform.node()} is not the bundle that was deployed"
                raise InputError(f"{what}: every node needs the same one there; deploy a new one from another path")
        self._core = ServerCore(args, verified(args))
        self._core.metrics.gather = self._exposition
        self._routes = App(self._core, bound=None)
        await self._core.load()
        self._canaries = asyncio.create_task(self._core.replay_canaries())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Router(default=self._answer)

    async def check_health(self) -> None:
        """Raise when a model is no longer itself."""
        if faults := [f"model '{model.name}': {model.fault}" for model in self._core.models if model.fault is not None]:
            raise RuntimeError("; ".join(faults))

    async def _exposition(self) -> bytes:
        return merged({serve.get_replica_context().replica_tag: self._core.metrics.exposition()}, "replica")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Below a prefix perhaps, and cancelled when the client hangs up."""
        path = scope["path"].removeprefix(scope["root_path"])
        # A proxy has read the whole body, so that there is nothing to reserve or to hold.
        connection = SimpleNamespace(lost=False, slow=False, reserve=lambda size: None, hold=lambda reading: None)
        await self._routes({**scope, "path": path, "root_path": "", CONNECTION: connection}, receive, send)
