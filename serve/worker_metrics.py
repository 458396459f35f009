"""One exposition of all workers: whichever is asked at /metrics collects the others', each series with its worker."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

_SECONDS = 1.0  # for one worker's answer; one that is stuck or gone is left out
_SUFFIX = ".metrics"


class WorkerMetrics:
    """This worker's metrics on a Unix socket, and those of its siblings."""

    def __init__(self, folder: Path, index: int, process: int, exposition: Callable[[], bytes]) -> None:
        """`index` and `process` name the socket: while a worker is replaced there are two of its index."""
        self._folder = folder
        self._path = folder / f"{index}-{process}{_SUFFIX}"
        self._exposition = exposition
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self._path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def gather(self) -> bytes:
        """Every worker's series; the label `worker` is its index."""
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        answers = await asyncio.gather(*map(_ask, paths))
        texts = {path.stem.partition("-")[0]: text for path, text in zip(paths, answers, strict=True) if text}
        return merge(texts).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._exposition())
        writer.close()
        await writer.wait_closed()


async def _ask(path: Path) -> str:
    try:
        async with asyncio.timeout(_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return (await reader.read()).decode()
            finally:
                writer.close()
    except OSError:  # a timeout too
        return ""


def merge(texts: Mapping[str, str]) -> str:
    """Join Prometheus texts, by worker, into one: a family's lines stay together, and each sample says its worker."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(line + "\n" for line in lines)


def _labelled(sample: str, worker: str) -> str:
    """`name{a="b"} 1` → `name{worker="0",a="b"} 1`."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'
