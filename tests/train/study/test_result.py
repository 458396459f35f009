"""Rows of a study beside numpy, and the score of a run."""

from typing import Any

import numpy as np
import pytest

from epoch_row import epoch_row
from vitx.train.study.result import MeanStd, Score, Variant, last_layers, rows_of

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


def test_the_rows_are_what_numpy_says() -> None:
    runs = scores(np.random.default_rng(0), 24)
    first, second = rows_of(VARIANTS, runs)
    none, cosine = ([run for run in runs if run.variant == name] for name in ("none", "cosine"))
    top1 = np.array([[run.top1 for run in group] for group in (none, cosine)])
    similarity = np.array([run.cos_sim for run in cosine])
    spread = np.array([run.attention_std for run in cosine])
    assert first.gain is None
    assert (second.top1.mean, second.top1.std) == pytest.approx((top1[1].mean(), top1[1].std(ddof=1)), rel=1e-12)
    difference = top1[1] - top1[0]
    assert second.gain is not None
    assert (second.gain.mean, second.gain.std) == pytest.approx((difference.mean(), difference.std(ddof=1)), rel=1e-12)
    for found, expected in (
        (second.cos_sim_last_block, similarity[:, -1]),
        (second.cos_sim_last_layers, similarity[:, 18:].mean(axis=1)),
        (second.attention_std_last_layers, spread[:, 18:].mean(axis=1)),
    ):
        assert found is not None
        assert (found.mean, found.std) == pytest.approx((expected.mean(), expected.std(ddof=1)), rel=1e-12)
    assert second.cos_sim_by_block == pytest.approx(similarity.mean(axis=0), rel=1e-12)
    assert (second.seeds, second.published_top1) == ((0, 1, 2), 82.0)


def test_gains_pair_equal_seeds_and_rows_without_runs_are_left_out() -> None:
    runs = scores(np.random.default_rng(1), 0)
    (row,) = rows_of(VARIANTS, [run for run in runs if run.variant == "cosine"])
    assert row.gain is row.cos_sim_last_block is row.attention_std_last_layers is None
    _, row = rows_of(VARIANTS, [run for run in runs if run.variant == "cosine" or run.seed == 1])
    by_name = {(run.variant, run.seed): run.top1 for run in runs}
    assert row.gain == MeanStd(mean=by_name["cosine", 1] - by_name["none", 1], std=None)
    assert row.gain is not None
    assert "±" not in row.gain.text()


@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (24, 6)])
def test_the_last_layers_are_the_last_quarter(blocks: int, count: int) -> None:
    assert list(last_layers(range(blocks))) == list(range(blocks))[blocks - count :]


def test_a_score_is_of_the_last_epoch_and_of_the_one_that_the_recipe_selects() -> None:
    history: list[dict[str, Any]] = [
        epoch_row(1, top1=0.95, nll=0.9, seconds=1.04) | {"losses": {"total": 3.0}},
        epoch_row(2, top1=0.90, nll=0.3, seconds=2.0) | {"losses": {"total": 2.5}},
        epoch_row(3, top1=0.5, nll=0.5, seconds=4.02)
        | {"losses": {"total": 1.5, "cosine": 1.0}, "cos_sim": [0.1, 0.2], "attention_std": [0.3, 0.4]},
    ]
    best: dict[Any, float] = {"top1": 0.95, "nll": 0.90}
    for metric, top1 in best.items():
        assert Score.of("plain", 7, history, metric) == Score(
            variant="plain",
            seed=7,
            epochs=3,
            top1=0.5,
            best_top1=top1,
            nll=0.5,
            cos_sim=(0.1, 0.2),
            attention_std=(0.3, 0.4),
            loss_by_epoch=(3.0, 2.5, 1.5),
            top1_by_epoch=(0.95, 0.9, 0.5),
            seconds=7.1,
        )


def test_a_mean_has_a_deviation_from_two_seeds_on() -> None:
    assert MeanStd.of([0.25]) == MeanStd(mean=0.25, std=None)
    assert MeanStd.of([0.25, 0.75]) == MeanStd(mean=0.5, std=0.125**0.5)
    assert MeanStd(mean=0.5, std=0.25).text() == "0.500 ± 0.250"
    assert MeanStd(mean=0.5, std=0.25).text(100, 1) == "50.0 ± 25.0"
    assert MeanStd(mean=0.12345, std=None).text() == "0.123"


def test_a_row_says_what_it_changed_and_ran() -> None:
    runs = scores(np.random.default_rng(3), 2, seeds=2)
    first, second = rows_of(VARIANTS, runs)
    assert (first.name, first.factors, first.settings, first.published_top1) == (
        *("none", {"cosine": 0.0}, ("losses.cosine=0",)),
        None,
    )
    assert (second.name, second.factors, second.settings) == ("cosine", {"cosine": 1.0}, ())
    own = [run for run in runs if run.variant == "none"]
    assert first.best_top1 == MeanStd.of([run.best_top1 for run in own])
    assert first.nll == MeanStd.of([run.nll for run in own])
    assert first.seeds == (0, 1)
