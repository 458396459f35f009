"""Training images: shuffled, augmented, and the same for any number of worker processes.

All random draws for a sample follow from (seed, epoch, index, repeat) and the order of an epoch from (seed, epoch), so
resuming needs no generator's state. timm's and torchvision's transforms draw from the global generators, which threads
would share. So the workers are processes, and each sample seeds the generators (`vitx.train.randomness`).
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitx.core.errors import TOO_LARGE, EnvironmentMissing, InputError, first_line
from vitx.core.machine import require_socket_folder
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array, decode, ignore_image_warnings
from vitx.data.image_set import ImageSet
from vitx.train.loop.distributed.batch_part import WHOLE_BATCH, BatchPart
from vitx.train.loop.inputs.augment import Augment
from vitx.train.recipes.image_and_loss_settings import Augmentation

# Independent streams of random numbers from one seed. These numbers must not change: every result depends on them.
ORDER, SAMPLE, CUTMIX, WEIGHTS, NETWORK = range(5)

_LONGEST_SOCKET = len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # over which a worker sends the memory of a batch
BATCHES_AHEAD = 2  # that each worker prepares
# From which the BatchNorm statistics of the averaged weights are measured (docs/training.md).
CALIBRATION_IMAGES = 256


def generator(seed: int, stream: int, *place: int) -> np.random.Generator:
    """The generator of one stream at one place of a run, such as (epoch, batch). numpy hashes the whole tuple."""
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


class _Request(NamedTuple):
    """The batch that a worker is to make: images by index, and how often each was shown before in this epoch."""

    number: int
    epoch: int
    indices: npt.NDArray[np.int64]
    repeats: npt.NDArray[np.int64]


class _BatchDataset(Dataset[Any]):
    """Makes whole batches, in this process or in a worker. A batch a request saves the pickling of single samples."""

    def __init__(self, images: ImageSet, augment: Augment, seed: int) -> None:
        self.images, self.augment, self.seed = images, augment, seed

    def __getitem__(self, request: _Request) -> torch.Tensor | ImageError | EnvironmentMissing:
        """The images of one batch, uint8 (B, S, S, 3), or the error of one that cannot be read, or of full memory."""
        size = self.augment.preprocessing.image_size
        images = torch.empty(len(request.indices), size, size, 3, dtype=torch.uint8)
        if get_worker_info() is not None:
            # Written straight into memory that the training process reads, so that no copy is sent to it.
            try:
                images.share_memory_()  # type: ignore[no-untyped-call]  # torch's
            except RuntimeError as error:
                return _no_shared_memory(error, images.nbytes)
        pixels = images.numpy()
        try:
            for row, (index, repeat) in enumerate(zip(request.indices.tolist(), request.repeats.tolist(), strict=True)):
                pixels[row] = self.sample(request.epoch, index, repeat)
            return images
        except ImageError as error:  # returned: the DataLoader would wrap a raised error in a worker's traceback
            return error

    def sample(self, epoch: int, index: int, repeat: int) -> UInt8Array:
        try:
            image = decode(self.images.read(index))
        except ImageError as error:
            raise ImageError(f"{self.images.keys[index]}: {error}") from None
        # A repeat of 0 is left out: it would change the draws of every recipe without repeats.
        place = (epoch, index, repeat) if repeat else (epoch, index)
        return self.augment(image, generator(self.seed, SAMPLE, *place))


class TrainingData:
    """An image set in random order. The last, smaller batch of an epoch is dropped unless it is the only one.

    With repeated augmentation (Hoffer et al., arXiv 1901.09335) an epoch has as many samples as there are images, but
    shows only 1/repeats of the images, each `repeats` times in a row with other augmentations.
    Raises InputError for a set without images, or of one class, and for an `auto_augment` that timm does not know.
    """

    def __init__(
        self, images: ImageSet, preprocessing: Preprocessing, augmentation: Augmentation, *, batch_size: int, seed: int
    ) -> None:
        if not len(images):
            raise InputError(f"'{images.name}' has no images to train on")
        if len(images.class_names) < 2:
            raise InputError(f"'{images.name}' has one class, '{images.class_names[0]}': expected two at least")
        self.images, self.augmentation = images, augmentation
        self.batch_size, self.seed = min(batch_size, len(images)), seed
        self._dataset = _BatchDataset(images, Augment(preprocessing, augmentation), seed)
        self._requests: list[_Request] = []  # the DataLoader's sampler, filled anew for each epoch
        self._loader: DataLoader[Any] | None = None

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size

    def shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """A permutation of all images, int64 (N,)."""
        return generator(self.seed, ORDER, epoch).permutation(len(self.images))

    def calibration_batches(self, preprocessing: Preprocessing) -> Iterator[UInt8Array]:
        """Some images, equal in every epoch and process, prepared as for evaluation: uint8 (B, S, S, 3)."""
        size = self.batch_size
        chosen = self.shuffled(0)[: max(CALIBRATION_IMAGES, size)]
        whole = self.images.subset(chosen[: len(chosen) // size * size])  # a batch counts, however small
        return whole.batches(preprocessing, size)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The indices of the images of `epoch` in their order, int64 (N,); without repeats `shuffled`."""
        return np.repeat(self.shuffled(epoch), self.augmentation.repeats)[: len(self.images)]

    def sample(self, epoch: int, index: int, repeat: int = 0) -> UInt8Array:
        """Image `index` as it is seen in `epoch`, for the `repeat`-th time: uint8 (S, S, 3)."""
        return self._dataset.sample(epoch, index, repeat)

    def batches(
        self, epoch: int, workers: int = 0, *, first: int = 0, part: BatchPart = WHOLE_BATCH
    ) -> Iterator[Batch]:
        """Return `part` of each batch of `epoch` from number `first` on; `workers` processes prepare them ahead.

        The worker processes start in this call, not in a thread that takes the batches, which must not fork. They live
        as long as this object.
        """
        requests = self._requests_of(epoch, part)[first:]
        prepared = self._prepared_ahead(requests, workers) if workers else map(self._dataset.__getitem__, requests)
        return self._labelled(requests, prepared)

    def _labelled(self, requests: list[_Request], prepared: Iterator[Any]) -> Iterator[Batch]:
        for request, images in zip(requests, prepared, strict=True):
            if isinstance(images, ImageError | EnvironmentMissing):
                raise images
            yield Batch(request.number, images.numpy(), self.images.labels[request.indices])

    def _requests_of(self, epoch: int, part: BatchPart) -> list[_Request]:
        used = self.steps * self.batch_size  # the images of a smaller last batch are dropped
        indices = self.order(epoch)[:used].reshape(self.steps, -1)
        # `order` has each image `repeats` times in a row, so this counts 0, 1, … for each of them.
        repeats = (np.arange(used) % self.augmentation.repeats).reshape(self.steps, -1)
        return [
            _Request(number, epoch, part.of(indices[number]), part.of(repeats[number])) for number in range(self.steps)
        ]

    def _prepared_ahead(self, requests: list[_Request], workers: int) -> Iterator[Any]:
        self._requests[:] = requests  # in place: the loader, whose workers stay alive, keeps this list as its sampler
        if self._loader is None or self._loader.num_workers != workers:
            require_socket_folder(_LONGEST_SOCKET)
            self._loader = DataLoader(
                self._dataset,
                batch_size=None,  # a request is a whole batch already
                sampler=self._requests,
                num_workers=workers,
                prefetch_factor=BATCHES_AHEAD,
                worker_init_fn=_start_worker,
                persistent_workers=True,
            )
        return _started_without_sigterm(self._loader)


def _no_shared_memory(error: RuntimeError, size: int) -> EnvironmentMissing:
    """What to do where a batch of `size` bytes has no room: a container's /dev/shm has 64 MB unless it was told so."""
    if os.strerror(errno.EFBIG) in str(error):  # such memory is a file
        remedy = TOO_LARGE
    else:
        remedy = f"each worker needs {BATCHES_AHEAD + 1} of them; enlarge /dev/shm (docker run --shm-size)"
    return EnvironmentMissing(
        f"no shared memory for a batch of {size:,} bytes ({first_line(error)}): {remedy}, or lower workers "
        "(--set workers=0)"
    )


def _started_without_sigterm(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's iterator, whose workers begin with SIGTERM blocked.

    They inherit it, and so do threads that libraries such as OpenBLAS start in them before `_start_worker`: one that
    did not block the signal would end the worker.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS and Windows
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    """Let the worker ignore signals that do not come from the process that trains.

    A terminal and torchrun signal the whole process group. Only the training process is to react, after the step under
    way; it ends its workers itself.
    """
    for number in (signal.SIGINT, *(() if sys.platform == "win32" else (signal.SIGHUP,))):
        signal.signal(number, signal.SIG_IGN)
    ignore_image_warnings()
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """End this process at the SIGTERM that `parent` sends; ignore those of other senders."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
