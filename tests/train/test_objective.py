"""The loss of a batch, put together from its parts by hand."""

import random
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import vitx.models  # noqa: F401  # registers deit_digits
from vitx.core.errors import InputError
from vitx.train.cutmix import Box, MixedBatch, cutmix
from vitx.train.losses import patch_contrastive_loss, patch_cosine_loss
from vitx.train.objective import PatchGrid, check_model, losses_of, mix, patch_grid, smooth_one_hot
from vitx.train.recipe import apply_overrides
from vitx.train.recipes import get_recipe

RECIPE = apply_overrides(
    get_recipe("digits-deit"),
    ["losses.cosine=0.5", "losses.contrastive=2", "losses.mixing=3", "losses.label_smoothing=0.1"],
)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return timm.create_model("deit_digits", depth=2, patch_head=True)


@pytest.fixture
def batch() -> MixedBatch:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return cutmix(images, torch.tensor([1, 2, 3, 4]), Box(0, 2, 0, 4), 4)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def test_the_total_is_the_weighted_sum_of_its_parts(model: Any, batch: MixedBatch) -> None:
    losses = losses_of(model, batch, RECIPE, 10)
    tokens = model.forward_with_tokens(batch.images_B3SS)
    own = cross_entropy(tokens.logits_BC, torch.tensor([1, 2, 3, 4]))
    partner = cross_entropy(tokens.logits_BC, torch.tensor([4, 3, 2, 1]))
    expected = {
        "classification": (1 - 8 / 64) * own + 8 / 64 * partner,
        "cosine": patch_cosine_loss(tokens.late_BnD),
        "contrastive": patch_contrastive_loss(tokens.early_BnD, tokens.late_BnD),
        "mixing": cross_entropy(tokens.patch_logits_BnC, batch.patch_labels_Bn),
    }
    assert losses.keys() == {*expected, "total"}
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, msg=name)
    weighted = expected["classification"] + 0.5 * expected["cosine"] + 2 * expected["contrastive"]
    torch.testing.assert_close(losses["total"], weighted + 3 * expected["mixing"])


def test_every_parameter_gets_a_gradient(model: Any, batch: MixedBatch) -> None:
    losses_of(model, batch, RECIPE, 10)["total"].backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_smoothing_spreads_its_share_over_all_classes() -> None:
    torch.testing.assert_close(smooth_one_hot(torch.tensor([1]), 4, 0.2), torch.tensor([[0.05, 0.85, 0.05, 0.05]]))


def test_the_share_of_mixed_batches_is_the_probability() -> None:
    recipe = apply_overrides(RECIPE, ["cutmix.probability=0.3"])
    images, labels = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
    rng = random.Random(0)
    mixed = [mix(images, labels, recipe, PatchGrid(8, 4), rng).weight > 0 for _ in range(1000)]
    assert 0.25 < sum(mixed) / 1000 < 0.35


def test_networks_that_cannot_give_what_a_loss_needs_are_refused(model: Any) -> None:
    check_model(RECIPE, model)
    plain = timm.create_model("resnet10t")
    assert patch_grid(plain) is None
    with pytest.raises(InputError, match="does not give its patch tokens, which the token losses need: set"):
        check_model(RECIPE, plain)
    without = apply_overrides(RECIPE, ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0"])
    with pytest.raises(InputError, match=r"has no square patch grid for CutMix: set cutmix\.probability=0"):
        check_model(without, plain)
    check_model(apply_overrides(without, ["cutmix.probability=0"]), plain)
