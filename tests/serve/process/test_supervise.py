"""What a parent of workers claims and prints, what it passes to a worker, and the worker's signs of life."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from virtual_time import PollingLoop
from vitx.core.errors import InputError
from vitx.serve.options import ServeOptions
from vitx.serve.process.supervisor import ENVIRONMENT, WorkerLink, _Supervisor, supervise, worker_link

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="POSIX sockets")


def test_a_worker_says_every_second_that_it_lives_whoever_listens() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = WorkerLink(theirs, theirs, 0, 0.0, siblings=SimpleNamespace())  # type: ignore[arg-type]

    async def test() -> None:
        beating = asyncio.create_task(link.beat())
        await asyncio.sleep(0.1)
        assert ours.recv(9) == b"."
        await asyncio.sleep(2.5)
        assert ours.recv(9) == b".."
        ours.close()
        await asyncio.sleep(2)
        assert not beating.done()
        beating.cancel()

    with theirs, asyncio.Runner(loop_factory=PollingLoop) as runner:
        runner.run(test())


def test_a_worker_reads_what_its_parent_passed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert worker_link() is None
    listener, (ours, theirs) = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
    address = listener.getsockname()
    monkeypatch.setenv(ENVIRONMENT, f"3 {listener.detach()} {theirs.detach()} 8001 12.5 {folder}")
    link = worker_link()
    assert link is not None
    with ours, link.listener, link.parent, link.siblings.start_lock:
        assert link.listener.getsockname() == address
        link.parent.send(b"!")
        assert ours.recv(1) == b"!"
        assert (link.grpc_port, link.started) == (8001, 12.5)
    assert ENVIRONMENT not in os.environ
    assert worker_link() is None


@pytest.mark.parametrize("several", [False, True])
def test_what_is_printed_names_the_ports_and_one_of_several_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    seen: list[_Supervisor] = []

    async def run(parent: _Supervisor) -> int:
        seen.append(parent)
        parent.say_next()
        assert parent.folder.is_dir()
        assert parent.folder.name.startswith("vitx-")
        return 9

    monkeypatch.setattr(_Supervisor, "run", run)
    bundles = (tmp_path / "a.vitx", tmp_path / "b.vitx")
    options = ServeOptions(bundles=bundles[: 1 + several], workers=3, port=0, grpc_port=0 if several else None)
    assert supervise(options) == 9
    (parent,) = seen
    lines = parent.serving.splitlines()
    url = lines[0].removeprefix("vitx: serving with 3 workers on ")
    assert url.startswith("http://127.0.0.1:")
    assert lines[1:] == ([f"vitx: gRPC on 127.0.0.1:{parent.grpc_port}"] if several else [])
    assert bool(parent.grpc_port) == several
    assert (parent.count, parent.folder.exists(), parent.listener.fileno()) == (3, False, -1)
    model = "?model=NAME" if several else ""
    quote = "'" if several else ""
    assert capsys.readouterr().err == f"next: curl --data-binary @IMAGE {quote}{url}/v1/classify{model}{quote}\n"


def test_the_address_with_tls_is_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(parent: _Supervisor) -> int:
        parent.say_next()
        return 0

    monkeypatch.setattr(_Supervisor, "run", run)
    certificate = tmp_path / "certificate.pem"
    given = ServeOptions(bundles=(tmp_path / "a.vitx",), workers=2, port=0, tls_cert=certificate, tls_key=certificate)
    assert supervise(given) == 0
    assert " https://127.0.0.1:" in capsys.readouterr().err


def test_a_system_without_what_workers_need_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InputError, match=r"^--workers needs a POSIX system: use --instances$"):
        supervise(ServeOptions(bundles=(tmp_path / "a.vitx",), workers=2, port=0))
