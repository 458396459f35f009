"""Attention rollout of maps and answers that are made by hand: which images are shown, and in which order."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from run_fixture import digits_source
from vitx.analyze.activations import Activations
from vitx.analyze.metric import AnalysisOptions, MetricContext, NotApplicable
from vitx.analyze.metrics.rollout import Rollout, RolloutMetric
from vitx.data.open import open_images
from vitx.models.outputs import attention_rollout, pooled_tokens

SIZE: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 6, "depth": 1, "num_heads": 1}
SOURCE = digits_source("small", timm.create_model("vit_tiny_patch16_224", num_classes=10, **SIZE))
DIGITS = open_images("digits", "val").first(14)
TOKENS = 5  # a class token and 2 × 2 patches


def maps(images: int, patches: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)) -> Tensor:
    """Maps whose class token attends to the patches by these shares."""
    found = torch.eye(TOKENS).expand(images, 1, TOKENS, TOKENS).clone()
    found[:, 0, 0] = torch.tensor([0.0, *patches])
    return found


def measured(gaps: list[float], *parts: int, right: bool = False) -> Rollout:
    """Every answer is wrong, or right, by a logit that is so much larger than all others."""
    classes = torch.as_tensor((DIGITS.labels[: len(gaps)] + (not right)) % 10)
    logits = torch.zeros(len(gaps), 10)
    logits[torch.arange(len(gaps)), classes] = torch.tensor(gaps)
    metric = RolloutMetric(MetricContext(SOURCE, DIGITS.first(len(gaps)), AnalysisOptions()))
    for part in torch.split(logits, [*parts] or len(gaps)):
        metric.add(Activations(len(part), {}, {"blocks.0.attn": maps(len(part))}, {}, part))
    return metric.result()


def test_the_surest_mistakes_are_first_also_beyond_the_digits_of_float32() -> None:
    """Of two that are equally sure the first image; not more than are shown."""
    gaps = [20.0, 30.0, 25.0, 30.0, 1.0, 2.0, 3.0, 22.0, 21.0, 24.0, 23.0, 0.5, 1.0, 4.0]
    found = measured(gaps, 5, 9)
    assert [seen.image for seen in found.mistakes] == [1, 3, 2, 9, 10, 7, 8, 0, 13, 6, 5, 4]
    for seen in found.mistakes:
        assert seen.label == DIGITS.labels[seen.image] == (seen.predicted - 1) % 10
        assert seen.confidence == pytest.approx(1 / (1 + 9 * np.exp(-gaps[seen.image])), rel=1e-12)


def test_examples_are_evenly_spaced_and_the_largest_share_is_over_that_of_an_even_look() -> None:
    found = measured([1.0] * 11, 4, 7, right=True)
    assert not found.mistakes
    assert [seen.image for seen in found.examples] == [0, 2, 4, 6, 8, 10]
    assert {seen.shares for seen in found.examples} == {(0.05, 0.1, 0.15, 0.2)}  # the other half stays at itself
    assert (found.grid, found.images) == ((2, 2), 11)
    assert found.largest == pytest.approx(0.2 * 4)
    assert found.interval("largest") == pytest.approx((0.8, 0.8))
    pooled = pooled_tokens(SOURCE.model)
    thirds = attention_rollout([maps(1, (1 / 3, 1 / 3, 1 / 3, 0.0))], pooled)[0]
    metric = RolloutMetric(MetricContext(SOURCE, DIGITS.first(1), AnalysisOptions()))
    metric.add(Activations(1, {}, {"blocks.0.attn": maps(1, (1 / 3, 1 / 3, 1 / 3, 0.0))}, {}, torch.zeros(1, 10)))
    assert metric.result().examples[0].shares == tuple(float(f"{share:.3g}") for share in thirds.tolist())


def test_the_reason_is_what_the_network_lacks() -> None:
    """Said once, without the advice of the command that asked for an output."""
    metric = RolloutMetric(MetricContext(SOURCE, DIGITS.first(2), AnalysisOptions()))
    metric.add(Activations(1, {}, {}, {}, torch.zeros(1, 10)))
    metric.add(Activations(1, {}, {}, {}, torch.zeros(1, 10)))
    with pytest.raises(NotApplicable, match=r"^not every block has one attention over all 5 tokens, which.*made of$"):
        metric.result()
    other = digits_source("other", torch.nn.Linear(2, 2))
    with pytest.raises(NotApplicable, match=r"^Linear has no attention and no rollout.*over all tokens$"):
        RolloutMetric(MetricContext(other, DIGITS, AnalysisOptions())).result()
