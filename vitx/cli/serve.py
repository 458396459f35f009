"""`vitx serve`: answer requests over HTTP."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import AllowUncertified, DeviceOption, RayAddress, RuntimeOption, number_range
from vitx.core.errors import InputError, missing_package

# What --ray does not offer, and what to do instead.
_CONNECTION = "the connections are those of Ray's proxies, and so are their limits"
_NOT_ON_RAY = {
    "repository": "name the bundles, and deploy again for new ones",
    "grpc_port": "Ray's proxies pass on HTTP",
    "shared_memory": "a region is known to one replica",
    "workers": "give --replicas",
    "watch": "deploy again for new bundles",
    "management": "deploy again for new bundles",
    "management_token_file": "there are no management calls",
    "tls_cert": "let a proxy end TLS, or give Ray Serve the files in its own http_options",
    "tls_key": "let a proxy end TLS, or give Ray Serve the files in its own http_options",
    "access_log": "Ray Serve has one, see its logging_config",
    "otlp_endpoint": "Ray Serve has traces of its own",
    "max_header_kib": _CONNECTION,
    "max_connections": _CONNECTION,
    "header_timeout": _CONNECTION,
    "body_timeout": _CONNECTION,
    "message_timeout": "Ray's proxies pass on HTTP",
}


def command(
    context: typer.Context,
    bundles: Annotated[
        list[Path] | None, typer.Argument(metavar="BUNDLE...", help="Bundles made by `vitx export`.")
    ] = None,
    repository: Annotated[
        Path | None, typer.Option(help="Serve every bundle NAME.vitx of this folder, and those that come later.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port and prints it.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve gRPC there as well; Triton's is 8001. 0: any free port.")
    ] = None,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Let clients name POSIX shared memory of the server's user.")
    ] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="Images in a batch at most.")] = 32,
    max_delay_ms: Annotated[float, typer.Option(min=0, help="How long a request may wait for company.")] = 2.0,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait; beyond, requests get 429.")] = 1024,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="Batches that run at the same time. Default: what `vitx bench --tune` found, else 1."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of an instance. Default: what `vitx bench --tune` found, else all cores."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Server processes on the port; one that dies is replaced.")] = 1,
    device: DeviceOption = "auto",
    runtime: RuntimeOption = "onnxruntime",
    timeout_ms: Annotated[
        float | None, typer.Option(min=1, help="Deadline of a request that brings none. Default: it waits.")
    ] = None,
    max_body_mib: Annotated[float, typer.Option(min=0.001, help="Body of a request, also when decompressed.")] = 64,
    max_images: Annotated[int, typer.Option(min=1, help="Images in one request.")] = 256,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of an encoded image.")] = 50_000_000,
    max_header_kib: Annotated[float, typer.Option(min=1, help="Request line and headers.")] = 32,
    max_json_depth: Annotated[int, typer.Option(min=4, help="Nesting of a request's JSON.")] = 16,
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections; beyond, they get 503.")] = 1000,
    header_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request's headers.")] = 10,
    body_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a request's body, and one more for every 16 KiB of it.")
    ] = 20,
    message_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the message of a gRPC call.")] = 60,
    watch: Annotated[bool, typer.Option("--watch", help="Load a bundle again when it was replaced on disk.")] = False,
    management: Annotated[
        bool, typer.Option("--management", help="Let clients load and unload models, with the management token.")
    ] = False,
    management_token_file: Annotated[Path | None, typer.Option(help="File with the token for --management.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that requests must bring.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain in PEM: serve TLS only.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key in PEM.")] = None,
    canary_seconds: Annotated[
        float, typer.Option(min=0, help="Between two checks that the models still answer as they did. 0: never.")
    ] = 30.0,
    access_log: Annotated[
        str | None, typer.Option(help="Write one JSON line a request to this file; '-' is standard output.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces to this OpenTelemetry collector, such as http://127.0.0.1:4318.")
    ] = None,
    ray: RayAddress = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="With --ray: server processes on the cluster; of MIN to MAX as many as the load asks for.",
        ),
    ] = None,
    allow_uncertified: AllowUncertified = False,
) -> None:
    """Serve bundles: Open Inference Protocol v2, image classification, metrics and a web page."""
    if ray is not None:
        _require_offered_on_ray(context)
        try:
            from vitx.serve.process.ray_cluster import serve_on_ray
            from vitx.serve.ray_app import ServeArgs
        except ModuleNotFoundError as error:
            raise missing_package(str(error.name), "ray") from None
        if not bundles:
            raise InputError("no bundle to serve: give one or more")
        fewest, most = number_range("--replicas", replicas or "1")
        args = ServeArgs(
            bundles=tuple(bundles),
            min_replicas=fewest,
            max_replicas=most if most > fewest else None,
            allow_uncertified=allow_uncertified,
            device=device,
            runtime=runtime,
            instances=instances or 1,
            threads=threads,
            max_batch=max_batch,
            max_delay_ms=max_delay_ms,
            queue=queue,
            timeout_ms=timeout_ms,
            max_body_mib=max_body_mib,
            max_images=max_images,
            max_pixels=max_pixels,
            max_json_depth=max_json_depth,
            token_file=token_file,
            canary_seconds=canary_seconds,
        )
        serve_on_ray(args, ray, host, port)
        return
    if replicas is not None:
        raise InputError("--replicas is of --ray; on one machine use --instances, or --workers")
    if workers > 1:
        from vitx.serve.process.supervisor import ENVIRONMENT

        if shared_memory:
            raise InputError("--shared-memory reaches one process, and --workers makes several: use --instances")
        if ENVIRONMENT not in os.environ:  # else this is one of the workers
            raise typer.Exit(_supervise(workers, host, port, grpc_port, tls=tls_cert is not None))
    try:
        from vitx.serve.process.server import ServerOptions, serve
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), "serve") from None
    from vitx.serve.limits import Batching, Limits
    from vitx.serve.security import Security

    serve(
        ServerOptions(
            bundles=bundles or [],
            repository=repository,
            host=host,
            port=port,
            grpc_port=grpc_port,
            shared_memory=shared_memory,
            device=device,
            runtime=runtime,
            instances=instances,
            threads=threads,
            allow_uncertified=allow_uncertified,
            management=management,
            watch=watch,
            canary_seconds=canary_seconds,
            access_log=access_log,
            otlp_endpoint=otlp_endpoint,
            security=Security(tls_cert, tls_key, token_file, management_token_file),
            batching=Batching(
                max_batch=max_batch,
                max_delay=max_delay_ms / 1000,
                queue=queue,
                timeout=timeout_ms and timeout_ms / 1000,
            ),
            limits=Limits(
                body_bytes=int(max_body_mib * 2**20),
                images=max_images,
                pixels=max_pixels,
                header_bytes=int(max_header_kib * 2**10),
                json_depth=max_json_depth,
                connections=max_connections,
                header_seconds=header_timeout,
                body_seconds=body_timeout,
                message_seconds=message_timeout,
            ),
        )
    )


def _require_offered_on_ray(context: typer.Context) -> None:
    for name, instead in _NOT_ON_RAY.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')} is not offered with --ray: {instead}")


def _supervise(workers: int, host: str, port: int, grpc_port: int | None, *, tls: bool) -> int:
    """Claim the ports and keep the workers; return the exit code."""
    from vitx.serve.process.port import address_of, claim_port, hold_shared_port, url_of
    from vitx.serve.process.supervisor import supervise

    with claim_port(host, port) as listener, ExitStack() as held:
        serving = f"vitx: serving with {workers} workers on {url_of(listener, tls=tls)}"
        if grpc_port is None:
            return supervise(listener, workers, serving)
        holder = held.enter_context(hold_shared_port(host, grpc_port))
        serving += f"\nvitx: gRPC on {address_of(holder)}"
        return supervise(listener, workers, serving, holder.getsockname()[1])
