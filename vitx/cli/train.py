"""`vitx train`: from a recipe to a run folder."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad

if TYPE_CHECKING:
    from torch import nn

    from vitx.train.loop.trainer import AfterEpoch

# What an analysis between epochs looks at.
ANALYSIS_IMAGES = 128


def command(
    recipe: Annotated[str, typer.Argument(help="A name of `vitx recipes`.")],
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The run folder to make. Default: runs/RECIPE."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    skip_bad: SkipBad = False,
    device: DeviceOption = "auto",
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="PROJECT", help="Log to a project of Weights & Biases too, where installed."),
    ] = None,
    analysis_every: Annotated[
        int, typer.Option("--analysis-every", min=0, help="Epochs between analyses of the averaged weights; 0: none.")
    ] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe into a run folder; a run that was stopped goes on with --resume."""
    from vitx.core.console import log
    from vitx.train.recipes.registry import resolve_recipe

    folder = out or Path("runs") / recipe
    resolved = resolve_recipe(recipe, data=data, overrides=settings or [], resumed=folder if resume else None)

    from vitx.train import train
    from vitx.train.loop.interruption import TrainingStopped

    resuming = f"resume with `vitx train {recipe} --out {folder} --resume`"
    try:
        result = train(
            resolved,
            folder,
            resume=resume,
            skip_bad=skip_bad,
            device=device,
            wandb=wandb,
            after_epoch=_analyst(folder, analysis_every, quiet=quiet) if analysis_every else None,
            quiet=quiet,
        )
    except TrainingStopped as stopped:
        _say_once(f"{stopped}, all is saved: {resuming}")
        raise typer.Exit(130 if stopped.signal == signal.SIGINT else 0) from None
    except KeyboardInterrupt:
        _say_once(f"interrupted: {resuming}")
        raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's processes that write nothing
        return
    done = len(result.history)
    if result.resumed_from == done:
        log(f"'{folder}' has finished its {done} epochs: nothing is left to train", quiet=quiet)
    elif done < resolved.epochs:
        log(f"stopped after {done} of {resolved.epochs} epochs: none was better for selection.patience", quiet=quiet)
    _print_result(_summary(folder, result.history, resolved.selection.metric), as_json=as_json)


def _analyst(folder: Path, every: int, *, quiet: bool) -> "AfterEpoch":
    """Writes what `vitx analyze` measures by default to RUN/analysis/epoch-NNNN.json, and says what that took."""
    import time

    from vitx.analyze import Options, analyze, chosen_metrics
    from vitx.analyze.images import open_analysis_images
    from vitx.core.console import log
    from vitx.core.files import write_json
    from vitx.core.run import RunFolder
    from vitx.models.source import Source

    def after_epoch(epoch: int, model: "nn.Module") -> None:
        if epoch % every or os.environ.get("RANK", "0") != "0":
            return
        start = time.perf_counter()
        info = RunFolder.open(folder).info
        source = Source(
            name=str(folder),
            model=model,
            spec=info.model,
            class_names=info.class_names,
            preprocessing=info.preprocessing,
            data=info.data,
            checkpoint=f"epoch {epoch}",
            checkpoint_sha256="",
            recipe=info.recipe,
        )
        images = open_analysis_images(info.data, ANALYSIS_IMAGES)
        found = analyze(source, images, chosen_metrics(None), Options(), quiet=True)
        write_json(folder / "analysis" / f"epoch-{epoch:04d}.json", found.as_json())
        log(f"analysis of epoch {epoch}: {time.perf_counter() - start:.1f} s", quiet=quiet)

    return after_epoch


def _say_once(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


def _summary(folder: Path, history: list[dict[str, Any]], metric: Any) -> dict[str, Any]:
    from vitx.train.loop.checkpoint import best_of

    best = best_of(history, metric)
    return {
        "run": str(folder),
        "epochs": len(history),
        "best_epoch": best["epoch"],
        **{name: best[name] for name in ("top1", "nll", "ece", "cos_sim", "attention_std")},
        "last_top1": history[-1]["top1"],
        "seconds": round(sum(row["seconds"] for row in history), 1),
    }


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
