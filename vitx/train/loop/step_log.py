"""Single steps as numbers: for TensorBoard, and beside the progress bar."""

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

# Reading a loss waits for the device, so that not every step is read.
STEPS_BETWEEN_SCALARS = 10


class StepLog:
    """Writes every tenth step's losses, rate, gradient norm, images a second and memory as TensorBoard events.

    folder: for the events, None where nothing is to be written. steps: of the whole run. done: those that a resumed
    run has taken before, whose later events are hidden, since a killed process wrote them.
    """

    def __init__(self, folder: Path | None, *, steps: int, done: int, batch_size: int, device: torch.device) -> None:
        self.writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None) if folder else None
        self.steps, self.done, self.batch_size, self.device = steps, done, batch_size, device
        self.start, self.first, self.note = time.monotonic(), done, ""

    def __call__(self, step: int, losses: dict[str, Tensor], rate: float, gradient_norm: Tensor | None) -> None:
        """Take note of step number `step`, from 0 on; the tensors are scalars on the device."""
        taken = step + 1 - self.first
        if (taken - 1) % STEPS_BETWEEN_SCALARS:
            return
        read = {f"step/loss/{name}": float(loss) for name, loss in losses.items()}
        seconds = time.monotonic() - self.start
        speed = taken * self.batch_size / seconds
        left = (self.steps - step - 1) * seconds / taken
        self.note = f"loss {read['step/loss/total']:.3f}, {speed:.0f} images/s, {_duration(left)} of the run left"
        if self.writer is None:
            return
        read |= {"step/lr": rate, "step/images_per_second": speed}
        if gradient_norm is not None:
            read["step/gradient_norm"] = float(gradient_norm)
        if self.device.type == "cuda":
            read["step/memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        for name, value in read.items():
            self.writer.add_scalar(name, value, step + 1)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
