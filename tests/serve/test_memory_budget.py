"""The bytes of all requests in flight, and what a process may use without options."""

from dataclasses import FrozenInstanceError, asdict

import pytest

from vitx.serve.errors import RequestError
from vitx.serve.limits import UNCOUNTED_BYTES, MemoryBudget
from vitx.serve.options import ServeOptions


def test_bytes_are_counted_up_to_the_limit_and_given_back() -> None:
    budget = MemoryBudget(100)
    budget.take(60)
    assert (budget.fits(40), budget.fits(41)) == (True, False)
    with pytest.raises(RequestError, match=r"^requests in flight have 60 of 100 bytes$") as refused:
        budget.take(41)
    assert (refused.value.status, refused.value.reason, refused.value.retry_after) == (503, "memory", 1)
    assert budget.used == 60
    budget.take(40)
    budget.give(70)
    assert budget.used == 30


def test_the_limits_without_options() -> None:
    assert UNCOUNTED_BYTES == 65_536
    assert asdict(ServeOptions().limits) == {
        "body_bytes": 64 * 2**20,
        "images": 256,
        "header_bytes": 32 * 2**10,
        "json_depth": 16,
        "connections": 1000,
        "header_seconds": 10,
        "body_seconds": 20,
        "write_seconds": 20,
        "memory_bytes": 2**30,
        "message_seconds": 60,
        "idle_seconds": 75,
        "body_rate": 16 * 2**10,
        "drain_seconds": 30,
    }
    assert asdict(ServeOptions().batching) == {
        "max_batch": 32,
        "max_delay": 0.002,
        "queue": 1024,
        "instances": 1,
        "timeout": None,
        "preferred": (),
    }


@pytest.mark.parametrize(("workers", "mib"), [(1, 1024), (4, 256), (16, 64), (64, 64)])
def test_workers_share_the_memory_but_each_may_have_one_body(workers: int, mib: int) -> None:
    assert ServeOptions(workers=workers).limits.memory_bytes == mib * 2**20


def test_what_could_never_be_queued_is_refused() -> None:
    assert ServeOptions(queue=10).limits.images == 10
    assert ServeOptions(max_memory_mib=10).limits.memory_bytes == 10 * 2**20  # less than a body may have
    assert ServeOptions(timeout_ms=250).batching.timeout == 0.25


@pytest.mark.parametrize(("record", "name"), [("limits", "images"), ("batching", "queue")])
def test_limits_stay_as_they_were_given(record: str, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(getattr(ServeOptions(), record), name, 1)
