"""TensorBoard events of a run: `tensorboard --logdir RUN/tensorboard`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


@contextmanager
def tensorboard_writer(folder: Path, first_epoch: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes the metrics of an epoch.

    Events from `first_epoch` on are hidden: a killed process wrote them for epochs that are written again.
    """
    writer = SummaryWriter(str(folder), purge_step=first_epoch)
    try:
        yield lambda metrics: _write(writer, metrics)
    finally:
        writer.close()


def _write(writer: SummaryWriter, metrics: dict[str, Any]) -> None:
    for name, value in scalars(metrics):
        writer.add_scalar(name, value, metrics["epoch"])
    writer.flush()


def scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of an epoch as single numbers by name, such as "losses/total" and "cos_sim/layer-01"."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/layer-{layer:02d}", number) for layer, number in enumerate(value, 1))
        elif name not in ("epoch", "step"):
            yield name, value
