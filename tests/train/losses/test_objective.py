"""Mixing a batch, and its total loss against the sum of its parts computed by hand."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitx.models  # noqa: F401  # registers deit_digits
from reference import attention_similarity_loss
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.models import attention_maps, forward_with_tokens
from vitx.train.loop.network import build_network, model_spec
from vitx.train.losses import objective
from vitx.train.losses.cutmix import Box, MixedBatch, cutmix, unmixed
from vitx.train.losses.distillation import Teacher
from vitx.train.losses.objective import (
    PatchGrid,
    _sample_box,
    check_model,
    compute_losses,
    image_targets,
    mix_batch,
    patch_grid,
    smooth_one_hot,
)
from vitx.train.losses.patch_losses import patch_contrastive_loss, patch_cosine_loss, region_mixing_loss
from vitx.train.randomness import seeded
from vitx.train.recipes.image_and_loss_settings import CutMix
from vitx.train.recipes.optimization_settings import Distillation
from vitx.train.recipes.recipe import apply_overrides
from vitx.train.recipes.registry import get_recipe

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
    losses = compute_losses(model, batch, RECIPE, 10)
    tokens = forward_with_tokens(model, batch.images_B3SS)
    assert tokens.patch_logits_BnC is not None
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


def test_the_official_losses_and_the_regulariser_are_what_the_recipe_asks_for(model: Any, batch: MixedBatch) -> None:
    recipe = apply_overrides(
        RECIPE,
        ["losses.contrastive_variant=official", "losses.mixing_variant=official", "losses.attention=0.1"],
    )
    model = model.eval()  # no dropout, so that a second pass is the same
    losses = compute_losses(model, batch, recipe, 10)
    with attention_maps(model, of=lambda maps: maps) as maps:
        tokens = forward_with_tokens(model, batch.images_B3SS)
    own, partner = (smooth_one_hot(torch.tensor(each), 10, 0.1) for each in ([1, 2, 3, 4], [4, 3, 2, 1]))
    embedding = model.patch_embed(batch.images_B3SS)
    expected = {
        "contrastive": patch_contrastive_loss(embedding, tokens.late_BnD, variant="official"),
        "mixing": region_mixing_loss(tokens.late_BnD, model.patch_head, batch.partner_Bn, own, partner),
        "attention": attention_similarity_loss(maps.values(), over="heads"),
    }
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, msg=name)
    weighted = losses["classification"] + 0.5 * losses["cosine"] + 2 * losses["contrastive"]
    torch.testing.assert_close(losses["total"], weighted + 3 * losses["mixing"] + 0.1 * losses["attention"])
    losses["total"].backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_every_parameter_gets_a_gradient(model: Any, batch: MixedBatch) -> None:
    compute_losses(model, batch, RECIPE, 10)["total"].backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_smoothing_spreads_its_share_over_all_classes() -> None:
    torch.testing.assert_close(smooth_one_hot(torch.tensor([1]), 4, 0.2), torch.tensor([[0.05, 0.85, 0.05, 0.05]]))


def test_the_share_of_mixed_batches_is_the_probability() -> None:
    recipe = apply_overrides(RECIPE, ["cutmix.probability=0.3"])
    images, labels = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
    rng = random.Random(0)
    mixed = [mix_batch(images, labels, recipe, PatchGrid(8, 4), rng, classes=10).weight_B[0] > 0 for _ in range(1000)]
    assert 0.25 < sum(mixed) / 1000 < 0.35


def test_every_image_gets_a_box_of_its_own_on_request() -> None:
    recipe = apply_overrides(RECIPE, ["cutmix.probability=0.5", "cutmix.box=sample"])
    images, labels = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    mixed = mix_batch(images.clone(), labels, recipe, PatchGrid(8, 4), random.Random(1), classes=10)
    assert 0.25 < (mixed.weight_B > 0).float().mean() < 0.75
    assert len(set(mixed.weight_B.tolist())) > 10
    again = mix_batch(images.clone(), labels, recipe, PatchGrid(8, 4), random.Random(1), classes=10)
    assert torch.equal(mixed.images_B3SS, again.images_B3SS)
    other = mix_batch(images.clone(), labels, recipe, PatchGrid(8, 4), random.Random(2), classes=10)
    assert not torch.equal(mixed.weight_B, other.weight_B)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixup_is_timms_and_follows_from_the_seed_alone(mode: str) -> None:
    recipe = apply_overrides(
        RECIPE, ["losses.mixing=0", "cutmix.probability=0", "mixup.mixup=0.8", "mixup.cutmix=1", f"mixup.mode={mode}"]
    )
    images, labels = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 3, 4, 5])
    torch.manual_seed(5)
    before = (random.getstate(), torch.get_rng_state())
    mixed = mix_batch(images.clone(), labels, recipe, None, random.Random(3), classes=10)
    assert (random.getstate(), torch.equal(torch.get_rng_state(), before[1])) == (before[0], True)
    np.random.seed(0)
    again = mix_batch(images.clone(), labels, recipe, PatchGrid(8, 4), random.Random(3), classes=10)
    assert torch.equal(mixed.images_B3SS, again.images_B3SS)
    assert mixed.targets_BC is not None
    assert not torch.equal(mixed.images_B3SS, images)
    torch.testing.assert_close(mixed.targets_BC.sum(1), torch.ones(6))
    # The label weights are those of the pixels: read them back from the labels, which differ from their partner's.
    shares = (mixed.targets_BC[range(6), labels] - 0.01) / 0.9
    partners = (mixed.targets_BC[range(6), labels.flip(0)] - 0.01) / 0.9
    torch.testing.assert_close(shares + partners, torch.ones(6))
    model = timm.create_model("deit_digits", depth=2)
    logits = model(mixed.images_B3SS)
    losses = compute_losses(model, mixed, apply_overrides(recipe, ["losses.cosine=0", "losses.contrastive=0"]), 10)
    torch.testing.assert_close(losses["classification"], F.cross_entropy(logits, mixed.targets_BC))


def test_erasing_covers_its_share_of_the_images_and_follows_from_the_seed() -> None:
    settings = ["losses.mixing=0", "cutmix.probability=0", "augmentation.erasing=0.25"]
    recipe = apply_overrides(RECIPE, settings)
    images, labels = torch.full((400, 3, 16, 16), 9.0), torch.zeros(400, dtype=torch.long)
    erased = mix_batch(images.clone(), labels, recipe, None, random.Random(0), classes=10).images_B3SS
    share = (erased != 9).any(1).flatten(1).any(1).float().mean()
    assert 0.18 < share < 0.32
    noise = erased[(erased != 9)]
    assert abs(noise.mean()) < 0.1
    assert 0.9 < noise.std() < 1.1
    assert torch.equal(
        erased, mix_batch(images.clone(), labels, recipe, None, random.Random(0), classes=10).images_B3SS
    )
    constant = apply_overrides(recipe, ["augmentation.erasing_mode=const", "augmentation.erasing=1"])
    black = mix_batch(images.clone(), labels, constant, None, random.Random(0), classes=10).images_B3SS
    assert set(black.flatten().tolist()) == {0.0, 9.0}


def test_an_odd_batch_cannot_be_mixed_up() -> None:
    recipe = apply_overrides(RECIPE, ["losses.mixing=0", "cutmix.probability=0", "mixup.mixup=0.8"])
    text = "and this one has 3: set an even batch_size, of no more images than there are$"
    with pytest.raises(InputError, match=f"^mixup pairs the images of a batch, {text}"):
        mix_batch(torch.zeros(3, 3, 32, 32), torch.arange(3), recipe, None, random.Random(0), classes=10)


@pytest.mark.parametrize("extra", ["losses.mixing=0", "cutmix.probability=0.5"])
def test_mixing_twice_is_refused(extra: str) -> None:
    with pytest.raises(InputError, match="mixup beside the patch-aligned CutMix would mix pixels twice"):
        apply_overrides(RECIPE, ["mixup.cutmix=1", extra])


def test_networks_without_what_a_loss_needs_are_refused(model: Any) -> None:
    check_model(RECIPE, model)
    plain = timm.create_model("resnet10t")
    assert patch_grid(plain) is None
    with pytest.raises(InputError, match="does not give its patch tokens, which the token losses need: set") as found:
        check_model(RECIPE, plain)
    assert "losses.mixing=0, and cutmix.probability=0, or" in str(found.value), "all that is to be set is said at once"
    without = apply_overrides(RECIPE, ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0"])
    with pytest.raises(InputError, match=r"has no square patch grid for CutMix: set cutmix\.probability=0"):
        check_model(without, plain)
    check_model(apply_overrides(without, ["cutmix.probability=0"]), plain)


def test_timms_vit_has_all_losses_but_the_one_of_single_patches() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    text = "set losses.mixing=0, or choose a ViT of `vitx models`, which load the weights of timm's$"
    with pytest.raises(InputError, match=rf"has no classifier of patches, which losses\.mixing needs: {text}"):
        check_model(RECIPE, vit)
    check_model(apply_overrides(RECIPE, ["losses.mixing=0"]), vit)


@pytest.mark.parametrize("side", [64, 72, 224])
def test_patches_that_overlap_are_no_grid_for_cutmix(side: int) -> None:
    """PiT's of 16 px are 8 px apart: a box of them would also cover half of the patches beside it."""
    pit: Any = timm.create_model("pit_ti_224", img_size=side)
    assert pit.patch_embed.grid_size == ((side - 16) // 8 + 1,) * 2
    assert patch_grid(pit) is None
    without = ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0"]
    with pytest.raises(InputError, match=r"has no square patch grid for CutMix: set cutmix\.probability=0"):
        check_model(apply_overrides(RECIPE, without), pit)
    check_model(apply_overrides(RECIPE, [*without, "cutmix.probability=0"]), pit)


def test_maps_of_talking_heads_need_weights_that_fsdp_has_split() -> None:
    split = ["losses.attention=0.1", "losses.attention_maps=softmax", "execution.parallel=fsdp"]
    network = timm.create_model("deit_digits", depth=2, attention="talking-heads")
    with pytest.raises(
        InputError, match=r"^execution\.parallel=fsdp does not go with losses\.attention of softmax maps"
    ):
        check_model(apply_overrides(RECIPE, split), network)
    check_model(apply_overrides(RECIPE, split), timm.create_model("deit_digits", depth=2, attention="re-attention"))
    for change in ("losses.attention_maps=mixed", "execution.parallel=ddp"):
        check_model(apply_overrides(RECIPE, [*split, change]), network)


def test_softmax_maps_of_local_attention_are_refused_where_they_would_be_compared() -> None:
    """It computes no scores of keys beyond its neighbourhood; the first step said so, when the run was begun."""
    softmax = ["losses.attention=0.1", "losses.attention_maps=softmax"]
    kinds: dict[str, Any] = {"depth": 3, "attention": ["plain", "plain", "local"], "global_pool": "avg"}
    network = timm.create_model("deit_digits", **kinds)
    with pytest.raises(
        InputError, match=r"^local attention has no map of all tokens: set losses\.attention_maps=mixed$"
    ):
        check_model(apply_overrides(RECIPE, softmax), network)
    check_model(apply_overrides(RECIPE, [*softmax, "losses.attention_pairs=1"]), network)
    check_model(apply_overrides(RECIPE, [*softmax, "losses.attention_maps=mixed"]), network)


@pytest.mark.parametrize("on", ["losses.cosine=1", "losses.contrastive_variant=official"])
def test_a_single_patch_has_none_to_be_compared_with(on: str) -> None:
    recipe = apply_overrides(RECIPE, ["losses.cosine=0"])
    network = timm.create_model("deit_digits", depth=1, patch_size=32)
    check_model(recipe, network)
    with pytest.raises(InputError, match=r"has one patch, and .* compare patches: set a smaller model\.kwargs\.patch"):
        check_model(apply_overrides(recipe, [on]), network)


class Scripted(random.Random):
    """`random()` gives what was written down."""

    def __init__(self, *values: float) -> None:
        super().__init__(0)
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0) if self.values else super().random()


@pytest.mark.parametrize(("drawn", "empty"), [(0.2999, False), (0.3, True), (0.9, True)])
def test_a_box_is_drawn_below_its_probability(drawn: float, empty: bool) -> None:
    box = _sample_box(CutMix(probability=0.3, alpha=50.0), 8, Scripted(drawn))
    assert (box == Box(0, 0, 0, 0)) is empty
    assert empty or 0 < box.area <= 48, "a share near a half"


@pytest.mark.parametrize(
    ("settings", "grid", "patches"),
    [
        (["cutmix.probability=0", "losses.mixing=0"], PatchGrid(8, 4), 64),
        (["cutmix.probability=0", "losses.mixing=0"], None, 0),
        (["cutmix.probability=1e-9"], PatchGrid(4, 8), 16),
        (["losses.mixing=0", "cutmix.probability=0", "mixup.mixup=0.8"], PatchGrid(8, 4), 0),
    ],
)
def test_without_a_box_every_patch_is_of_its_own_image(settings: list[str], grid: Any, patches: int) -> None:
    recipe = apply_overrides(RECIPE, settings)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([3, 1, 2, 0])
    found = mix_batch(images.clone(), labels, recipe, grid, random.Random(0), classes=10)
    assert found.partner_Bn.shape == (4, patches)
    assert not found.partner_Bn.any()
    assert found.weight_B.tolist() == [0.0] * 4
    assert found.labels_B.tolist() == found.partner_labels_B.tolist() == [3, 1, 2, 0]
    assert (found.targets_BC is not None) is recipe.mixup.on


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("seed", range(4))
def test_mixup_has_each_of_the_recipes_settings(mode: str, seed: int) -> None:
    settings = ["mixup=0.7", "cutmix=0.4", "probability=0.8", "switch_probability=0.3", f"mode={mode}"]
    off = ["losses.mixing=0", "cutmix.probability=0"]
    recipe = apply_overrides(RECIPE, [*off, *(f"mixup.{each}" for each in settings)])
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6)
    found = mix_batch(images.clone(), labels, recipe, None, random.Random(seed), classes=7)
    timms: Any = timm.data.Mixup(0.7, 0.4, prob=0.8, switch_prob=0.3, mode=mode, label_smoothing=0.1, num_classes=7)  # type: ignore[no-untyped-call]
    with seeded(random.Random(seed).getrandbits(63), images.device):
        expected, targets = timms(images.clone(), labels)
    assert torch.equal(found.images_B3SS, expected)
    assert found.targets_BC is not None
    assert torch.equal(found.targets_BC, targets)


def test_labels_are_mixed_by_the_share_of_the_box() -> None:
    images = torch.zeros(2, 3, 8, 8)
    mixed = cutmix(images, torch.tensor([0, 2]), Box(0, 1, 0, 1), 4)
    expected = [[0.75 * 0.8 + 0.05, 0.05, 0.25 * 0.8 + 0.05, 0.05], [0.25 * 0.8 + 0.05, 0.05, 0.75 * 0.8 + 0.05, 0.05]]
    torch.testing.assert_close(image_targets(mixed, 4, 0.2), torch.tensor(expected))
    given = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    assert image_targets(unmixed(images, torch.tensor([0, 1]), 4, given), 2, 0.2) is given


def test_the_regulariser_compares_as_many_pairs_as_it_is_told(batch: MixedBatch) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("deit_digits", depth=4).eval()
    off = ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0", "losses.attention=0.5"]
    recipe = apply_overrides(RECIPE, [*off, "losses.attention_pairs=2", "losses.attention_over=rows"])
    losses = compute_losses(model, batch, recipe, 10)
    with attention_maps(model, of=lambda maps: maps) as maps:
        model(batch.images_B3SS)
    expected = attention_similarity_loss(maps.values(), over="rows", pairs=2)
    torch.testing.assert_close(losses["attention"], expected)
    assert losses.keys() == {"classification", "attention", "total"}
    torch.testing.assert_close(losses["total"], losses["classification"] + 0.5 * expected)


@pytest.mark.parametrize(("given", "stage"), [([], "mixed"), (["losses.attention_maps=softmax"], "softmax")])
def test_the_regulariser_is_of_mixed_maps_unless_softmax_s_are_asked_for(
    batch: MixedBatch, given: list[str], stage: Any
) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("deepvit_digits", depth=3, attention="re-attention").eval()
    off = ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0", "losses.attention=0.5"]
    losses = compute_losses(model, batch, apply_overrides(RECIPE, [*off, *given]), 10)
    with attention_maps(model, of=lambda maps: maps, stage=stage) as maps:
        model(batch.images_B3SS)
    torch.testing.assert_close(losses["attention"], attention_similarity_loss(maps.values(), over="heads"))


class TwoHeads(nn.Module):
    """A network of DeiT's distilled form: two logits, of the mean pixel of each channel."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        means = images.mean((2, 3))
        return means, 2 * means


@pytest.mark.parametrize("heads", [1, 2])
def test_a_teacher_takes_its_weight_from_the_labels(heads: int) -> None:
    off = ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0", "losses.label_smoothing=0"]
    recipe = apply_overrides(RECIPE, off)
    images, labels = torch.randn(2, 3, 4, 4), torch.tensor([0, 2])
    plain = Preprocessing(image_size=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    means = images.mean((2, 3))
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    teacher = Teacher(
        nn.Sequential(network, nn.Softmax(1)),
        Distillation(teacher="x", weight=0.3),
        student=plain,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    model = TwoHeads() if heads == 2 else network
    losses = compute_losses(model, unmixed(images, labels, 0), recipe, 3, teacher=teacher)
    own = F.cross_entropy(means, labels)
    taught = F.cross_entropy(heads * means, means.argmax(1))
    torch.testing.assert_close(losses["classification"], own)
    torch.testing.assert_close(losses["distillation"], taught)
    torch.testing.assert_close(losses["total"], 0.7 * own + 0.3 * taught)


def test_the_grid_is_that_of_a_square_embedding() -> None:
    assert patch_grid(timm.create_model("deit_digits", depth=1, img_size=24)) == PatchGrid(6, 4)
    hybrid: Any = timm.create_model("vit_tiny_r_s16_p8_224", depth=1)  # 8 features a patch, of 4 pixels each
    assert patch_grid(hybrid) == PatchGrid(7, 32)
    oblong: Any = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, img_size=(32, 64))
    assert patch_grid(oblong) is None
    stem: Any = timm.create_model("deit_digits", depth=1, patch_embedding="cnn")  # 4 px a patch, each made of 13
    assert patch_grid(stem) == PatchGrid(8, 4)
    cut: Any = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, img_size=40)  # 8 pixels are in no patch
    assert patch_grid(cut) is None
    embedding = SimpleNamespace(grid_size=(8, 8), patch_size=(4, 6))
    assert patch_grid(SimpleNamespace(patch_embed=embedding)) == PatchGrid(8, 4)  # type: ignore[arg-type]


def test_an_argument_that_a_network_does_not_take_is_told_in_timms_words() -> None:
    recipe = apply_overrides(RECIPE, ["model.name=mixer_s32_224", "model.kwargs.num_blocks=2"])
    assert recipe.losses.mixing, "whose patch_head is refused, too"
    with pytest.raises(InputError, match=r"does not take these arguments: .*multiple values for .* 'num_blocks'"):
        build_network(recipe, model_spec(recipe, 3))


def test_a_network_without_attention_has_nothing_to_compare() -> None:
    off = ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0", "cutmix.probability=0"]
    recipe = apply_overrides(RECIPE, [*off, "losses.attention=0.1"])
    with pytest.raises(InputError, match="0 of vitx's attention layers, which"):
        check_model(recipe, timm.create_model("resnet10t"))
    check_model(recipe, timm.create_model("deit_digits", depth=2))
    with pytest.raises(InputError) as refused:
        check_model(recipe, timm.create_model("deit_digits", depth=1))
    assert str(refused.value) == (
        "VisionTransformer has 1 of vitx's attention layers, which losses.attention compares: set "
        "losses.attention=0, or choose a model of "
        "`vitx models`"
    )


@pytest.mark.parametrize("name", ["cosine", "contrastive", "mixing"])
def test_a_loss_without_weight_is_not_computed(model: Any, batch: MixedBatch, name: str) -> None:
    others = [f"losses.{each}=0" for each in ("cosine", "contrastive", "mixing") if each != name]
    assert compute_losses(model, batch, apply_overrides(RECIPE, others), 10).keys() == {"classification", name, "total"}


@pytest.mark.parametrize(("box", "boxes"), [("batch", 1), ("sample", 5)])
def test_erased_images_are_mixed_as_others_are(box: str, boxes: int) -> None:
    settings = ["augmentation.erasing=1", "cutmix.probability=1", "cutmix.alpha=50", f"cutmix.box={box}"]
    found = mix_batch(
        torch.full((6, 3, 32, 32), 9.0),
        torch.arange(6),
        apply_overrides(RECIPE, settings),
        PatchGrid(8, 4),
        random.Random(1),
        classes=10,
    )
    assert found.partner_Bn.any(1).all()
    assert len({tuple(mask.tolist()) for mask in found.partner_Bn}) == boxes
    assert (found.images_B3SS != 9).any()
    assert found.partner_labels_B.tolist() == [5, 4, 3, 2, 1, 0]


def test_boxes_are_the_first_that_the_generator_draws() -> None:
    """Nothing else is drawn where nothing is erased: every run with CutMix alone depends on it."""
    recipe = apply_overrides(RECIPE, ["cutmix.probability=1", "cutmix.alpha=50", "cutmix.box=sample"])
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    found = mix_batch(images.clone(), labels, recipe, PatchGrid(8, 4), random.Random(3), classes=10)
    rng = random.Random(3)
    expected = cutmix(images, labels, [_sample_box(recipe.cutmix, 8, rng) for _ in range(4)], 4)
    assert torch.equal(found.partner_Bn, expected.partner_Bn)
    assert torch.equal(found.images_B3SS, expected.images_B3SS)


@pytest.mark.parametrize(("variant", "classified"), [("paper", True), ("official", False)])
def test_single_patches_are_classified_where_their_logits_are_used(
    model: Any, batch: MixedBatch, monkeypatch: pytest.MonkeyPatch, variant: str, classified: bool
) -> None:
    asked: list[bool] = []

    def recorded(model: Any, images: Tensor, *, classify_patches: bool = True) -> Any:
        asked.append(classify_patches)
        return forward_with_tokens(model, images, classify_patches=classify_patches)

    monkeypatch.setattr(objective, "forward_with_tokens", recorded)
    compute_losses(model, batch, apply_overrides(RECIPE, [f"losses.mixing_variant={variant}"]), 10)
    assert asked == [classified]


def test_a_batch_without_a_box_is_on_the_device_of_its_images() -> None:
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    found = unmixed(torch.zeros(2, 3, 8, 8, device="meta"), labels, 4)
    assert {found.partner_Bn.device.type, found.weight_B.device.type} == {"meta"}
    assert (found.partner_Bn.shape, found.weight_B.shape) == ((2, 4), (2,))


def test_what_was_mixed_stays_as_it_was(batch: MixedBatch) -> None:
    for thing, field in ((batch, "labels_B"), (Box(0, 1, 2, 3), "top"), (PatchGrid(8, 4), "size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 0)
