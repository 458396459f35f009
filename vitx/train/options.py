"""What `vitx train` may be told of a run's beginning, and what `vitx study` can vary. Every default is here alone."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from vitx.core.options import Options, option

StudyKind = Literal[
    "ablation", "losses", "depth", "methods", "talking-heads", "finetune", "kernel-size", "precision", "alternet"
]


class TrainOptions(Options):
    """What a run begins with. The recipe comes first, then `start`, then `file`, then `settings`."""

    start: str | None = option(
        None, "Fine-tune model:timm/NAME, a run, or a file of weights.", flag="--from", metavar="SOURCE"
    )
    file: Path | None = option(
        None, "Settings in TOML or JSON, such as a run's recipe.json.", flag="--recipe", metavar="FILE"
    )
    settings: tuple[str, ...] = option(
        (), "Change a setting of the recipe; may be repeated.", flag="--set", metavar="KEY=VALUE"
    )
    resume: bool = option(False, "Continue a run that was stopped.")
    lr_find: bool = option(False, "Raise the learning rate step by step, say which one to take; write nothing.")
    dry_run: bool = option(False, "Take a few steps, print data, shapes, memory and time; write nothing.")

    @model_validator(mode="after")
    def _one_trial(self) -> "TrainOptions":
        if self.dry_run and self.lr_find:
            raise ValueError("--dry-run and --lr-find each try the recipe in their own way: leave one of them out")
        return self
