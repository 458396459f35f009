"""`vitx serve --workers` with gRPC on a shared port, and with models that clients load and unload in all workers."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from bundle_fixture import IMAGE_SIZE, write_bundle
from server_process import (
    HANG,
    INFER_BODY,
    ServerProcess,
    end_under_load,
    grpc_address,
    load_on,
    run_serve,
    running_server,
    wait_until,
)
from vitx.core.files import replace_folder
from vitx.serve.process.siblings import Siblings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SO_REUSEPORT, and /proc")

TOKEN = "a-token-of-management"
# Metrics are of all workers, also of one that a busy machine lets wait for longer than a second.
PATIENT = "import vitx.serve.process.server as s; s._METRICS_SECONDS = 60; from vitx.cli import main; main()"


def workers_of(server: ServerProcess) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@contextmanager
def two_workers(folder: Path, *options: str, given: bool = False) -> Iterator[ServerProcess]:
    """A server over a repository with tiny and other, or with these two `given` on the command line."""
    for name in ("tiny", "other"):
        write_bundle(folder / "models" / f"{name}.vitx", name=name)
    (folder / "token").write_text(TOKEN)
    managed = ("--management", "--management-token-file", folder / "token")
    workers = ("--workers", "2", "--threads", "1", "--grpc-port", "0", "--allow-uncertified")
    bundles = [folder / "models" / f"{name}.vitx" for name in ("tiny", "other")]
    source = bundles if given else ("--repository", folder / "models")
    with running_server(*source, *workers, *managed, *options, program=PATIENT) as started:
        grpc_address(started)  # its line is read before the threads of a load ask for it
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """For a test that ends it, or changes which models it has."""
    with two_workers(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For tests that leave it as it was."""
    with two_workers(tmp_path_factory.mktemp("shared")) as started:
        yield started


def loads_of(server: ServerProcess) -> float:
    """By both workers."""
    return server.metric('vitx_model_loads_total{worker="')


def calls_of(server: ServerProcess) -> list[float]:
    return [server.metric(f'vitx_requests_total{{worker="{index}",route="grpc.ModelInfer"') for index in (0, 1)]


def grpc_client(server: ServerProcess, opened: ExitStack) -> Callable[[], str]:
    """A client with a connection of its own that asks once on each call: the status of the answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    client = opened.enter_context(triton.InferenceServerClient(grpc_address(server), channel_args=options))
    tensor = triton.InferInput("images", [1, IMAGE_SIZE, IMAGE_SIZE, 3], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8))

    def ask() -> str:
        try:
            client.infer("tiny", [tensor])
        except InferenceServerException as error:
            refused = error.message() == "the server is shutting down"
            return "refused" if refused else str(error.status()).removeprefix("StatusCode.")
        return "OK"

    return ask


def test_calls_reach_every_worker_and_the_port_is_theirs_alone(shared: ServerProcess) -> None:
    before = calls_of(shared)
    with ExitStack() as opened:
        asked = [grpc_client(shared, opened)() for _ in range(24)]  # each on a connection of its own
    assert asked == ["OK"] * 24
    wait_until(lambda: sum(calls_of(shared)) == sum(before) + 24)
    by_worker = [now - once for now, once in zip(calls_of(shared), before, strict=True)]
    assert min(by_worker) > 0  # with 24 connections a worker is left out once in eight million
    port = int(grpc_address(shared).rpartition(":")[2])
    taken = ("--allow-uncertified", "--port", "0", "--grpc-port", str(port))
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))
    refused = run_serve("nothing.vitx", "--workers", "2", *taken)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert f"error: port {port} on 127.0.0.1 is in use" in refused.stderr
    assert "choose another with --grpc-port" in refused.stderr


def test_hangup_loads_in_place_and_loses_no_call(shared: ServerProcess) -> None:
    before, loads = set(workers_of(shared)), loads_of(shared)
    outcomes, stop = Counter[str](), list[bool]()
    with ExitStack() as opened, ThreadPoolExecutor(4) as pool:

        def load(ask: Callable[[], str]) -> None:
            while not stop:
                outcomes[ask()] += 1

        jobs = [pool.submit(load, grpc_client(shared, opened)) for _ in range(4)]
        wait_until(lambda: outcomes["OK"] > 50)
        shared.process.send_signal(signal.SIGHUP)
        wait_until(lambda: loads_of(shared) == loads + 4)  # two models, two workers
        at = outcomes["OK"]
        wait_until(lambda: outcomes["OK"] > at + 50)
        stop.append(True)
        for job in jobs:
            job.result(HANG)
    assert outcomes.keys() == {"OK"}
    assert set(workers_of(shared)) == before


def test_a_signal_loses_no_accepted_call(server: ServerProcess) -> None:
    with ExitStack() as opened:
        new_client = lambda _: grpc_client(server, opened)  # noqa: E731 - the same for each of the clients
        end_under_load(server, signal.SIGTERM, new_client, good="OK", refused="refused", gone="UNAVAILABLE", clients=8)


def manage(server: ServerProcess, path: str) -> tuple[int, Any]:
    status, text, _ = server.request("POST", f"/v2/repository/{path}", b"", {"Authorization": f"Bearer {TOKEN}"})
    return status, json.loads(text) if text else None


def statuses(server: ServerProcess, model: str) -> set[int]:
    """Of many requests, each on a connection of its own: they reach both workers."""
    return {server.request("POST", f"/v2/models/{model}/infer", INFER_BODY)[0] for _ in range(24)}


def test_loads_and_unloads_apply_to_every_worker(server: ServerProcess, tmp_path: Path) -> None:
    with load_on(server, 4):
        assert manage(server, "models/other/unload") == (200, None)
        assert statuses(server, "other") == {404}
        assert manage(server, "models/other/load") == (200, None)
        assert statuses(server, "other") == {200}
        write_bundle(tmp_path / "models" / "third.vitx", name="third")
        assert manage(server, "models/third/load") == (200, None)
        assert statuses(server, "third") == {200}
        wait_until(lambda: loads_of(server) == 4)
    assert manage(server, "models/none/load")[0] == 404
    damaged = write_bundle(tmp_path / "damaged", name="tiny", fault="nan").path
    replace_folder(damaged, tmp_path / "models" / "tiny.vitx")
    status, text = manage(server, "models/tiny/load")
    assert (status, "not finite" in text["error"]) == (400, True)
    assert statuses(server, "tiny") == {200}  # no other worker has tried it
    for _ in range(24):  # both workers have the reason
        entries = {entry["name"]: entry for entry in manage(server, "index")[1]}
        assert (entries["tiny"]["state"], "not finite" in entries["tiny"]["reason"]) == ("READY", True)
        assert entries["third"]["reason"] == ""
    wait_until(lambda: loads_of(server) == 5)


def test_concurrent_loads_and_unloads_run_one_after_another(shared: ServerProcess) -> None:
    asked = ["models/tiny/load", "models/other/load"] * 8  # more than a worker has threads
    loads = loads_of(shared)
    with load_on(shared, 2), ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda path: manage(shared, path), asked)) == [(200, None)] * len(asked)
    wait_until(lambda: loads_of(shared) == loads + 2 * len(asked))


def replace_worker(server: ServerProcess, models: int) -> None:
    """Kill a worker, and wait for another with so many models."""
    before = workers_of(server)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(workers_of(server)) == 2 and before[0] not in workers_of(server))
    wait_until(lambda: server.metric("vitx_model_info{") == 2 * models)


@pytest.mark.parametrize("given", [False, True])
def test_a_worker_that_starts_later_skips_unloaded_models(tmp_path: Path, given: bool) -> None:
    with two_workers(tmp_path, given=given) as server:
        assert manage(server, "models/other/unload") == (200, None)
        replace_worker(server, 1)
        assert statuses(server, "other") == {404}
        assert statuses(server, "tiny") == {200}
        assert [manage(server, "models/other/load") for _ in range(6)] == [(200, None)] * 6, "by either worker"
        assert statuses(server, "other") == {200}
        assert server.stop() == 0


def test_what_watch_has_loaded_again_is_in_later_workers_too(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--watch") as server:
        assert manage(server, "models/other/unload") == (200, None)
        replace_folder(
            write_bundle(tmp_path / "fresh", name="other", data="elsewhere").path, tmp_path / "models" / "other.vitx"
        )
        wait_until(lambda: statuses(server, "other") == {200})
        replace_worker(server, 2)
        assert statuses(server, "other") == {200}


def test_of_what_is_unloaded_watch_brings_the_version_that_changed_to_later_workers_too(tmp_path: Path) -> None:
    second = write_bundle(tmp_path / "models" / "other" / "2", name="other").path
    with two_workers(tmp_path, "--watch") as server:
        assert manage(server, "models/other/unload") == (200, None)
        os.utime(second / "model.onnx")
        wait_until(lambda: statuses(server, "other") == {200})
        replace_worker(server, 2)
        wait_until(lambda: all(server.metric(f'vitx_requests_total{{worker="{index}"') for index in (0, 1)))
        assert {tuple(server.json("/v2/models/other")["versions"]) for _ in range(24)} == {("2",)}
        assert manage(server, "models/other/load") == (200, None)
        assert {tuple(server.json("/v2/models/other")["versions"]) for _ in range(24)} == {("1", "2")}


def test_what_two_workers_note_at_once_is_kept(tmp_path: Path) -> None:
    """One loads a model by `--watch`, which takes no lock, while the other unloads another."""
    first, second = (Siblings(tmp_path, index) for index in (0, 1))
    lost = []
    with first.start_lock, second.start_lock, ThreadPoolExecutor(1) as other:
        for turn in range(300):
            loading = other.submit(first.note_unloaded, f"loaded-{turn}", is_unloaded=False)
            second.note_unloaded(f"unloaded-{turn}", is_unloaded=True)
            loading.result()
            lost += [turn] if not first.is_unloaded(f"unloaded-{turn}", "1") else []
    assert not lost
    assert not first.is_unloaded("loaded-0", "1")


def test_of_two_workers_with_one_index_the_newer_answers(tmp_path: Path) -> None:
    """While one is replaced, and the old one drains."""

    async def ask() -> dict[str, bytes]:
        asking, *workers = everyone = [Siblings(tmp_path, index) for index in (1, 0, 0)]
        for worker, said in zip(workers, (b"older", b"newer"), strict=True):

            async def answer(text: str, said: bytes = said) -> bytes:
                return said

            await worker.start({"who": answer})
        try:
            return await asking.ask("who", seconds=HANG)
        finally:
            for worker in workers:
                worker.close()
            for each in everyone:
                each.start_lock.close()

    assert asyncio.run(ask()) == {"0": b"newer"}


def test_workers_serve_the_same_versions_after_a_later_one_was_refused(server: ServerProcess, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for version in ("2", "10"):
        write_bundle(models / "tiny" / version, name="tiny")
    (models / "tiny" / "10" / "model.onnx").write_bytes(b"damaged")
    status, text = manage(server, "models/tiny/load")
    assert (status, "model.onnx is corrupt" in text["error"]) == (400, True)
    assert {tuple(server.json("/v2/models/tiny")["versions"]) for _ in range(24)} == {("1", "2")}
    path = "/v2/models/tiny/versions/2/infer"
    assert {server.request("POST", path, INFER_BODY)[0] for _ in range(24)} == {200}
