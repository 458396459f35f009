"""Processor time of the server's event loop for one request, without the model; a busy machine does not change it.

    python benchmarks/serve/server_overhead.py [--requests 10000] [--runs 5] [--profile]

64 connections without sockets send requests of one 32-px image (Open Inference Protocol, binary tensors) through HTTP
parser, routes and batcher to two instances whose model answers at once. Time is the event loop thread's alone; the
system calls of real sockets, some 15 µs a request, come on top. The least of the runs counts: what others do to the
caches only adds.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from uvicorn.server import ServerState

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.server_peers import INSTANCES, SMALL, bundle_of, infer_request
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array, Session
from vitx.serve.http.app import App
from vitx.serve.http.head_cache import HeadCacheProtocol
from vitx.serve.models.loading import Loader, WarmModel
from vitx.serve.models.served_model import ServedModel
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import configure_process
from vitx.serve.process.server import _uvicorn_config
from vitx.serve.server_core import ServerCore

CONNECTIONS = 64


class NoModel(Session):
    """Answers at once."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__()
        self._described, self._logits = described, np.zeros((ServeOptions().max_batch, SMALL.classes), np.float32)

    def _infer(self, images: UInt8Array) -> Float32Array:
        return self._logits[: len(images)]

    def describe(self) -> dict[str, Any]:
        return self._described


class Client(asyncio.Transport):
    """One connection: sends the request again when it has the answer, until `left` requests are answered."""

    left = 0
    finished: "asyncio.Future[None]"

    def __init__(self, protocol: asyncio.Protocol, request: bytes) -> None:
        super().__init__()
        self._protocol, self._request, self._in_answer = protocol, request, False
        protocol.connection_made(self)

    def ask(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.data_received, self._request)

    def write(self, data: Any) -> None:
        answer = bytes(data)
        if not (self._in_answer or answer.startswith(b"HTTP/1.1 200")):
            _fail(f"not an answer: {answer[:200]!r}")
            return
        self._in_answer = answer.endswith(b"\r\n\r\n")  # the body is the next write, until the head is cached
        if self._in_answer:
            return
        Client.left -= 1
        if Client.left > 0:
            self.ask()
        elif not Client.finished.done():
            Client.finished.set_result(None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        _fail("the server closed a connection")

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def _fail(reason: str) -> None:
    """An error of its own would end in the server, and the run would wait for ever."""
    if not Client.finished.done():
        Client.finished.set_exception(RuntimeError(reason))


async def microseconds(warm: WarmModel, requests: int, profile: cProfile.Profile | None) -> float:
    """Processor time of one request on this thread, the event loop's."""
    configure_process()
    core = ServerCore(ServeOptions(), [warm.offer])
    core.models.switch(ServedModel(replace(warm, session=NoModel(warm.session.describe())), core.metrics), 0)
    protocol = partial(HeadCacheProtocol, {}, core.limits, core.budget, core.metrics.reject)
    config, state = _uvicorn_config(App(core, None)), ServerState()
    config.load()
    loop = asyncio.get_running_loop()
    request = infer_request(SMALL.name, np.zeros((SMALL.image_size, SMALL.image_size, 3), np.uint8))
    clients = [Client(protocol(config, state, {}, loop), request) for _ in range(CONNECTIONS)]
    Client.left, Client.finished = requests, loop.create_future()
    started = time.thread_time()
    if profile is not None:
        profile.enable()
    for client in clients:
        client.ask()
    await Client.finished
    if profile is not None:
        profile.disable()
    taken = time.thread_time() - started
    await core.models.close()
    core.decoder.close()
    return 1e6 * taken / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time goes; it is then longer")
    parser.add_argument("--folder", type=Path, help="where the exported network is kept")
    arguments = parser.parse_args()
    profile = cProfile.Profile() if arguments.profile else None
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(ServeOptions(device="cpu", instances=INSTANCES, threads=1, allow_uncertified=True))
        warm = loader.warm(loader.verify(bundle_of(SMALL, arguments.folder or Path(folder)).path))
    runs = [uvloop.run(microseconds(warm, arguments.requests, profile)) for _ in range(arguments.runs)]
    print(f"{min(runs):.1f} µs a request, the least of {', '.join(f'{value:.1f}' for value in runs)}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
