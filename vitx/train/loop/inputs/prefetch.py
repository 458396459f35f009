"""Batches moved to the network's device as bytes and normalised there, one batch ahead of the steps.

A thread prepares the next batch while the current step runs. For a GPU it copies the bytes into pinned memory and
starts their copy to the device on a separate stream, beside the step's kernels. For a CPU it normalises them as well.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.models import Normalization
from vitx.train.loop.distributed.batch_part import BatchPart
from vitx.train.loop.inputs.training_data import Batch

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceBatch:
    """A `Batch` on the device: images uint8 (B, S, S, 3), or float32 (B, 3, S, S) if they are normalised; labels (B,).

    `copied` is recorded on the copying stream when the batch is on the GPU.
    """

    number: int
    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event | None = None

    def part(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """The images and labels of part `index` of `count`."""
        # Slices: indexing by a tensor would wait for the device.
        rows = BatchPart(index, count).slices(len(self.labels))
        return _rows(self.images, rows), _rows(self.labels, rows)


def _rows(tensor: Tensor, rows: list[slice]) -> Tensor:
    return tensor[rows[0]] if len(rows) == 1 else torch.cat([tensor[each] for each in rows])


class Prefetcher:
    """Moves batches to `device` and normalises them there."""

    def __init__(self, preprocessing: Preprocessing, device: torch.device, *, channels_last: bool = False) -> None:
        self.device = device
        self.normalization = Normalization(preprocessing.mean, preprocessing.std, device)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def batches(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[DeviceBatch]:
        """The same batches on the device; with `ahead` a thread prepares each before it is asked for."""
        for batch in one_ahead(self._to_device, batches) if ahead else map(self._to_device, batches):
            if batch.copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(batch.copied)  # the GPU waits, not this thread
                for tensor in (batch.images, batch.labels):
                    tensor.record_stream(stream)  # else its memory is used again while this stream still reads it
            yield batch

    def images(self, batches: Iterable[UInt8Array]) -> Iterator[Tensor]:
        """uint8 batches (B, S, S, 3) without labels as float32 (B, 3, S, S); a thread reads and prepares them ahead."""
        unlabelled = (Batch(number, images, np.zeros(len(images), np.int64)) for number, images in enumerate(batches))
        for batch in self.batches(unlabelled, ahead=True):
            yield self.normalized(batch.images)

    def normalized(self, images: Tensor) -> Tensor:
        """Images of a `DeviceBatch` as float32 (B, 3, S, S); images that are floats already are returned unchanged."""
        return images if images.is_floating_point() else self.normalization(images, self.memory_format)

    def _to_device(self, batch: Batch) -> DeviceBatch:
        if self.stream is None:
            images = self.normalized(torch.from_numpy(batch.images))
            return DeviceBatch(batch.number, images, torch.from_numpy(batch.labels))
        # The current GPU and stream are a thread's own, and a new thread begins with the first GPU's default stream.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            # Bytes wait on the device: a quarter of the memory, and only a part of a batch is needed as floats at once.
            sent = DeviceBatch(batch.number, self._start_copy(batch.images), self._start_copy(batch.labels))
            return replace(sent, copied=self.stream.record_event())

    def _start_copy(self, array: npt.NDArray[np.uint8] | npt.NDArray[np.int64]) -> Tensor:
        """Start a copy to the GPU; torch reuses the pinned memory only when the copy has read it."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def one_ahead(function: Callable[[S], T], items: Iterator[S]) -> Iterator[T]:
    """Like `map`, with the next result computed in a thread while the caller uses this one.

    `items` is read in that thread alone. No result may be None, which stands for the end. At the end the thread is
    waited for, but not after a KeyboardInterrupt: storage that does not answer may hold it for ever.
    """
    results, interrupted = map(function, items), False
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        future = thread.submit(next, results, None)
        while (result := future.result()) is not None:
            future = thread.submit(next, results, None)
            yield result
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        thread.shutdown(wait=not interrupted)
