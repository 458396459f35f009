"""The figure of each study."""

import numpy as np
import pytest

from vitx.core.panels import png
from vitx.train.study.result import Score, StudyResult, Variant, rows_of
from vitx.train.study.study_figures import draw_study
from vitx.train.study.variants import STUDIES

VARIANTS = [Variant("none", ("losses.cosine=0",), {"cosine": 0.0}), Variant("cosine", (), {"cosine": 1.0}, 82.0)]


def scores(rng: np.random.Generator, blocks: int, seeds: int = 3) -> list[Score]:
    return [
        Score(
            variant=variant.name,
            seed=seed,
            epochs=2,
            top1=rng.uniform(),
            best_top1=rng.uniform(),
            nll=rng.uniform(),
            cos_sim=tuple(rng.uniform(size=blocks)),
            attention_std=tuple(rng.uniform(size=blocks)),
            loss_by_epoch=(1.5, 1.25)[: 1 + seed],
            top1_by_epoch=(0.5, 0.75)[: 1 + seed],
            seconds=1.5,
        )
        for seed in range(seeds)
        for variant in VARIANTS
    ]


@pytest.mark.parametrize("kind", STUDIES)
@pytest.mark.parametrize(("blocks", "seeds"), [(24, 3), (0, 1)])
def test_every_study_has_a_figure(kind: str, blocks: int, seeds: int) -> None:
    """Rows may have different depths."""
    runs = scores(np.random.default_rng(2), blocks, seeds)
    shallow = {"cos_sim": runs[1].cos_sim[: blocks // 2], "attention_std": runs[1].attention_std[: blocks // 2]}
    runs[1::2] = [run.model_copy(update=shallow) for run in runs[1::2]]
    factors = {"depth": 6, "attention": "plain"}
    rows = [
        row.model_copy(update={"factors": {**factors, "depth": 6 * i}}) for i, row in enumerate(rows_of(VARIANTS, runs))
    ]
    steps = [{"attention_depths": [0, i], "top1": 0.9, "kept": i < 2} for i in range(3)]
    result = StudyResult.model_construct(study=kind, rows=tuple(rows), runs=tuple(runs), steps=tuple(steps))
    assert png(draw_study(result)).startswith(b"\x89PNG")
