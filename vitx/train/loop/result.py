"""What a training has come to."""

from dataclasses import dataclass
from typing import Any

from vitx.core.probabilities import wilson_interval
from vitx.core.run import RunFolder
from vitx.train.loop.checkpoint import Metrics, best_row
from vitx.train.recipes.optimization_settings import Metric


@dataclass(frozen=True)
class TrainingResult:
    """A run whose training has ended: its metrics, one entry for each epoch, and how many epochs it resumed from.

    images: of the evaluation split.
    """

    run: RunFolder
    history: list[Metrics]
    resumed_from: int
    images: int

    def summary(self, metric: Metric) -> dict[str, Any]:
        """The metrics of the epoch that is best by `metric`, the last epoch's top-1, and the seconds of all epochs.

        `top1_interval` is Wilson's, 95 %: what other images of the same kind may give.
        """
        best = best_row(self.history, metric)
        return {
            "run": str(self.run.path),
            "epochs": len(self.history),
            "best_epoch": best["epoch"],
            **{name: best[name] for name in ("top1", "nll", "ece", "cos_sim", "attention_std")},
            "images": self.images,
            "top1_interval": wilson_interval(round(best["top1"] * self.images), self.images),
            "last_top1": self.history[-1]["top1"],
            "seconds": round(sum(row["seconds"] for row in self.history), 1),
        }


def describe_epoch(metrics: Metrics, epochs: int) -> str:
    """The line that a run prints after each epoch."""
    losses = " ".join(f"{name} {value:.3f}" for name, value in metrics["losses"].items())
    return (
        f"epoch {metrics['epoch']}/{epochs}: top-1 {metrics['top1']:.2%} NLL {metrics['nll']:.4f} "
        f"({losses}) lr {metrics['lr']:.2g} {metrics['seconds']:.1f} s"
    )
