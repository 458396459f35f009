"""Training images: shuffled, augmented, and the same for any number of worker processes.

All randomness of a sample follows from (seed, epoch, index, repeat) and the order of an epoch from (seed, epoch), so
nothing has to be stored to resume. timm's and torchvision's transforms draw from the global generators, which threads
would share: workers are processes, and each sample seeds them (`vitx.train.randomness`).
"""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array, decode
from vitx.data.image_set import ImageSet
from vitx.train.loop.distributed.process_share import WHOLE, Shard
from vitx.train.loop.inputs.augment import Augment
from vitx.train.recipes.image_groups import Augmentation

# Separate streams of one seed. Numbers must stay as they are: they decide every result.
ORDER, SAMPLE, CUTMIX, WEIGHTS, NETWORK = range(5)

BATCHES_AHEAD = 2  # of each worker


def generator(seed: int, stream: int, *place: int) -> np.random.Generator:
    """The random generator of one purpose at one place of a run."""
    return np.random.default_rng((seed, stream, *place))


def seed_of(seed: int, stream: int, *place: int) -> int:
    """A 63-bit seed for the generators of torch and Python."""
    return int(generator(seed, stream, *place).integers(2**63))


@dataclass(frozen=True)
class Batch:
    """uint8 (B, S, S, 3) images, int64 (B,) labels, and the batch's number in its epoch."""

    number: int
    images: UInt8Array
    labels: npt.NDArray[np.int64]


class _Part(NamedTuple):
    """What a worker is asked for: images by index, and how often each was seen before in this epoch."""

    number: int
    epoch: int
    indices: npt.NDArray[np.int64]
    repeats: npt.NDArray[np.int64]


class _Samples(Dataset[Any]):
    """Makes whole batches, in this process or in a worker."""

    def __init__(self, images: ImageSet, augment: Augment, seed: int) -> None:
        self.images, self.augment, self.seed = images, augment, seed

    def __getitem__(self, part: _Part) -> torch.Tensor | ImageError:
        """The images of one batch, uint8 (B, S, S, 3), or what is wrong with one of them."""
        side = self.augment.preprocessing.image_size
        images = torch.empty(len(part.indices), side, side, 3, dtype=torch.uint8)
        if get_worker_info() is not None:
            images.share_memory_()  # type: ignore[no-untyped-call]  # torch; written where the process that trains reads it
        pixels = images.numpy()
        try:
            for row, (index, repeat) in enumerate(zip(part.indices.tolist(), part.repeats.tolist(), strict=True)):
                pixels[row] = self.sample(part.epoch, index, repeat)
            return images
        except ImageError as error:  # returned, so that its text crosses the processes unchanged
            return error

    def sample(self, epoch: int, index: int, repeat: int) -> UInt8Array:
        try:
            image = decode(self.images.read(index))
        except ImageError as error:
            raise ImageError(f"{self.images.keys[index]}: {error}") from None
        place = (epoch, index, repeat) if repeat else (epoch, index)
        return self.augment(image, generator(self.seed, SAMPLE, *place))


class TrainingData:
    """An image set in random order. The last, smaller batch of an epoch is dropped unless it is the only one.

    With repeated augmentation (Hoffer et al., arXiv 1901.09335) an epoch has as many samples as there are images, but
    shows only 1/repeats of the images, each `repeats` times in a row with other augmentations.
    Raises InputError for a set without images and for an `auto_augment` that timm does not know.
    """

    def __init__(
        self, images: ImageSet, preprocessing: Preprocessing, augmentation: Augmentation, *, batch_size: int, seed: int
    ) -> None:
        if not len(images):
            raise InputError(f"'{images.name}' has no images to train on")
        self.images, self.augmentation = images, augmentation
        self.batch_size, self.seed = min(batch_size, len(images)), seed
        self._samples = _Samples(images, Augment(preprocessing, augmentation), seed)
        self._plan: list[_Part] = []
        self._loader: DataLoader[Any] | None = None

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The images of `epoch` in their order; without repeats a permutation of all."""
        shuffled = generator(self.seed, ORDER, epoch).permutation(len(self.images))
        return np.repeat(shuffled, self.augmentation.repeats)[: len(shuffled)]

    def sample(self, epoch: int, index: int, repeat: int = 0) -> UInt8Array:
        """Image `index` as it is seen in `epoch`, for the `repeat`-th time: uint8 (S, S, 3)."""
        return self._samples.sample(epoch, index, repeat)

    def batches(self, epoch: int, workers: int = 0, *, first: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Return the batches of `epoch` from number `first`, or a part of each; `workers` processes prepare them ahead.

        The processes start here, so that a thread which takes the batches forks none, and live as long as this object.
        """
        parts = self._parts(epoch, shard)[first:]
        prepared = self._ahead(parts, workers) if workers else map(self._samples.__getitem__, parts)
        return self._labelled(parts, prepared)

    def _labelled(self, parts: list[_Part], prepared: Iterator[Any]) -> Iterator[Batch]:
        for part, images in zip(parts, prepared, strict=True):
            if isinstance(images, ImageError):
                raise images
            yield Batch(part.number, images.numpy(), self.images.labels[part.indices])

    def _parts(self, epoch: int, shard: Shard) -> list[_Part]:
        used = self.steps * self.batch_size
        indices = self.order(epoch)[:used].reshape(self.steps, -1)
        repeats = (np.arange(used) % self.augmentation.repeats).reshape(self.steps, -1)
        return [
            _Part(number, epoch, shard.of(indices[number]), shard.of(repeats[number])) for number in range(self.steps)
        ]

    def _ahead(self, parts: list[_Part], workers: int) -> Iterator[Any]:
        self._plan[:] = parts
        if self._loader is None or self._loader.num_workers != workers:
            self._loader = DataLoader(
                self._samples,
                batch_size=None,
                sampler=self._plan,
                num_workers=workers,
                collate_fn=_unchanged,
                prefetch_factor=BATCHES_AHEAD,
                worker_init_fn=_start_worker,
                persistent_workers=True,
            )
        return iter(self._loader)


def _unchanged(images: Any) -> Any:
    return images


def _start_worker(_: int) -> None:
    """A terminal and torchrun signal the whole group, but only the process that trains stops, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
