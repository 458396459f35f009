"""The results of a study: a score for each run, a row for each variant, and `study.json`."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from vitx.core.files import Record
from vitx.train.loop.checkpoint import Metrics, best_row
from vitx.train.options import StudyKind
from vitx.train.recipes.optimization_settings import Metric

# "Last layers" are the last 1/4 of the blocks.
LAST_LAYERS_DIVISOR = 4


@dataclass(frozen=True)
class Variant:
    """A row of a study: its name, its settings, its factors for the table, and the published top-1 in percent."""

    name: str
    overrides: tuple[str, ...]
    factors: Mapping[str, Any] = field(default_factory=dict)
    published: float | None = None


class Score(Record):
    """The result of one run: its last epoch, and the top-1 of its best epoch, which the evaluation split has chosen."""

    variant: str
    seed: int
    epochs: int
    top1: float
    best_top1: float
    nll: float
    cos_sim: tuple[float, ...] = Field(description="of the patches after each block; empty without blocks")
    attention_std: tuple[float, ...] = Field(description="of each block's softmax maps over the keys")
    loss_by_epoch: tuple[float, ...] = Field(default=(), description="the total, mean of an epoch's steps")
    top1_by_epoch: tuple[float, ...] = ()
    seconds: float

    @classmethod
    def of(cls, variant: str, seed: int, history: list[Metrics], selected_by: Metric) -> "Score":
        """The score of a finished run's history, one entry for each epoch; the best one is best by `selected_by`."""
        last = history[-1]
        return cls(
            variant=variant,
            seed=seed,
            epochs=len(history),
            best_top1=best_row(history, selected_by)["top1"],
            loss_by_epoch=tuple(row["losses"]["total"] for row in history),
            top1_by_epoch=tuple(row["top1"] for row in history),
            seconds=round(math.fsum(row["seconds"] for row in history), 1),
            **{name: last[name] for name in ("top1", "nll", "cos_sim", "attention_std")},
        )


class MeanStd(Record):
    """The mean over seeds and the sample standard deviation (n − 1), None for one seed."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "MeanStd":
        return cls(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        deviation = "" if self.std is None else f" ± {scale * self.std:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{deviation}"


class Row(Record):
    """A variant over its seeds."""

    name: str
    factors: dict[str, Any]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    top1: MeanStd
    gain: MeanStd | None = Field(description="top-1 less the first row's with the same seed; none for the first row")
    best_top1: MeanStd
    nll: MeanStd
    cos_sim_last_block: MeanStd | None
    cos_sim_last_layers: MeanStd | None
    attention_std_last_layers: MeanStd | None
    cos_sim_by_block: tuple[float, ...]
    published_top1: float | None


class StudyResult(Record):
    """`study.json`."""

    format_version: Literal[1] = 1
    study: StudyKind
    recipe: str
    data: str
    classes: int
    images: dict[str, int]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: int
    machine: dict[str, str | int]
    versions: dict[str, str]
    seconds: float = Field(description="of all finished runs together")
    rows: tuple[Row, ...]
    runs: tuple[Score, ...]
    steps: tuple[dict[str, Any], ...] = ()
    failed: dict[str, str]
    paper: str = Field(default="", description="what the published numbers are of")
    here: str = Field(default="", description="what was trained instead")


def rows_of(variants: Sequence[Variant], scores: Sequence[Score]) -> Iterator[Row]:
    """A row for each variant with at least one finished run; gains are over the first variant, seed by seed."""
    first = {score.seed: score.top1 for score in scores if score.variant == variants[0].name}
    for variant in variants:
        runs = [score for score in scores if score.variant == variant.name]
        if not runs:
            continue
        gains = [run.top1 - first[run.seed] for run in runs if run.seed in first]
        yield Row(
            name=variant.name,
            factors=dict(variant.factors),
            settings=variant.overrides,
            seeds=tuple(run.seed for run in runs),
            top1=MeanStd.of([run.top1 for run in runs]),
            gain=MeanStd.of(gains) if gains and variant is not variants[0] else None,
            best_top1=MeanStd.of([run.best_top1 for run in runs]),
            nll=MeanStd.of([run.nll for run in runs]),
            cos_sim_last_block=_over_runs([run.cos_sim[-1:] for run in runs]),
            cos_sim_last_layers=_over_runs([last_layers(run.cos_sim) for run in runs]),
            attention_std_last_layers=_over_runs([last_layers(run.attention_std) for run in runs]),
            cos_sim_by_block=tuple(map(statistics.fmean, zip(*(run.cos_sim for run in runs), strict=True))),
            published_top1=variant.published,
        )


def last_layers(by_block: Sequence[float]) -> Sequence[float]:
    """The last quarter of the blocks, at least one."""
    return by_block[-max(1, len(by_block) // LAST_LAYERS_DIVISOR) :]


def _over_runs(parts: Sequence[Sequence[float]]) -> MeanStd | None:
    """Mean and deviation over runs of each run's mean over blocks; None for networks without blocks."""
    return MeanStd.of([statistics.fmean(part) for part in parts]) if all(parts) else None
