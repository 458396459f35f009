"""`vitx train`: from a recipe to a run folder."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad


def command(
    recipe: Annotated[str, typer.Argument(help="A name of `vitx recipes`.")],
    data: Data = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder. Default: runs/RECIPE.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
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
    from vitx.core.console import log
    from vitx.train.recipes.registry import resolve_recipe

    folder = out or Path("runs") / recipe
    resolved = resolve_recipe(recipe, data=data, overrides=settings or [], resumed=folder if resume else None)

    from vitx.train import train
    from vitx.train.loop.distributed.processes import is_first_process
    from vitx.train.loop.interruption import TrainingStopped

    after_epoch = None
    if analysis_every:
        from vitx.analyze.between_epochs import analysis_between_epochs

        after_epoch = analysis_between_epochs(folder, analysis_every, quiet=quiet)
    prints = is_first_process()
    resuming = f"resume with `vitx train {recipe} --out {folder} --resume`"
    try:
        result = train(
            resolved,
            folder,
            resume=resume,
            skip_bad=skip_bad,
            device=device,
            wandb=wandb,
            after_epoch=after_epoch,
            quiet=quiet,
        )
    except TrainingStopped as stopped:
        log(f"{stopped}, all is saved: {resuming}", quiet=not prints)
        raise typer.Exit(130 if stopped.signal == signal.SIGINT else 0) from None
    except KeyboardInterrupt:
        log(f"interrupted: {resuming}", quiet=not prints)
        raise typer.Exit(130) from None
    if not prints:
        return
    done = len(result.history)
    if result.resumed_from == done:
        log(f"'{folder}' has finished its {done} epochs: nothing is left to train", quiet=quiet)
    elif done < resolved.epochs:
        log(f"stopped after {done} of {resolved.epochs} epochs: none was better for selection.patience", quiet=quiet)
    _print_result(result.summary(resolved.selection.metric), as_json=as_json)


def _print_result(summary: dict[str, Any], *, as_json: bool) -> None:
    from vitx.core.console import print_fields, print_json

    if as_json:
        print_json(summary)
        return
    layers = summary["cos_sim"]
    print_fields(
        f"trained {summary['run']}",
        {
            "top-1 (averaged weights, best epoch)": f"{summary['top1']:.2%}",
            "NLL": f"{summary['nll']:.4f}",
            "ECE": f"{summary['ece']:.4f}",
            "best epoch": f"{summary['best_epoch']} of {summary['epochs']}",
            "top-1 of the last epoch": f"{summary['last_top1']:.2%}",
            "CosSim of first and last block": f"{layers[0]:.3f}, {layers[-1]:.3f}" if layers else "no blocks",
            "seconds": summary["seconds"],
        },
    )
