"""`vitx top`: watch a running server in the terminal."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitx.cli.options import Json
from vitx.core.console import can_redraw, print_json
from vitx.core.errors import EnvironmentMissing, InputError

if TYPE_CHECKING:
    from rich.console import Group

    from vitx.serve.observe.top import Reading, ServerClient


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the server listens.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval and end.")] = False,
    as_json: Json = False,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that the server asks for.")] = None,
    metrics_token_file: Annotated[
        Path | None, typer.Option(help="File with the token of /metrics, where it has its own.")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to trust, in PEM, for a server with TLS.")] = None,
) -> None:
    """Show what a server does, by model: images a second, batches, queue, times, refusals, certificate."""
    from vitx.serve.observe.top import ServerClient, snapshot

    server = ServerClient(url, _token(token_file), _checked_ca_file(ca_file), _token(metrics_token_file))
    before = server.read()
    if not once and not as_json and can_redraw(sys.stdout):
        _watch(server, before, interval)
        return
    time.sleep(interval)
    found = snapshot(server.read(), before)
    if as_json:
        print_json(found)
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(view(found))


def _watch(server: "ServerClient", before: "Reading", interval: float) -> None:
    """Redraw in place until interrupted; when the server stops answering, show the error and keep trying."""
    from rich.live import Live
    from rich.text import Text

    from vitx.serve.observe.top import snapshot

    with Live(view(snapshot(before, None)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                now = server.read()
            except EnvironmentMissing as error:
                live.update(Text(str(error), style="red"), refresh=True)
                continue
            live.update(view(snapshot(now, before)), refresh=True)
            before = now


def view(found: Mapping[str, Any]) -> "Group":
    """Lay out one snapshot for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for title in ("model", "version", "images/s", "batches/s", "mean batch", "queue", "queue ms", "compute ms"):
        table.add_column(title, justify="left" if title == "model" else "right", overflow="fold")
    for title in ("certificate", "runs on"):
        table.add_column(title, overflow="fold")
    for model in found["models"]:
        table.add_row(
            Text(model["name"]),
            model["version"],
            f"{model['images_per_second']:,.1f}",
            f"{model['batches_per_second']:,.1f}",
            "–" if model["mean_batch"] is None else f"{model['mean_batch']:.1f}",
            f"{model['queued']:,}",
            _pair(model["queue_ms"]),
            _pair(model["compute_ms"]),
            Text(model["certificate"], style="green" if model["certificate"] == "pass" else "red"),
            Text(f"{model['provider']}, {model['precision']}"),
        )
    head = Text(f"{found['url']}  ").append(*(("ready", "green") if found["ready"] else ("not ready", "red")))
    head.append(f"  up {timedelta(seconds=int(found['uptime_seconds']))}")
    latency = (
        f"{found['requests_per_second']:,.1f} requests/s; latency {_pair(found['latency_ms'])} ms (p50 / p99 of the "
        f"latest requests); CPU {found['cpu_percent']:.0f} %; memory {found['rss_mib']:,.0f} MiB; "
        f"{found['open_files']} open files"
    )
    return Group(head, Text(latency), table, Text(_refusals(found["rejections"])))


def _refusals(rejections: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count:,} {reason}" for reason, count in rejections.items() if count)
    return f"refused since the start: {counts or 'none'}"


def _pair(percentiles: Mapping[str, float | None]) -> str:
    """The text "p50 / p99"."""
    return " / ".join("–" if value is None else f"{value:.3g}" for value in percentiles.values())


def _token(path: Path | None) -> str | None:
    from vitx.core.urls import read_token

    token = read_token(path)
    return None if token is None else token.decode()


def _checked_ca_file(path: Path | None) -> str | None:
    import ssl

    if path is not None and not path.is_file():
        raise InputError(f"--ca-file '{path}' is not a file: expected certificates in PEM")
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise InputError(f"--ca-file '{path}' cannot be read: {error}; expected certificates in PEM") from None
    return None if path is None else str(path)
