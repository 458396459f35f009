"""Failures of a training: a loss that is not finite (its batch is kept), a full disk, a process that died."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from vitx.core.errors import FULL_DISK, TOO_LARGE, EnvironmentMissing
from vitx.core.files import staged_folder, write_json
from vitx.core.run import RunFolder
from vitx.train.loop.first_batch import contact_sheet
from vitx.train.loop.inputs.training_data import TrainingData

FAILED_BATCH_FOLDER = "failed-batch"


def save_failed_batch(run: RunFolder, data: TrainingData, epoch: int, number: int) -> str:
    """Write batch `number` of `epoch` into the run folder and return the folder written.

    `images.png` has the augmented images before mixing, row by row; `batch.json` has their labels in the same order.
    """
    batch = next(iter(data.batches(epoch, first=number)))  # made again: a batch follows from (seed, epoch, number)
    folder = run.path / FAILED_BATCH_FOLDER
    with staged_folder(folder) as stage:
        contact_sheet(batch.images).save(stage / "images.png")
        labels = [{"label": int(label), "class": data.images.class_names[label]} for label in batch.labels]
        write_json(stage / "batch.json", {"epoch": epoch, "batch": number, "seed": data.seed, "images": labels})
    return str(folder)


@contextmanager
def explain_full_disk(run: RunFolder) -> Iterator[None]:
    """Turn the error of a full or read-only disk into an EnvironmentMissing that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f" '{error.filename}'" if error.filename else ""
        remedies = {errno.EFBIG: TOO_LARGE, errno.EROFS: "mount it for writing"}
        remedy = remedies.get(error.errno, "make room")
        way_on = f"'{run.path}' keeps what was saved: {remedy}, then go on with --resume"
        raise EnvironmentMissing(
            f"cannot write{where}: {error.strerror}; {way_on if run.exists() else f'{remedy}, then begin again'}"
        ) from None


@contextmanager
def explain_lost_process(run: RunFolder) -> Iterator[None]:
    """Turn a failed exchange with a process that died into an EnvironmentMissing that says how to go on."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):
            raise EnvironmentMissing(
                f"a process that prepares images was killed, perhaps for want of memory: '{run.path}' keeps what was "
                "saved; lower workers or batch_size, and go on with --resume"
            ) from None
        # gloo raises a plain RuntimeError that names its source file.
        if not dist.is_initialized() or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise EnvironmentMissing(
            f"another process has died or cannot be reached: '{run.path}' keeps what was saved, go on with "
            f"--resume, with any number of processes ({str(error).splitlines()[0][:200]})"
        ) from None
