"""The parent of the workers in virtual time: when each is started, replaced, killed or passed a signal, exactly."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from virtual_time import PollingLoop
from vitx.serve.process import supervisor
from workers_by_hand import Service, kept_alive, settle

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="POSIX signals and sockets")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vitx", "serve"])
    folder = tmp_path / "siblings"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = Service(folder, listener)
        popen = SimpleNamespace(Popen=service.start, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(supervisor, "subprocess", popen)
        yield service


def test_the_first_worker_starts_alone_and_the_others_when_it_is_warm(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        first = service.made[0]
        await asyncio.sleep(100)  # however long it loads
        assert (len(service.made), first.killed) == (1, [])
        descriptor = service.listener.fileno()
        assert first.passed[0] == descriptor
        assert first.given == ["0", str(descriptor), str(first.passed[1]), "8001", "2.5", str(service.folder)]
        assert first.command == [sys.executable, "-m", "vitx", "serve"]
        assert not first.readable
        first.say()
        await settle()
        assert [worker.index for worker in service.made] == [0, 1, 2]
        first.say()
        service.made[1].say()
        await settle()
        assert (service.said, capsys.readouterr().out) == ([], "")
        service.made[2].say()
        await settle()
        for worker in service.made:
            worker.say()
        await settle()
        assert (service.said, capsys.readouterr().out) == (["next"], "serving\n")
        assert len(service.made) == 3

    assert service.run(test, workers=3, grpc_port=8001) == 0


def test_one_worker_that_dies_is_started_at_once_and_again_after_longer_and_longer(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        stays, dies = await service.warm()
        dies.die(3)
        await settle()
        assert len(service.made) == 3
        pauses = []
        for _ in range(8):
            died = asyncio.get_running_loop().time()
            service.made[-1].die()
            await kept_alive(31, stays)
            pauses.append(service.made[-1].started - died)
        assert [round(pause, 3) for pause in pauses] == [1, 2, 4, 8, 16, 30, 30, 30]
        assert [worker.index for worker in service.made[2:]] == [1] * 9
        service.made[-1].say()
        await settle()
        service.made[-1].die()
        await settle()
        assert len(service.made) == 12  # it was warm: at once
        service.made[-1].die()
        await kept_alive(2, stays)
        assert len(service.made) == 13  # and the pauses begin anew

    assert service.run(test) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [
        "vitx: worker 1 (process 4001) ended with exit code 3: another one is started",
        "vitx: worker 1 (process 4001) was ended by SIGKILL: another one is started",
    ]
    assert told[2:] == [*[told[1]] * 9, "vitx: draining; a second signal stops at once"]


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        (1, 1, ""),
        (2, 2, ""),
        (3, 3, ""),
        (4, 4, "vitx: worker 1 ended with exit code 4 before every worker was warm\n"),
        (0, 1, "vitx: worker 1 ended with exit code 0 before every worker was warm\n"),
        (-11, 1, "vitx: worker 1 was ended by SIGSEGV before every worker was warm\n"),
    ],
)
def test_a_worker_that_dies_before_all_are_warm_ends_the_others(
    service: Service, capsys: pytest.CaptureFixture[str], code: int, exit_code: int, told: str
) -> None:
    async def test() -> None:
        service.made[0].say()
        await settle()
        service.made[1].die(code)
        await settle()
        assert service.made[0].told_to_drain
        assert service.listener.fileno() == -1
        service.made[0].die(7)  # what ended first counts
        await settle()
        assert len(service.made) == 2

    assert service.run(test) == exit_code
    assert capsys.readouterr().err == told
    assert service.said == []


def test_a_worker_that_hangs_is_killed_once(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        stays, hangs = await service.warm()
        hangs.say()
        await kept_alive(10, stays)
        assert hangs.killed == []
        await kept_alive(9, stays)
        assert [round(when) for when in hangs.killed] == [11]
        hangs.die()
        await settle()
        starts = service.made[2]
        await kept_alive(40, stays)  # it loads
        assert (starts.killed, stays.killed) == ([], [])

    assert service.run(test) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "vitx: worker 1 (process 4001) hangs: it is killed"
    assert told[1] == "vitx: worker 1 (process 4001) was ended by SIGKILL: another one is started"
    assert len(told) == 3


def test_a_worker_that_drains_has_longer_whether_it_was_warm_or_not(service: Service) -> None:
    async def test() -> None:
        service.made[0].say()
        await asyncio.sleep(5)
        signal.raise_signal(signal.SIGTERM)
        await settle()
        warm, loads = service.made
        assert warm.told_to_drain
        assert loads.told_to_drain
        await asyncio.sleep(19.5)
        assert (warm.killed, loads.killed) == ([], [])
        await asyncio.sleep(2)
        assert [round(when) for when in (*warm.killed, *loads.killed)] == [26, 26]

    assert service.run(test) == 0


def test_a_parent_that_was_stopped_kills_none_for_the_time_it_did_not_listen(service: Service) -> None:
    async def test() -> None:
        workers = await service.warm()
        await asyncio.sleep(0.5)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PollingLoop)
        loop.clock.now += 8
        await asyncio.sleep(9)
        assert [worker.killed for worker in workers] == [[], []]
        await asyncio.sleep(3)
        assert [len(worker.killed) for worker in workers] == [1, 1]  # from then on they were silent themselves

    assert service.run(test) == 0


def test_hangups_replace_each_worker_after_the_other_and_a_hangup_meanwhile_all_of_them_again(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        service.made[0].say()
        await settle()
        signal.raise_signal(signal.SIGHUP)  # before all are warm: it waits until then
        await settle()
        assert len(service.made) == 2
        service.made[1].say()
        await settle()
        old = service.made[:2]
        assert [worker.index for worker in service.made] == [0, 1, 0]
        assert not old[0].told_to_drain
        signal.raise_signal(signal.SIGHUP)
        await settle()
        assert len(service.made) == 3  # one at a time
        service.made[2].say()
        await settle()
        assert old[0].told_to_drain
        assert not old[1].told_to_drain
        old[0].die(0)
        await settle()
        # The second hangup replaces all anew, the one that the first put there too, and no one twice.
        for step in range(2):
            before = len(service.made)
            service.made[-1].say()
            await settle()
            assert len(service.made) == before + 1 - step
        assert [worker.index for worker in service.made] == [0, 1, 0, 1, 0]
        assert [worker.told_to_drain for worker in service.made[1:]] == [True, True, False, False]
        assert [worker.signals for worker in service.made] == [[]] * 5

    assert service.run(test) == 0
    assert capsys.readouterr().err.count("vitx: every worker is replaced, one after another\n") == 2


def test_a_replacement_that_dies_leaves_the_workers_that_run(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        old = await service.warm()
        signal.raise_signal(signal.SIGHUP)
        await settle()
        service.made[2].die(2)
        await kept_alive(40, *old)
        assert len(service.made) == 3
        assert not any(worker.told_to_drain for worker in old)
        signal.raise_signal(signal.SIGHUP)  # the next one is followed
        await settle()
        assert [worker.index for worker in service.made] == [0, 1, 0, 0]

    assert service.run(test) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[1] == "vitx: the replacement of worker 0 ended with exit code 2: the workers that run stay"


def test_a_worker_that_dies_while_another_loads_in_its_place_is_not_started_twice(service: Service) -> None:
    async def test() -> None:
        old = await service.warm()
        signal.raise_signal(signal.SIGHUP)
        await settle()
        old[0].die()
        await kept_alive(2, old[1])
        assert len(service.made) == 3
        service.made[2].die()  # then nothing is in its place
        await kept_alive(2, old[1])
        assert [worker.index for worker in service.made[3:]] == [0]
        old[1].die()
        await kept_alive(2)
        assert [worker.index for worker in service.made[3:]] == [0, 1]

    assert service.run(test) == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_with_grpc_a_signal_is_passed_on_and_to_a_worker_that_loads_once_it_is_warm(
    service: Service, number: signal.Signals
) -> None:
    async def test() -> None:
        service.made[0].say()
        await settle()
        for _ in range(2):
            signal.raise_signal(number)
            await settle()
        first, second = service.made
        assert (first.signals, second.signals) == ([number] * 2, [])
        second.say()
        await settle()
        second.say()
        await settle()
        assert (first.signals, second.signals) == ([number] * 2, [number])
        assert len(service.made) == 2

    assert service.run(test, grpc_port=8001) == 0


def test_a_worker_that_fails_while_it_drains_is_what_the_exit_code_tells(service: Service) -> None:
    async def test() -> None:
        first, second = await service.warm()
        signal.raise_signal(signal.SIGINT)
        await settle()
        assert service.listener.fileno() == -1
        assert first.told_to_drain
        assert second.told_to_drain
        first.die(5)
        await settle()
        second.die(6)
        await settle()
        assert (first.waited, second.waited) == ([10, None], [10, None])

    assert service.run(test) == 5


@pytest.mark.parametrize("code", [-15, 1])
def test_a_signal_that_ends_a_worker_that_loads_is_no_failure(service: Service, code: int) -> None:
    async def test() -> None:
        signal.raise_signal(signal.SIGTERM)
        await settle()
        service.made[0].die(code)

    assert service.run(test) == 0


def test_a_worker_that_gets_warm_while_it_is_to_end_is_not_announced(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        signal.raise_signal(signal.SIGTERM)
        await settle()
        service.made[0].say()
        await settle()
        service.made[0].die(4)  # it was warm: its exit code counts

    assert service.run(test, workers=1) == 4
    assert (service.said, capsys.readouterr().out) == ([], "")


def test_a_process_that_stays_after_its_link_is_closed_is_killed(service: Service) -> None:
    async def test() -> None:
        stays, closed = await service.warm()
        closed.exits = False
        closed.link.close()
        await settle()
        assert (len(closed.killed), stays.killed, closed.waited) == (1, [], [10, None])
        assert len(service.made) == 3

    assert service.run(test) == 0


def test_a_second_signal_kills_and_leaves_no_folder(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        await service.warm()
        signal.raise_signal(signal.SIGTERM)
        await settle()
        assert service.folder.exists()
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(1)

    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        service.run(test)
    assert ended.value.code == 130
    assert [len(worker.killed) for worker in service.made] == [1, 1]
    assert not service.folder.exists()
    assert capsys.readouterr().err == (
        "vitx: draining; a second signal stops at once\nvitx: stopped by a second signal\n"
    )


def test_none_is_started_once_it_ends(service: Service) -> None:
    async def test() -> None:
        stays, dies = await service.warm()
        dies.die()
        await settle()
        service.made[2].die()  # another starts a second later
        await settle()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(3)
        assert len(service.made) == 3
        assert stays.told_to_drain

    assert service.run(test) == 0


def test_the_first_worker_that_cannot_be_started_is_raised(service: Service) -> None:
    async def test() -> None:
        raise AssertionError("it has ended")

    service.refused = True
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        service.run(test)
    assert service.made == []


def test_a_worker_that_cannot_be_started_now_is_started_later(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    """What killed a worker, such as a lack of memory, may refuse the next one too: the others serve on."""

    async def test() -> None:
        stays, dies = await service.warm()
        service.refused = True
        dies.die()
        await kept_alive(100, stays)
        assert [round(at) for at in service.tried] == [0, 1, 3, 7, 15, 31, 61, 91]
        service.refused = False
        await kept_alive(30, stays)
        assert [(worker.index, round(worker.started)) for worker in service.made[2:]] == [(1, 121)]
        service.made[2].die()  # the pauses go on
        await kept_alive(31, stays)
        assert [round(worker.started) for worker in service.made[3:]] == [160]
        service.made[3].say()
        await settle()
        signal.raise_signal(signal.SIGHUP)
        await settle()
        assert len(service.made) == 5  # they are replaced as ever

    assert service.run(test) == 0
    told = "vitx: worker 1 cannot be started now: Resource temporarily unavailable\n"
    assert capsys.readouterr().err.count(told) == 8


def test_a_worker_that_cannot_be_replaced_now_stays(service: Service) -> None:
    async def test() -> None:
        workers = await service.warm()
        service.refused = True
        signal.raise_signal(signal.SIGHUP)
        await kept_alive(100, *workers)
        assert len(service.tried) == 1
        assert service.parent.to_replace == []
        assert not any(worker.told_to_drain for worker in workers)

    assert service.run(test) == 0


def test_what_a_callback_raises_ends_the_parent(service: Service) -> None:
    async def test() -> None:
        await service.warm()
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await settle()
        service.parent.stopping = True

    with pytest.raises(ZeroDivisionError):
        service.run(test)
