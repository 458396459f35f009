"""Checks before a run begins or resumes: the folder may be used, and all processes mean the same run."""

from collections.abc import Iterator

from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.train.loop.checkpoint import newest_checkpoint
from vitx.train.loop.distributed.processes import Processes
from vitx.train.recipes.recipe import Recipe, first_difference, flat_settings, read_recipe

# Seconds until all nodes see a file that one of them has written: network file systems cache what was there before.
VISIBILITY_TIMEOUT = 60.0
# Settings that say how a run is computed and not what is computed: they may change when it resumes.
CHANGEABLE_SETTINGS = (
    "execution.deterministic",
    "execution.parallel",
    "execution.grad_checkpointing",
    "optimizer.accumulate",
    "workers",
)


def check_processes_agree(processes: Processes, run: RunFolder, recipe: Recipe) -> None:
    """Raise InputError unless all processes have the same recipe and see the same checkpoints."""
    processes.agreed(
        lambda: recipe, "the processes were started with different recipes: give each node the same command"
    )
    processes.agreed(
        lambda: (run.exists(), newest_checkpoint(run)),
        f"the processes do not see the same checkpoints in '{run.path}': --out must be on storage that all nodes share",
        VISIBILITY_TIMEOUT,
    )


def changed_settings(begun: Recipe, now: Recipe) -> Iterator[str]:
    """Say in words which of `CHANGEABLE_SETTINGS` differ from those that the run was begun with."""
    before, after = (dict(flat_settings(recipe.model_dump(mode="json"))) for recipe in (begun, now))
    for name in CHANGEABLE_SETTINGS:
        if before[name] != after[name]:
            yield f"with {name}={after[name]}, begun with {before[name]}"


def check_run_folder(run: RunFolder, recipe: Recipe, *, resume: bool) -> None:
    """Raise InputError for a folder that holds something else, and for a run that was begun with another recipe."""
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        return
    if not resume:
        raise InputError(f"'{run.path}' exists: pass --resume to go on with it, or another --out")
    RunFolder.open(run.path)
    difference = first_difference(recipe, read_recipe(run.path), ignoring=CHANGEABLE_SETTINGS)
    if difference:
        raise InputError(f"cannot resume '{run.path}': {difference}; leave it as it is, or pass another --out")
