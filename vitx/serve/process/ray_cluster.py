"""`vitx serve --ray`: a cluster of its own or one that runs, the application on it, and its end with a signal."""

import http.client
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
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
from vitx.serve.process.port import hold_shared_port
from vitx.serve.ray_app import ServeArgs, Share, application, cluster_resources, require_same, share_of

APPLICATION = "vitx"
_LOOK_SECONDS = 0.2  # between two looks at an application that starts
_WATCH_SECONDS = 2.0  # and at one that runs
_CHECK_SECONDS = 60.0  # for a node to look at its bundles
_VITX_ERROR = re.compile(r"^vitx\.core\.errors\.(\w+): (.*)$", re.MULTILINE)


def serve_on_ray(args: ServeArgs, address: str, host: str, port: int) -> None:
    """Serve until a signal comes, then drain. `address` is Ray's; a cluster that was started here ends with us.

    Raises InputError or CheckFailed for bundles that may not be served, and EnvironmentMissing where there is no such
    cluster or the port is taken.
    """
    offers = open_offers(args.bundles, allow_uncertified=args.allow_uncertified)  # before anything is started
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
    """Serve on the cluster; on one that was started here the port was held until now."""
    local = held is not None
    stopped = _take_signals()
    share = share_of(args, cluster_resources())
    _require_room(args, share, local=local)
    if not local:
        _require_bundles(args.bundles, share)
    if held is not None:
        held.close()  # Ray's HAProxy would not share it
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
    """Return what the first signal sets; a second one ends this process, and with it the cluster that it started."""
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
    """A cluster may grow; this machine does not."""
    room = share.fitting(cluster_resources())
    if room >= args.min_replicas:
        return
    needs = f"{share.cpus} CPUs" + (" and a GPU" if share.gpus else "")
    what = f"{args.min_replicas} replicas of {needs} each do not fit: there is room for {room}"
    if local:
        raise InputError(f"{what}; ask for fewer --replicas, --instances or --threads")
    log(f"vitx: {what}; waiting for the cluster to grow")


def _require_bundles(bundles: Sequence[Path], share: Share) -> None:
    """Raise InputError unless every node that has room for a replica finds the same bundles."""
    paths = [path.absolute() for path in bundles]
    digests = [sha256_file(path / MANIFEST) for path in paths]
    look = ray.remote(num_cpus=0, max_retries=0)(problem_on_node)
    nodes = [node for node in cluster_nodes() if share.fitting([node["Resources"]])]
    asked = {
        node["NodeManagerAddress"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(paths, digests)
        for node in nodes
    }
    for address, answer in asked.items():
        try:
            problem = ray.get(answer, timeout=_CHECK_SECONDS)
        except RayError as error:
            problem = f"vitx does not run there: {str(error).strip().splitlines()[-1]}"
        if problem is not None:
            raise InputError(f"node {address} of the cluster: {problem}")


def problem_on_node(paths: Sequence[Path], digests: Sequence[str]) -> str | None:
    """What is wrong with the bundles where this runs."""
    try:
        for path, digest in zip(paths, digests, strict=True):
            require_same(path, digest)
    except InputError as error:
        return str(error)
    return None


def _start_serve(host: str, port: int) -> None:
    """Start Ray Serve on the cluster, where it does not run yet."""
    try:
        listens = proxy_options()
    except RayServeException:
        if port == 0:
            raise InputError("--port 0 is for a cluster of its own: all nodes of one listen on the same port") from None
        serve.start(
            proxy_location="EveryNode",
            http_options={"host": host, "port": port},
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
    else:
        log(f"vitx: Ray Serve runs on this cluster, at {listens.host}:{listens.port}: --host and --port are not used")


def proxy_options() -> HTTPOptions:
    """How the proxies of the cluster listen; raise RayServeException where Ray Serve does not run."""
    client = _get_global_client()
    assert client is not None
    options: HTTPOptions = client.http_config
    return options


def _require_free_name() -> None:
    if APPLICATION in serve.status().applications:
        raise InputError(f"the cluster serves an application '{APPLICATION}' already: end it, or use a config file")


def _until_running(stopped: threading.Event) -> bool:
    """Wait until the application runs; False when a signal came before. Raises what a replica raised at its start."""
    said = ""
    while not stopped.wait(_LOOK_SECONDS):
        status = _status()
        if status.status == ApplicationStatus.RUNNING:
            return True
        message = "; ".join(one.message for one in status.deployments.values() if one.message)
        if (failure := _failure(message)) is not None:
            raise failure
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            reason = (message or status.message).strip().splitlines()[-1]
            raise CheckFailed(f"the replicas do not start: {reason}; Ray's log has the whole of it")
        if message != said:
            log(f"vitx: {message}")
            said = message
    return False


def _status() -> ApplicationStatusOverview:
    return serve.status().applications[APPLICATION]


def _failure(message: str) -> VitxError | None:
    """The error of ours in Ray's message about a replica: it would be raised again and again."""
    found = _VITX_ERROR.search(message)
    kind: type[VitxError] | None = getattr(errors, found[1]) if found else None
    return None if found is None or kind is None else kind(found[2])


def _where(stopped: threading.Event, *, local: bool) -> str:
    """The URL of the proxies; one that was started here answers when this returns."""
    listens = proxy_options()
    if local:
        assert listens.host is not None
        _await_answer(listens.host, listens.port, stopped)
    return f"http://{listens.host}:{listens.port}"


def _await_answer(host: str, port: int, stopped: threading.Event) -> None:
    """Return once the proxy knows the application's route, or a signal came."""
    while not stopped.is_set():
        connection = http.client.HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        stopped.wait(_LOOK_SECONDS)


def _watch(stopped: threading.Event) -> None:
    """Say when the application's state changes, until a signal comes."""
    before = ApplicationStatus.RUNNING
    while not stopped.wait(_WATCH_SECONDS):
        status = _status()
        if status.status != before:
            before = status.status
            log(f"vitx: the application is {before}: {status.message}")
