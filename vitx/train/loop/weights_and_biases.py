"""Logging the metrics of a run to a project of Weights & Biases, an optional package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitx.core.errors import EnvironmentMissing, missing_package
from vitx.core.files import write_bytes
from vitx.train.loop.tensorboard import scalars

ID_FILE = "wandb-id"


def require_wandb(project: str | None) -> None:
    """Raise EnvironmentMissing when there is a project, and the package is not installed."""
    if project is None:
        return
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
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
    write_bytes(path, wandb_run.id.encode())
    try:
        yield lambda metrics: wandb_run.log(dict(scalars(metrics)), step=metrics["epoch"])
    finally:
        wandb_run.finish()
