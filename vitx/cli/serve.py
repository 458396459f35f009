"""`vitx serve`: answer requests over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import AllowUncertified, DeviceOption, Threads


def command(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles made by `vitx export`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port and prints it.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Images in a batch at most.")] = 32,
    max_delay_ms: Annotated[float, typer.Option(min=0, help="How long a request may wait for company.")] = 2.0,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait; beyond, requests get 429.")] = 1024,
    instances: Annotated[int, typer.Option(min=1, help="Batches that run at the same time.")] = 1,
    threads: Threads = None,
    device: DeviceOption = "auto",
    allow_uncertified: AllowUncertified = False,
) -> None:
    """Serve bundles: Open Inference Protocol v2, image classification, metrics and a web page."""
    from vitx.core.errors import missing_package

    try:
        from vitx.serve.server import ServerOptions, serve
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), "serve") from None
    from vitx.serve.limits import Batching

    serve(
        ServerOptions(
            bundles=bundles,
            host=host,
            port=port,
            device=device,
            threads=threads,
            allow_uncertified=allow_uncertified,
            batching=Batching(max_batch=max_batch, max_delay=max_delay_ms / 1000, queue=queue, instances=instances),
        )
    )
