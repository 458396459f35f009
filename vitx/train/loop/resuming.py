"""Before a run begins or goes on: the folder may be used, and all processes mean the same run."""

from collections.abc import Iterator

from vitx.core.errors import InputError
from vitx.core.files import read_record
from vitx.core.run import RunFolder
from vitx.train.loop.checkpoint import newest
from vitx.train.loop.distributed.processes import Processes
from vitx.train.recipes.recipe import Recipe, first_difference, flat_settings

# Seconds until a file that one node has written is seen by all: network file systems remember what was there before.
SECONDS_TO_BE_SEEN = 60.0
# Settings of how a run is computed, which may be others when it goes on.
LAYOUT = (
    "execution.deterministic",
    "execution.parallel",
    "execution.grad_checkpointing",
    "optimizer.accumulate",
    "workers",
)


def check_alike(processes: Processes, run: RunFolder, recipe: Recipe) -> None:
    """Refuse processes that would not train the same network, or go on from different checkpoints."""
    processes.same(lambda: recipe, "the processes were started with different recipes: give each node the same command")
    processes.same(
        lambda: (run.info_path.is_file(), newest(run)),
        f"the processes do not see the same checkpoints in '{run.path}': --out must be on storage that all nodes share",
        SECONDS_TO_BE_SEEN,
    )


def layout_differences(begun: Recipe, now: Recipe) -> Iterator[str]:
    """Say how the run is computed otherwise than at its beginning."""
    before, after = (dict(flat_settings(each.model_dump(mode="json"))) for each in (begun, now))
    for name in LAYOUT:
        if before[name] != after[name]:
            yield f"with {name}={after[name]}, begun with {before[name]}"


def check_out(run: RunFolder, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder in use, and a run that was started with another recipe."""
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        return
    if not resume:
        raise InputError(f"'{run.path}' exists: pass --resume to go on with it, or another --out")
    RunFolder.open(run.path)
    difference = first_difference(recipe, read_record(run.path / "recipe.json", Recipe), but=LAYOUT)
    if difference:
        raise InputError(f"cannot resume '{run.path}': {difference}; leave it as it is, or pass another --out")
