"""Batches on their way to the network: bytes until they are on its device, normalised there, one ahead of the steps.

A thread prepares the next batch while a step is taken on this one. For a GPU it copies the bytes into pinned memory and
starts their copy to the device on a stream of its own, beside the step's kernels. On a CPU, where no device takes the
arithmetic over, it normalises them too.
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
from vitx.train.loop.distributed.process_share import Shard
from vitx.train.loop.inputs.training_data import Batch

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceBatch:
    """A `Batch` on the device: uint8 (B, S, S, 3) images, or float32 (B, 3, S, S) where they are normalised already."""

    number: int
    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event | None = None

    def part(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """The images and labels of part `index` of `count`; cut by slices, as an index would wait for the device."""
        rows = Shard(index, count).slices(len(self.labels))
        return _rows(self.images, rows), _rows(self.labels, rows)


def _rows(tensor: Tensor, rows: list[slice]) -> Tensor:
    return tensor[rows[0]] if len(rows) == 1 else torch.cat([tensor[each] for each in rows])


class Prefetcher:
    """Puts batches on `device`, and normalises them there."""

    def __init__(self, preprocessing: Preprocessing, device: torch.device, *, channels_last: bool = False) -> None:
        self.device = device
        self.normalization = Normalization(preprocessing.mean, preprocessing.std, device)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def batches(self, batches: Iterator[Batch], *, ahead: bool) -> Iterator[DeviceBatch]:
        """The same batches on the device; with `ahead` a thread takes them from `batches` before they are asked for."""
        for batch in one_ahead(self._put, batches) if ahead else map(self._put, batches):
            if batch.copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(batch.copied)
                for tensor in (batch.images, batch.labels):
                    tensor.record_stream(stream)  # else its memory is used again while this stream still reads it
            yield batch

    def images(self, batches: Iterable[UInt8Array]) -> Iterator[Tensor]:
        """Batches without labels, normalised; a thread takes them from `batches`, so reading them overlaps too."""
        unlabelled = (Batch(number, images, np.zeros(len(images), np.int64)) for number, images in enumerate(batches))
        for batch in self.batches(unlabelled, ahead=True):
            yield self.normalized(batch.images)

    def normalized(self, images: Tensor) -> Tensor:
        """Images of a `DeviceBatch` as float32 (B, 3, S, S); those that are so already as they are."""
        return images if images.is_floating_point() else self.normalization(images, self.memory_format)

    def _put(self, batch: Batch) -> DeviceBatch:
        if self.stream is None:
            images = self.normalized(torch.from_numpy(batch.images))
            return DeviceBatch(batch.number, images, torch.from_numpy(batch.labels))
        # A thread begins on the first GPU and on its default stream, whatever those of the others are.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            sent = DeviceBatch(batch.number, self._sent(batch.images), self._sent(batch.labels))
            # Bytes wait on the device: a quarter of the memory, and only a part of a batch is needed as floats at once.
            return replace(sent, copied=self.stream.record_event())

    def _sent(self, array: npt.NDArray[np.uint8] | npt.NDArray[np.int64]) -> Tensor:
        """A copy that has begun. The pinned memory is torch's, which uses it again when an event says it was read."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def one_ahead(function: Callable[[S], T], items: Iterator[S]) -> Iterator[T]:
    """`map`, whose next result a thread makes while this one is used; it alone takes from `items`."""
    results = map(function, items)
    with ThreadPoolExecutor(1, "prefetch") as thread:
        coming = thread.submit(next, results, None)
        while (result := coming.result()) is not None:
            coming = thread.submit(next, results, None)
            yield result
