"""Single steps as numbers: for TensorBoard, for `vitx watch`, and beside the progress bar."""

import math
import time
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from vitx.core.files import read_record, write_json
from vitx.train.progress import PROGRESS_FILE, RunProgress, duration

# Reading a loss waits for the device, so that not every step is read.
STEPS_BETWEEN_SCALARS = 10
SECONDS_BETWEEN_FILES = 2.0  # of progress.json, which is flushed to the disk


def lacks_end(run: Path) -> bool:
    """Whether the latest training of the run folder `run` was killed or failed, so that it could not write its end."""
    path = run / PROGRESS_FILE
    if not path.is_file():
        return False
    progress = read_record(path, RunProgress)
    return bool(progress.failure) or not progress.ended


class StepLog:
    """Writes every tenth step's losses, rate, gradient norm, images a second and memory as TensorBoard events.

    run: its folder. steps: of the whole run, which has so many epochs. done: those that a resumed run has taken before,
    whose later events are hidden, since a killed process wrote them.
    """

    def __init__(self, run: Path, *, steps: int, epochs: int, done: int, batch_size: int, device: torch.device) -> None:
        self.writer = SummaryWriter(str(run / "tensorboard" / "steps"), purge_step=done + 1)
        self.batch_size, self.device = batch_size, device
        self.first, self.latest, self.note = done, done, ""
        self.start = self.stepped = self.written = time.monotonic()
        self.evaluating, self.evaluations = 0.0, 0  # the seconds between epochs, and how many there were
        self.progress_path = run / PROGRESS_FILE
        self.progress = RunProgress(step=done, steps=steps, epochs=epochs)
        write_json(self.progress_path, self.progress)

    def begin_epoch(self) -> None:
        """Call before the steps of each epoch: since the last step an epoch was evaluated and saved."""
        now = time.monotonic()
        if self.latest > self.first:
            self.evaluating += now - self.stepped
            self.evaluations += 1
        else:
            self.start = now  # a resumed run has told of its last epoch before, which may have been analysed

    def __call__(self, step: int, losses: dict[str, Tensor], rate: float, gradient_norm: Tensor | None) -> None:
        """Take note of step number `step`, from 0 on; the tensors are scalars on the device."""
        self.latest, taken, self.stepped = step + 1, step + 1 - self.first, time.monotonic()
        if (taken - 1) % STEPS_BETWEEN_SCALARS:
            return
        read = {f"step/loss/{name}": float(loss) for name, loss in losses.items()}
        seconds, run = self.stepped - self.start - self.evaluating, self.progress
        speed = taken * self.batch_size / seconds
        # An epoch of this process has to end before it is known how long an evaluation takes.
        evaluations = run.epochs - step // (run.steps // run.epochs)
        left = (run.steps - step - 1) * seconds / taken + evaluations * self.evaluating / max(1, self.evaluations)
        self.note = f"loss {read['step/loss/total']:.3f}, {speed:.0f} images/s, {duration(left)} of the run left"
        known = {"step": step + 1, "images_per_second": speed, "seconds_left": left}
        if math.isfinite(read["step/loss/total"]):
            known["loss"] = read["step/loss/total"]
        self.progress = self.progress.model_copy(update=known)
        if self.stepped - self.written > SECONDS_BETWEEN_FILES:
            self.written = self.stepped
            write_json(self.progress_path, self.progress)
        read |= {"step/lr": rate, "step/images_per_second": speed}
        if gradient_norm is not None:
            read["step/gradient_norm"] = float(gradient_norm)
        if self.device.type == "cuda":
            read["step/memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        for name, value in read.items():
            self.writer.add_scalar(name, value, step + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.writer.close()
        failure = "" if error is None else str(error) or type(error).__name__
        ended = {"step": self.latest, "ended": True, "failure": failure}
        write_json(self.progress_path, self.progress.model_copy(update=ended))
