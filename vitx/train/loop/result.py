"""What a training has come to."""

from dataclasses import dataclass, field
from typing import Any

from vitx.core.errors import naming_extra
from vitx.core.page import table
from vitx.core.panels import Picture, own_style, png
from vitx.core.probabilities import wilson_interval
from vitx.core.run import RunFolder
from vitx.train.loop.checkpoint import Metrics, best_row
from vitx.train.recipes.optimization_settings import Metric
from vitx.train.recipes.recipe import read_recipe


@dataclass(frozen=True)
class TrainingResult:
    """A run whose training has ended: its metrics, one entry for each epoch, and how many epochs it resumed from.

    images: of the evaluation split.
    """

    run: RunFolder
    history: list[Metrics] = field(repr=False)
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

    def shown(self, metric: Metric) -> dict[str, object]:
        """The same for people."""
        found = self.summary(metric)
        layers, (low, high) = found["cos_sim"], found["top1_interval"]
        return {
            "top-1 (averaged weights, best epoch)": f"{found['top1']:.2%}",
            "95 % interval": f"{low:.1%} to {high:.1%}, of {found['images']} images (Wilson)",
            "NLL": f"{found['nll']:.4f}",
            "ECE": f"{found['ece']:.4f}",
            "best epoch": f"{found['best_epoch']} of {found['epochs']}",
            "top-1 of the last epoch": f"{found['last_top1']:.2%}",
            "CosSim of first and last block": f"{layers[0]:.3f}, {layers[-1]:.3f}" if layers else "no blocks",
            "seconds": found["seconds"],
        }

    def curves(self) -> Picture:
        """Losses, accuracy, calibration and rate by epoch; needs matplotlib."""
        with naming_extra("analyze"):
            from vitx.train.report_figures import draw_curves

        with own_style():
            return png(draw_curves(self.history, best_row(self.history, self._metric())["epoch"]), pixel_ratio=1)

    def layers(self) -> Picture:
        """Similarity of patches and spread of attention by block and epoch; needs matplotlib, and blocks."""
        with naming_extra("analyze"):
            from vitx.train.report_figures import draw_layers

        with own_style():
            return png(draw_layers(self.history, best_row(self.history, self._metric())["epoch"]), pixel_ratio=1)

    def _metric(self) -> Metric:
        return read_recipe(self.run.path).selection.metric

    def _repr_html_(self) -> str:
        """For notebooks."""
        return table(self.shown(self._metric()).items())


def describe_epoch(metrics: Metrics, epochs: int) -> str:
    """The line that a run prints after each epoch."""
    losses = " ".join(f"{name} {value:.3f}" for name, value in metrics["losses"].items())
    return (
        f"epoch {metrics['epoch']}/{epochs}: top-1 {metrics['top1']:.2%} NLL {metrics['nll']:.4f} "
        f"({losses}) lr {metrics['lr']:.2g} {metrics['seconds']:.1f} s"
    )
