"""The metrics of a run in a project of Weights & Biases, where that package is installed and asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitx.core.errors import missing_package
from vitx.core.files import write_bytes
from vitx.train.loop.tensorboard import scalars

ID_FILE = "wandb-id"


@contextmanager
def project_board(project: str, run: Path, recipe: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes an epoch's metrics; a resumed run goes on in the same place.

    Whether anything is sent is the package's own setting (WANDB_MODE=offline keeps it here). Raises EnvironmentMissing
    when the package is not installed.
    """
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]  # installed only by those who want it
    except ImportError:
        raise missing_package("wandb", "train,wandb") from None
    path = run / ID_FILE
    known = path.read_text() if path.is_file() else None
    board = wandb.init(
        project=project, name=run.resolve().name, dir=run, config=recipe, id=known, resume="allow" if known else None
    )
    write_bytes(path, board.id.encode())
    try:
        yield lambda metrics: board.log(dict(scalars(metrics)), step=metrics["epoch"])
    finally:
        board.finish()
