"""Workers of one parent in one process: questions, their order and time, locks, and which models are unloaded."""

import asyncio
import fcntl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from server_process import HANG
from vitx.serve.process.siblings import LONGEST_SOCKET, Siblings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as workers are")


def among(folder: Path, use: Callable[..., Awaitable[None]], *indexes: int) -> None:
    """Run `use` with a worker of each index, which answers "name" with its index and "late" never."""

    async def run() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        workers = [Siblings(folder, index) for index in indexes]
        asked: list[tuple[int, str]] = []
        never = asyncio.Event()

        def handlers(index: int) -> dict[str, Callable[[str], Awaitable[bytes]]]:
            async def name(text: str) -> bytes:
                asked.append((index, text))
                return f"{index}:{text}".encode()

            async def late(text: str) -> bytes:
                await never.wait()
                return b"late"

            async def second_late(text: str) -> bytes:
                return b"" if index == 1 else await late(text) if index == 2 else b"here"

            async def broken(text: str) -> bytes:
                raise OSError("the disk is gone")

            return {"name": name, "late": late, "second-late": second_late, "broken": broken}

        for index, worker in zip(indexes, workers, strict=True):
            await worker.start(handlers(index))
        try:
            await use(workers, asked)
            assert failures == []
        finally:
            never.set()
            for worker in workers:
                worker.start_lock.close()
                worker.close()

    asyncio.run(run())


def test_all_are_asked_at_once_or_the_others_in_turn(tmp_path: Path) -> None:
    async def use(workers: list[Siblings], asked: list[tuple[int, str]]) -> None:
        texts = {str(index): f"{index}:a text: é".encode() for index in (3, 4, 5)}
        assert await workers[1].ask("name", "a text: é", seconds=HANG) == texts
        assert await workers[1].ask("name", seconds=HANG) == {"3": b"3:", "4": b"4:", "5": b"5:"}
        asked.clear()
        assert await workers[1].ask_others("name", "aX", seconds=HANG) == {"3": b"3:aX", "5": b"5:aX"}
        assert asked == [(3, "aX"), (5, "aX")]
        assert await workers[0].ask("unknown", seconds=HANG) == {}

    among(tmp_path, use, 3, 4, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["management.lock"]


def test_who_has_no_answer_in_time_is_left_out(tmp_path: Path) -> None:
    async def use(workers: list[Siblings], asked: list[tuple[int, str]]) -> None:
        start = time.monotonic()
        assert await workers[0].ask("second-late", seconds=0.3) == {"3": b"here"}
        assert await workers[0].ask_others("late", "", seconds=0.1) == {}
        assert time.monotonic() - start < HANG
        start = time.monotonic()
        assert await workers[0].ask_others("broken", "", seconds=2 * HANG) == {}
        assert time.monotonic() - start < HANG, "a load that fails in a worker held all management for ten minutes"
        (tmp_path / "9-1.worker").touch()  # of one that is gone
        assert (await workers[0].ask("name", seconds=HANG)).keys() == {"1", "2", "3"}
        for question in (b"\xff\xfe\n", b"x" * 2**17 + b"\n"):  # no worker says this
            reader, writer = await asyncio.open_unix_connection(workers[0]._path)
            with closing(writer), suppress(ConnectionError):
                writer.write(question)
                assert await asyncio.wait_for(reader.read(), HANG) == b""
        assert (await workers[0].ask("name", seconds=HANG)).keys() == {"1", "2", "3"}

    among(tmp_path, use, 1, 2, 3)


def test_what_the_newer_of_two_with_one_index_answers_counts(tmp_path: Path) -> None:
    async def use(workers: list[Siblings], asked: list[tuple[int, str]]) -> None:
        newer = Siblings(tmp_path, 1)

        async def name(text: str) -> bytes:
            return b"newer"

        await newer.start({"name": name})
        newer.start_lock.close()
        assert await workers[0].ask("name", seconds=HANG) == {"1": b"newer"}
        assert await workers[0].ask_others("name", "", seconds=HANG) == {"1": b"newer"}
        newer.close()
        newer.close()  # its socket may be gone
        assert await workers[0].ask("name", seconds=HANG) == {"1": b"1:"}

    among(tmp_path, use, 1)


def test_a_socket_name_is_no_longer_than_it_is_said_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "vitx-abcdefgh"
    folder.mkdir()
    worker = Siblings(folder, 9999)
    worker.start_lock.close()
    assert len(str(worker._path)) - len(str(tmp_path)) == LONGEST_SOCKET


def test_models_are_managed_by_one_worker_and_by_none_while_one_starts(tmp_path: Path) -> None:
    inside: list[int] = []
    order: list[str] = []

    async def use(workers: list[Siblings], asked: list[tuple[int, str]]) -> None:
        async def manage(worker: Siblings) -> None:
            async with worker.exclusive():
                inside.append(1)
                assert len(inside) == 1
                with (tmp_path / "management.lock").open() as other, pytest.raises(BlockingIOError):
                    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as one that starts
                await asyncio.sleep(0.01)
                inside.pop()
                order.append("managed")

        blocked = asyncio.ensure_future(manage(workers[0]))
        workers[1].start_lock.close()
        await asyncio.sleep(0.1)
        assert not blocked.done(), "it is itself starting"
        order.append("started")
        workers[0].start_lock.close()
        threads = threading.active_count()
        await asyncio.gather(blocked, *(manage(worker) for worker in workers * 3))
        assert order == ["started", *["managed"] * 7]
        assert threading.active_count() <= threads + 2, "one thread of each waits for the file"

    among(tmp_path, use, 1, 2)


def test_a_model_is_unloaded_until_that_version_is_loaded(tmp_path: Path) -> None:
    first, second = (Siblings(tmp_path, index) for index in (1, 2))
    for worker in (first, second):
        worker.start_lock.close()

    def unloaded(name: str = "a/b") -> list[bool]:
        return [second.is_unloaded(name, version) for version in ("1", "2")]

    first.note_loaded("a/b", "1")
    assert unloaded() == [False, False]
    first.note_unloaded("a/b", is_unloaded=True)
    assert (unloaded(), unloaded("other")) == ([True, True], [False, False])
    second.note_loaded("a/b", "2")
    second.note_loaded("other", "1")
    assert (unloaded(), unloaded("other")) == ([True, False], [False, False])
    first.note_unloaded("a/b", is_unloaded=True)
    assert unloaded() == [True, True]
    first.note_unloaded("a/b", is_unloaded=False)
    first.note_unloaded("a/b", is_unloaded=False)
    assert unloaded() == [False, False]
