"""The server as `vitx serve` was asked for it: one process, several on one port, or replicas on Ray."""

import os

from vitx.core.errors import InputError, naming_extra
from vitx.serve.options import ServeOptions
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
            return supervise(options)
    from vitx.serve.process.server import serve  # not in the parent of workers, which stays small

    serve(options)
    return 0
