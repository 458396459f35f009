"""`vitx train`: from a recipe to a run folder."""

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad, from_records
from vitx.core.console import counted, log, log_next, print_fields, print_json, print_result, print_table
from vitx.train.options import TrainOptions

if TYPE_CHECKING:
    from vitx.train import Recipe


_DEFAULTS = TrainOptions()


@from_records("train")
def command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A name of `vitx recipes`; photos for your own images.")
    ] = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder. Default: runs/RECIPE.")] = None,
    options: TrainOptions = _DEFAULTS,
    skip_bad: SkipBad = False,
    device: DeviceOption = "auto",
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="PROJECT", help="Also log to this project of Weights & Biases, if installed."),
    ] = None,
    analysis_every: Annotated[
        int,
        typer.Option("--analysis-every", min=0, help="Analyze the averaged weights every N epochs; 0: never."),
    ] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe into a run folder; --resume continues a run that was stopped."""
    resolved, folder = _resolved(recipe, data, out, options, device)
    from vitx.train.loop.distributed.processes import is_first_process

    prints = is_first_process()
    if options.dry_run:
        from vitx.train.loop.dry_run import dry_run as take_some_steps

        found = take_some_steps(resolved, folder, resume=options.resume, skip_bad=skip_bad, device=device)
        if prints:
            print_result(f"dry run of {resolved.name}, nothing is written", found, as_json=as_json)
        return
    if options.lr_find:
        from vitx.train.lr_find import lr_find, rows

        found = lr_find(resolved, skip_bad=skip_bad, device=device, quiet=quiet)
        if prints and as_json:
            print_json(found)
        elif prints:
            print_table("loss by learning rate", ("rate", "loss", ""), rows(found.pop("curve")))
            print_fields(f"learning rate of {resolved.name}, nothing is written", found)
        return
    after_epoch = None
    if analysis_every:
        from vitx.analyze.between_epochs import analysis_between_epochs

        after_epoch = analysis_between_epochs(folder, analysis_every, skip_bad=skip_bad, quiet=quiet)
    choices: dict[str, Any] = {"resume": options.resume, "quiet": quiet, "skip_bad": skip_bad, "device": device}
    choices |= {"wandb": wandb, "after_epoch": after_epoch}
    again = ["train", resolved.name, "--out", str(folder), "--resume", *["--skip-bad"] * skip_bad]
    again += [] if device == "auto" else ["--device", device]
    again += [] if wandb is None else ["--wandb", wandb]
    again += ["--analysis-every", str(analysis_every)] if analysis_every else []
    # A new run keeps its settings; those that were changed since are not in its recipe.json.
    if options.resume:
        again += [] if options.file is None else ["--recipe", str(options.file)]
        again += [word for setting in options.settings for word in ("--set", setting)]
    _train(resolved, folder, again, choices, as_json=as_json, prints=prints)


def _resolved(
    name: str | None, data: str | None, out: Path | None, options: TrainOptions, device: str
) -> "tuple[Recipe, Path]":
    """The recipe with everything that was given, and the run folder."""
    from vitx.train.recipes.recipe_file import read_settings
    from vitx.train.recipes.registry import resolve_recipe

    file = options.file
    folder = out or Path("runs") / str(name or (read_settings(file) if file else {}).get("name"))
    resolved = resolve_recipe(
        name,
        data=data,
        overrides=options.settings,
        resumed=folder if options.resume else None,
        start=options.start,
        file=file,
        device=device,
    )
    return resolved, folder


def _train(
    resolved: "Recipe", folder: Path, again: list[str], choices: dict[str, Any], *, as_json: bool, prints: bool
) -> None:
    """again: the arguments with which a run that was stopped goes on."""
    from vitx.train import train
    from vitx.train.loop.distributed.processes import launcher
    from vitx.train.loop.interruption import TrainingStopped
    from vitx.train.progress import OUT_OF_PATIENCE

    quiet = choices["quiet"]
    resuming = f"resume with `{shlex.join([*launcher(), *again])}`"
    try:
        result = train(resolved, folder, **choices)
    except TrainingStopped as stopped:
        log(f"{stopped}, all is saved: {resuming}", quiet=not prints)
        raise typer.Exit(130 if stopped.signal == signal.SIGINT else 0) from None
    except KeyboardInterrupt:
        log(f"interrupted: {resuming}", quiet=not prints)
        sys.stdout.flush()
        os._exit(130)  # the end of the interpreter would wait for threads that read, and storage may not answer
    if not prints:
        return
    done = len(result.history)
    if result.resumed_from == done:
        log(f"'{folder}' has finished its {counted(done, 'epoch')}: nothing is left to train", quiet=quiet)
    elif done < resolved.epochs:
        log(f"stopped after {done} of {resolved.epochs} epochs: {OUT_OF_PATIENCE}", quiet=quiet)
    metric = resolved.selection.metric
    print_result(f"trained {folder}", result.summary(metric) if as_json else result.shown(metric), as_json=as_json)
    log_next("vitx", "report", folder, *["--skip-bad"] * choices["skip_bad"], quiet=quiet)
