"""`vitx serve --ray`: starts or joins a Ray cluster, deploys the application, and deletes it on a signal."""

import http.client
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client  # nothing public says where the proxies of a cluster listen
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vitx.core import errors
from vitx.core.bundle import MANIFEST
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.core.files import sha256_file
from vitx.core.machine import describe_machine
from vitx.core.ray_connection import LOCAL, cluster_nodes, joined
from vitx.serve.models.loading import open_offers
from vitx.serve.models.offer import Offer
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import hold_shared_port
from vitx.serve.ray_app import ServeArgs, Share, application, cluster_resources, require_same, share_of

APPLICATION = "vitx"
_START_POLL_SECONDS = 0.2  # between two checks of an application that starts
_RUN_POLL_SECONDS = 2.0  # and of one that runs
_NODE_SECONDS = 60.0  # for a node to check its bundles
_VITX_ERROR = re.compile(r"^vitx\.core\.errors\.(\w+): (.*)$", re.MULTILINE)


def serve_on_ray(options: ServeOptions, address: str) -> None:
    """Serve until a signal comes, then drain. `address`: Ray's, or LOCAL for a cluster that ends with this process.

    Raises InputError or CheckFailed for bundles that may not be served, EnvironmentMissing if there is no such cluster
    or the port is taken.
    """
    args, host, port = ServeArgs.of(options), options.host, options.port
    offers = open_offers(
        args.bundles, allow_uncertified=args.allow_uncertified, required_signature=args.require_signature
    )  # before anything is started
    if address != LOCAL:
        with _cluster(address):
            _serve(args, offers, host, port)
        return
    with hold_shared_port(host, port, "--port") as held, _cluster(address):
        _serve(args, offers, host, held.getsockname()[1], held)


def _cluster(address: str) -> AbstractContextManager[None]:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return joined(address, num_cpus=int(describe_machine()["cores"]))


def _serve(args: ServeArgs, offers: Sequence[Offer], host: str, port: int, held: socket.socket | None = None) -> None:
    """Serve on the cluster. `held`: the socket that reserves the port, if the cluster was started here."""
    local = held is not None
    stopped = _take_signals()
    share = share_of(args, cluster_resources())
    _require_room(args, share, local=local)
    if not local:
        paths = [path.absolute() for path in args.bundles]
        _require_bundles(paths, [sha256_file(path / MANIFEST) for path in paths], share)
    if held is not None:
        held.close()  # Ray's HAProxy cannot listen on a port that is held
    _start_serve(host, port)
    _require_free_name()
    target = serve.RunTarget(application(args, offers), name=APPLICATION)
    serve.run_many([target], wait_for_applications_running=False)
    try:
        if _until_running(stopped):
            names = ", ".join(dict.fromkeys(offer.bundle.manifest.name for offer in offers))
            print(f"vitx: serving {names} on {_where(stopped, local=local)}", flush=True)
            _watch(stopped)
    finally:
        serve.delete(APPLICATION)


def _take_signals() -> threading.Event:
    """Return an event that the first signal sets. A second one ends this process, and a cluster that it started."""
    stopped = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stopped.is_set():
            log("vitx: stopped by a second signal")
            os._exit(128 + number)
        log("vitx: draining; a second signal stops at once")
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stopped


def _require_room(args: ServeArgs, share: Share, *, local: bool) -> None:
    """Raise InputError if the replicas do not fit on this machine; on a cluster, which may grow, only log it."""
    room = share.fitting(cluster_resources())
    if room >= args.min_replicas:
        return
    needs = f"{share.cpus} CPUs" + (" and a GPU" if share.gpus else "")
    what = f"{args.min_replicas} replicas of {needs} each do not fit: there is room for {room}"
    if local:
        raise InputError(f"{what}; ask for fewer --replicas, --instances or --threads")
    log(f"vitx: {what}; waiting for the cluster to grow")


def _require_bundles(paths: Sequence[Path], digests: Sequence[str], share: Share) -> None:
    """Raise InputError unless every node with room for a replica has the bundles whose manifests have these digests."""
    check = ray.remote(num_cpus=0, max_retries=0)(require_same)
    nodes = [node for node in cluster_nodes() if share.fitting([node["Resources"]])]
    asked = {
        node["NodeManagerAddress"]: check.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(paths, digests)
        for node in nodes
    }
    for address, answer in asked.items():
        try:
            ray.get(answer, timeout=_NODE_SECONDS)
        except RayError as error:
            refusal, text = _failure(str(error)), str(error).strip().splitlines()[-1]
            problem = refusal or f"vitx does not run there: {text}"
            raise InputError(f"node {address} of the cluster: {problem}") from None


def _start_serve(host: str, port: int) -> None:
    """Start Ray Serve on the cluster if it does not run there."""
    try:
        running = proxy_options()
    except RayServeException:
        if port == 0:
            raise InputError(
                "--port 0 needs a cluster that is started here: all nodes of a running one listen on the same port"
            ) from None
        serve.start(
            proxy_location="EveryNode",
            http_options={"host": host, "port": port},
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
    else:
        log(f"vitx: Ray Serve runs on this cluster, at {running.host}:{running.port}: --host and --port are not used")


def proxy_options() -> HTTPOptions:
    """The address of the cluster's proxies; raise RayServeException if Ray Serve does not run there."""
    client = _get_global_client()
    assert client is not None
    options: HTTPOptions = client.http_config
    return options


def _require_free_name() -> None:
    if APPLICATION in serve.status().applications:
        raise InputError(f"the cluster serves an application '{APPLICATION}' already: end it, or use a config file")


def _until_running(stopped: threading.Event) -> bool:
    """Wait until the application runs; return False if a signal came first. Raises a replica's error."""
    logged = ""
    while not stopped.wait(_START_POLL_SECONDS):
        status = _status()
        if status.status == ApplicationStatus.RUNNING:
            return True
        message = "; ".join(each.message for each in status.deployments.values() if each.message)
        if (failure := _failure(message)) is not None:
            raise failure
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            reason = (message or status.message).strip().splitlines()[-1]
            raise CheckFailed(f"the replicas do not start: {reason}; the whole message is in Ray's log")
        if message != logged:
            log(f"vitx: {message}")
            logged = message
    return False


def _status() -> ApplicationStatusOverview:
    return serve.status().applications[APPLICATION]


def _failure(message: str) -> VitxError | None:
    """The VitxError in Ray's message about a replica, if there is one: no further attempt would succeed."""
    found = _VITX_ERROR.search(message)
    kind: type[VitxError] | None = getattr(errors, found[1]) if found else None
    return None if found is None or kind is None else kind(found[2])


def _where(stopped: threading.Event, *, local: bool) -> str:
    """The URL of the proxies; with `local` wait until the proxy there knows the application's route, or a signal."""
    options = proxy_options()
    while local and not _answers(options.host or "", options.port) and not stopped.wait(_START_POLL_SECONDS):
        pass
    return f"http://{options.host}:{options.port}"


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), closing(http.client.HTTPConnection(host, port, timeout=10)) as connection:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    return False


def _watch(stopped: threading.Event) -> None:
    """Log every change of the application's state, until a signal comes."""
    before = ApplicationStatus.RUNNING
    while not stopped.wait(_RUN_POLL_SECONDS):
        status = _status()
        if status.status != before:
            before = status.status
            log(f"vitx: the application is {before}: {status.message}")
