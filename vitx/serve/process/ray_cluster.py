"""`vitx serve --ray`: starts or joins a Ray cluster, deploys the application, and deletes it on a signal."""

import logging
import signal
import time
from contextlib import suppress

from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.context import _get_global_client  # nothing public says where the proxies of a cluster listen

from vitx.core import errors
from vitx.core.console import log
from vitx.core.machine import describe_machine
from vitx.core.ray_connection import LOCAL, cluster_nodes, joined
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import claim_port, log_next_call
from vitx.serve.ray_app import application, checked

APPLICATION = "vitx"
_PROXY_SECONDS = 120


def serve_on_ray(options: ServeOptions, address: str) -> None:
    """Serve until a signal comes, then drain. `address`: Ray's, or LOCAL for a cluster that ends with this process.

    Raises InputError or CheckFailed for what may not be served, EnvironmentMissing without the cluster or a free port.
    """
    args = ServeOptions(**options.model_dump(exclude_unset=True, exclude={"ray", "host", "port"}))
    names = ", ".join(offer.bundle.manifest.name for offer in checked(args))  # before anything is started
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with joined(address, num_cpus=int(describe_machine()["cores"])), suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        deployed = application(args, may_grow=address != LOCAL)
        url = _start_proxies(options)
        try:
            serve.run(deployed, name=APPLICATION)
            print(f"vitx: serving {names} on {url}", flush=True)
            log_next_call(url, options, "NAME" if len(options.bundles) > 1 else None)
            while cluster_nodes():
                time.sleep(1)
            raise errors.EnvironmentMissing("the Ray cluster has no living node any more: start it and this again")
        except RuntimeError:  # its text says less than the deployment's
            message = serve.status().applications[APPLICATION].deployments["Replica"].message
            reason = message.strip().splitlines()[-1].removeprefix("vitx.core.errors.")
            refusal = getattr(errors, reason.partition(":")[0], errors.CheckFailed)
            raise refusal(f"a replica does not start: {reason}") from None
        except serve.exceptions.RayServeException:
            raise errors.InputError("another application has the prefix '/': end it, or use a config file") from None
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # another ends this process, and a cluster that it started
                signal.signal(number, signal.SIG_DFL)
            log("vitx: draining; a second signal stops at once")
        finally:
            if cluster_nodes():  # else it would wait for ever
                serve.delete(APPLICATION)


def _start_proxies(options: ServeOptions) -> str:
    """Return their URL: if Ray Serve runs on this cluster it is not the one that the options ask for."""
    port, status = options.port, serve.status()
    if APPLICATION in status.applications:
        raise errors.InputError(f"the cluster has an application '{APPLICATION}': end it, or use a config file")
    if not status.proxies:
        with claim_port(options.host, port) as free:  # raises if it is taken
            port = free.getsockname()[1]
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    with suppress(ActorDiedError):  # on a slow node Ray ends a proxy after 5 s, and gives the next one more
        serve.start(http_options={"host": options.host, "port": port}, logging_config=quiet)
    until = time.monotonic() + _PROXY_SECONDS
    while "HEALTHY" not in serve.status().proxies.values():
        if time.monotonic() > until:
            raise errors.EnvironmentMissing(f"no proxy of Ray Serve answers after {_PROXY_SECONDS} s: see Ray's logs")
        time.sleep(0.1)
    return _get_global_client().root_url  # type: ignore[union-attr,no-any-return]  # it runs, and is not annotated
