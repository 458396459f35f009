"""Batches on the device: the same as those of the host, one ahead, and no thread left behind."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from server_process import HANG
from vitx.core.preprocess import Preprocessing
from vitx.models import image_tensor
from vitx.train.loop.distributed.batch_part import BatchPart
from vitx.train.loop.inputs.prefetch import Prefetcher, one_ahead
from vitx.train.loop.inputs.training_data import Batch

CPU = torch.device("cpu")
PREPROCESSING = Preprocessing(image_size=8, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# Each channel has all 256 values, so equal bits here are equal bits everywhere.
PIXELS = (
    np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (3, 2)), axis=1).T.reshape(8, 8, 8, 3)
)
LABELS = np.arange(8)


def batch(number: int = 0) -> Batch:
    return Batch(number, PIXELS + np.uint8(number), LABELS)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_normalised_as_everywhere_else(ahead: bool, channels_last: bool) -> None:
    prefetcher = Prefetcher(PREPROCESSING, CPU, channels_last=channels_last)
    found = list(prefetcher.batches(iter([batch(0), batch(1), batch(2)]), ahead=ahead))
    assert [each.number for each in found] == [0, 1, 2]
    for number, each in enumerate(found):
        images = prefetcher.normalized(each.images)
        assert torch.equal(images, image_tensor(batch(number).images, PREPROCESSING.mean, PREPROCESSING.std))
        assert images.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert each.labels.tolist() == LABELS.tolist()


def test_normalisation_is_by_its_formula() -> None:
    x = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).double()
    mean, std = (torch.tensor(each).double().view(1, 3, 1, 1) for each in (PREPROCESSING.mean, PREPROCESSING.std))
    found = Prefetcher(PREPROCESSING, CPU).normalized(torch.from_numpy(PIXELS))
    torch.testing.assert_close(found, ((x / 255 - mean) / std).float(), rtol=1e-5, atol=1e-6)


def test_parts_are_those_of_batch_part() -> None:
    (whole,) = Prefetcher(PREPROCESSING, CPU).batches(iter([batch()]), ahead=True)
    for index in range(2):
        rows = BatchPart(index, 2).of(np.arange(8))
        images, labels = whole.part(index, 2)
        assert labels.tolist() == rows.tolist()
        assert torch.equal(images, whole.images[rows])
    assert whole.part(0, 1)[0].data_ptr() == whole.images.data_ptr(), "a whole batch is not copied"


def test_evaluation_gets_images_alone() -> None:
    found = list(Prefetcher(PREPROCESSING, CPU).images([PIXELS, PIXELS[:3]]))
    assert [len(images) for images in found] == [8, 3]
    assert torch.equal(found[0][:3], found[1])


def test_the_next_result_is_made_while_one_is_used() -> None:
    taken = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(taken):
            assert threading.current_thread().name.startswith("prefetch")
            event.set()
            yield number

    results = one_ahead(lambda number: number * 10, items())
    assert not taken[0].is_set(), "nothing is begun before it is asked for"
    assert next(results) == 0
    assert taken[1].wait(HANG)
    assert not taken[2].is_set(), "no more than one ahead"
    assert list(results) == [10, 20]


def test_an_interrupt_does_not_wait_for_storage_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, waits = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        waits.set()
        answer.wait(HANG)
        yield 0

    def interrupted(self: Future[int], timeout: float | None = None) -> int:
        assert waits.wait(HANG)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(one_ahead(str, items()))
    assert time.monotonic() - started < HANG / 2  # it is silent for twice as long
    answer.set()


def test_breaking_off_and_errors_leave_no_thread() -> None:
    before = set(threading.enumerate())
    results = one_ahead(str, iter(range(5)))
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator
    assert set(threading.enumerate()) <= before

    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    results = one_ahead(str, items())
    assert next(results) == "1"
    with pytest.raises(OSError, match="gone"):
        next(results)
    assert set(threading.enumerate()) <= before


class OnGpu:
    """A tensor of a GPU that there need not be: what is done to it, in order."""

    def __init__(self, name: str, done: list[Any]) -> None:
        self.name, self.done = name, done

    def pin_memory(self) -> "OnGpu":
        self.done.append(f"pin {self.name}")
        return self

    def to(self, device: Any, *, non_blocking: bool) -> "OnGpu":
        self.done.append(f"copy {self.name} to {device} {non_blocking}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.done.append(f"{self.name} used by {stream.name}")


def test_a_gpu_copies_beside_the_steps_and_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextmanager
    def within(name: str) -> Iterator[None]:
        done.append(f"enter {name}")
        yield
        done.append(f"leave {name}")

    current = SimpleNamespace(name="steps", wait_event=lambda event: done.append(f"wait for {event}"))
    copying = SimpleNamespace(name="copies", record_event=lambda: done.append("record") or "the copy")  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "device", lambda device: within(f"{device}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current if device == "gpu" else None)
    monkeypatch.setattr(torch, "from_numpy", lambda array: OnGpu("images" if array.ndim == 4 else "labels", done))
    prefetcher: Any = object.__new__(Prefetcher)
    prefetcher.device, prefetcher.stream = "gpu", copying
    (found,) = prefetcher.batches(iter([batch(3)]), ahead=False)
    copies = [
        f"{verb} {name}{to}" for name in ("images", "labels") for verb, to in (("pin", ""), ("copy", " to gpu True"))
    ]
    assert done == [
        *("enter gpu", "enter copies", *copies, "record", "leave copies", "leave gpu"),
        *("wait for the copy", "images used by steps", "labels used by steps"),
    ]
    assert (found.number, found.images.name, found.labels.name, found.copied) == (3, "images", "labels", "the copy")


def test_a_batch_stays_as_it_was() -> None:
    (found,) = Prefetcher(PREPROCESSING, CPU).batches(iter([batch()]), ahead=False)
    assert found.copied is None
    for one in (found, batch()):
        with pytest.raises(FrozenInstanceError):
            one.number = 5  # type: ignore[misc]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gets_bytes_and_normalises_to_the_same_bits() -> None:
    device = torch.device("cuda")
    prefetcher = Prefetcher(PREPROCESSING, device)
    many = [Batch(number, np.roll(PIXELS, number, axis=0), LABELS) for number in range(50)]
    for sent, there in zip(many, prefetcher.batches(iter(many), ahead=True), strict=True):
        assert there.images.dtype == torch.uint8
        assert there.images.device.type == "cuda"
        expected = image_tensor(sent.images, PREPROCESSING.mean, PREPROCESSING.std)
        assert torch.equal(prefetcher.normalized(there.images).cpu(), expected)
        assert there.labels.tolist() == LABELS.tolist()
