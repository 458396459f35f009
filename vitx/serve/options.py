"""What `vitx serve` may be told. Every number has its default here, and nowhere else."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, WrapValidator

from vitx.core import options as shared
from vitx.core.options import Options, number_range, option
from vitx.serve.limits import Batching, Limits

_POLICY = re.compile("([^=]+=)?(all|latest:[1-9][0-9]{0,8}|[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*)")


def _version_policies(given: tuple[str, ...]) -> tuple[str, ...]:
    policies: dict[str, str] = {}
    for text in given:
        if not _POLICY.fullmatch(text):
            raise ValueError(f"'{text}': expected all, latest:2 or 1,3, with NAME= before it for one model")
        if (other := policies.setdefault(text.rpartition("=")[0], text)) is not text:
            raise ValueError(f"'{other}' and '{text}' are of the same models: give one of them")
    return given


class ServeOptions(Options):
    """Options of the server. shared_memory trusts whoever reaches the port."""

    headings: ClassVar[Mapping[str, str]] = {
        "repository": "Models",
        "host": "Network",
        "max_batch": "Batches",
        "workers": "Processes and cache",
        "max_body_mib": "Limits",
        "token_file": "Access",
        "access_log": "Logs and traces",
        "ray": "Ray",
    }
    bundles: tuple[Path, ...] = option(
        (), "Bundles made by `vitx export`, or their URLs.", metavar="BUNDLE", argument=True
    )
    repository: Path | None = option(
        None, "Serve the bundles of this folder, NAME.vitx and NAME/VERSION; with --watch those that come later too."
    )
    versions: Annotated[tuple[str, ...], AfterValidator(_version_policies)] = option(
        (),
        "Versions of the repository's models, or of model NAME: all (the default), latest:2, or 1,3; may be repeated.",
        metavar="[NAME=]POLICY",
    )
    watch: bool = option(False, "Load a bundle again when it was replaced on disk.")
    runtime: shared.RuntimeOption = "auto"
    device: shared.DeviceOption = "auto"
    allow_uncertified: shared.AllowUncertified = False
    require_signature: shared.RequireSignature = None
    canary_seconds: float = option(30.0, "Between two checks that the models still answer as they did. 0: never.", ge=0)
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = option(8000, "Port of HTTP; 0 takes any free one, and prints it.", ge=0, le=65535)
    grpc_port: int | None = option(None, "Serve gRPC there too; Triton's is 8001, 0 any free port.", ge=0, le=65535)
    server_id: str = option("vitx", "Name in the server's metadata; clients may expect Triton's, which is triton.")
    shared_memory: bool = option(False, "Let clients name POSIX shared memory of the server's user.")
    max_batch: int = option(32, "Images in a batch at most.", ge=1, le=shared.MAX_BATCH)
    max_delay_ms: float = option(2.0, "How long a request may wait for others to join its batch.", ge=0)
    queue: int = option(1024, "Images that may wait; beyond, requests get 429.", ge=1)
    timeout_ms: float | None = option(None, "Deadline of a request that brings none. Default: it waits.", ge=1)
    instances: int | None = option(
        None, "Batches at the same time. Default: what `vitx bench --tune` found, else by the load.", ge=1, le=1024
    )
    threads: int | None = option(
        None, "Threads of an instance. Default: what `vitx bench --tune` found, else by the load.", ge=1, le=1024
    )
    workers: int = option(1, "Server processes on the port; one that dies is replaced.", ge=1, le=1024)
    decode: Literal["threads", "processes"] = option(
        "threads", "Where images are decoded; in processes nothing that crashes or hangs there ends the server."
    )
    cache: Annotated[ByteSize | None, WrapValidator(shared.byte_size)] = option(
        None, "Keep answers to content that may come again, so many bytes, such as 256MiB.", metavar="SIZE", text=True
    )
    max_body_mib: float = option(64, "Body of a request, also when decompressed.", ge=0.001)
    max_images: int = option(256, "Images in one request.", ge=1)
    max_pixels: int = option(50_000_000, "Pixels of an encoded image.", ge=1)
    max_header_kib: float = option(32, "Request line and headers.", ge=1)
    max_json_depth: int = option(16, "Nesting of a request's JSON.", ge=4)
    max_connections: int = option(1000, "Open connections; beyond, they get 503.", ge=1)
    max_memory_mib: float = option(1024, "Bodies in flight and replies not yet taken; workers share it evenly.", ge=1)
    header_timeout: float = option(10, "Seconds for a request's headers.", ge=0.1)
    body_timeout: float = option(20, "Seconds for a request's body, and one more for every 16 KiB of it.", ge=0.1)
    write_timeout: float = option(20, "Seconds to take a reply, and one more for every 16 KiB of it.", ge=0.1)
    message_timeout: float = option(60, "Seconds for the message of a gRPC call.", ge=0.1)
    idle_timeout: float = option(75, "Seconds until a connection without requests is closed.", ge=0.1, le=86_400)
    token_file: Path | None = option(None, "File with the token that requests must bring.")
    management: bool = option(False, "Let clients load and unload models, with the management token.")
    management_token_file: Path | None = option(None, "File with the token for --management.")
    metrics: Literal["token", "open", "off"] = option(
        "token", "Who may read /metrics: who has the token (without one everybody), everybody, nobody."
    )
    metrics_token_file: Path | None = option(None, "File with a token for /metrics alone, instead of --token-file's.")
    allow_host: tuple[str, ...] = option(
        (), "Name or address of this server, such as its proxy's, for Host and Origin; may be repeated.", metavar="NAME"
    )
    tls_cert: Path | None = option(None, "Certificate chain in PEM: serve TLS only.")
    tls_key: Path | None = option(None, "Private key of --tls-cert, in PEM.")
    tls_client_ca: Path | None = option(None, "Authorities in PEM: clients need a certificate signed by one of them.")
    access_log: str | None = option(None, "Write one JSON line a request to this file; '-' is standard output.")
    otlp_endpoint: str | None = option(None, "Send traces to this OpenTelemetry collector: http://HOST:4318.")
    ray: shared.RayAddress = None
    replicas: Annotated[tuple[int, int] | None, BeforeValidator(number_range)] = option(
        None,
        "With --ray: server processes on the cluster; of MIN to MAX as many as the load asks for.",
        metavar="N|MIN:MAX",
        text=True,
    )

    @property
    def batching(self) -> Batching:
        """How requests become batches, in seconds."""
        timeout = self.timeout_ms and self.timeout_ms / 1000
        return Batching(self.max_batch, self.max_delay_ms / 1000, self.queue, self.instances or 1, timeout)

    @property
    def limits(self) -> Limits:
        """What requests and connections of one process may use, in bytes and seconds."""
        memory = self.max_memory_mib
        return Limits(
            body_bytes=int(self.max_body_mib * 2**20),
            images=min(self.max_images, self.queue),  # more could never be queued
            header_bytes=int(self.max_header_kib * 2**10),
            json_depth=self.max_json_depth,
            connections=self.max_connections,
            header_seconds=self.header_timeout,
            body_seconds=self.body_timeout,
            write_seconds=self.write_timeout,
            memory_bytes=int(max(memory / self.workers, min(memory, self.max_body_mib)) * 2**20),
            message_seconds=self.message_timeout,
            idle_seconds=self.idle_timeout,
        )
