"""The server as `vitx serve` was asked for it: one process, several on one port, or replicas on Ray."""

import os
from contextlib import ExitStack

from vitx.core.errors import InputError, naming_extra
from vitx.serve.options import ServeOptions
from vitx.serve.process.port import address_of, claim_port, hold_shared_port, url_of
from vitx.serve.process.supervisor import ENVIRONMENT, supervise


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes; return the exit code. Raises what `serve`, `supervise` and `serve_on_ray` raise."""
    if options.ray is not None:
        with naming_extra("ray"):
            from vitx.serve.process.ray_cluster import serve_on_ray
        serve_on_ray(options, options.ray)
        return 0
    if options.replicas is not None:
        raise InputError("--replicas is of --ray; on one machine use --instances, or --workers")
    if options.workers > 1:
        if options.shared_memory:
            raise InputError("--shared-memory reaches one process, and --workers makes several: use --instances")
        if ENVIRONMENT not in os.environ:  # else this is one of the workers
            return _supervise(options)
    from vitx.serve.process.server import serve  # not in the parent of workers, which stays small

    serve(options)
    return 0


def _supervise(options: ServeOptions) -> int:
    """Claim the ports and keep the workers."""
    workers = options.workers
    with claim_port(options.host, options.port) as listener, ExitStack() as held:
        serving = f"vitx: serving with {workers} workers on {url_of(listener, tls=options.tls_cert is not None)}"
        if options.grpc_port is None:
            return supervise(listener, workers, serving)
        holder = held.enter_context(hold_shared_port(options.host, options.grpc_port))
        serving += f"\nvitx: gRPC on {address_of(holder)}"
        return supervise(listener, workers, serving, holder.getsockname()[1])
