"""Where the metrics of each epoch go: TensorBoard's events, and a project of Weights & Biases, an optional package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from vitx.core.errors import EnvironmentMissing, missing_package
from vitx.core.files import write_bytes

ID_FILE = "wandb-id"


@contextmanager
def tensorboard_writer(folder: Path, first_epoch: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes the metrics of an epoch.

    Events from `first_epoch` on are hidden: a killed process wrote them for epochs that are written again.
    """
    with SummaryWriter(str(folder), purge_step=first_epoch) as writer:

        def write(metrics: dict[str, Any]) -> None:
            for name, value in scalars(metrics):
                writer.add_scalar(name, value, metrics["epoch"])
            writer.flush()

        yield write


def scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of an epoch as single numbers by name, such as "losses/total" and "cos_sim/layer-01"."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/layer-{layer:02d}", number) for layer, number in enumerate(value, 1))
        elif name not in ("epoch", "step"):
            yield name, value


def require_wandb(project: str | None) -> None:
    """Raise EnvironmentMissing when there is a project, and the package is not installed."""
    if project is None:
        return
    try:
        # Of a folder `wandb` beside the command, as the package leaves one, Python makes an empty module.
        from wandb import Error  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        raise missing_package("wandb", "train,wandb") from None


@contextmanager
def wandb_writer(project: str, run: Path, recipe: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that logs the metrics of an epoch; a resumed run continues the same run there.

    The package's own settings decide whether anything is sent: WANDB_MODE=offline writes to the disk alone. Raises
    EnvironmentMissing when the package refuses, such as without a key.
    """
    import wandb  # type: ignore[import-not-found, unused-ignore]  # installed only by those who want it

    path = run / ID_FILE
    run_id = path.read_text() if path.is_file() else None
    settings = {"id": run_id, "resume": "allow" if run_id else None}
    try:
        wandb_run = wandb.init(project=project, name=run.resolve().name, dir=run, config=recipe, **settings)
    except wandb.Error as error:
        raise EnvironmentMissing(f"Weights & Biases: {error}; WANDB_MODE=offline needs no key and no network") from None
    failed = 1
    try:
        write_bytes(path, wandb_run.id.encode())
        yield lambda metrics: wandb_run.log(dict(scalars(metrics)), step=metrics["epoch"])
        failed = 0
    finally:
        wandb_run.finish(exit_code=failed)  # by itself it takes each run for one that succeeded
