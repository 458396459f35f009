"""TensorBoard events of a run: `tensorboard --logdir RUN/tensorboard`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


@contextmanager
def scalar_board(folder: Path, epochs_done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes an epoch's metrics; events after `epochs_done` of a killed run are hidden."""
    board = SummaryWriter(str(folder), purge_step=epochs_done + 1 if epochs_done else None)
    try:
        yield lambda metrics: _write(board, metrics)
    finally:
        board.close()


def _write(board: SummaryWriter, metrics: dict[str, Any]) -> None:
    for name, value in scalars(metrics):
        board.add_scalar(name, value, metrics["epoch"])
    board.flush()


def scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an epoch by name, such as "losses/total" and "cos_sim/layer-01"."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/layer-{layer:02d}", number) for layer, number in enumerate(value, 1))
        elif name not in ("epoch", "step"):
            yield name, value
