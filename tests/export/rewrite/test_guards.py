"""Networks to which a rewrite does not apply: it leaves them alone, and their float64 logits stay what they were."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import Mlp, RmsNorm, StdConv2d
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from reference import randomize
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite.canonical import canonical_blocks
from vitx.export.rewrite.folds import fold_residual_scale, last_norm
from vitx.export.rewrite.rewrites import (
    REWRITES,
    ImageClassifier,
    applied_rewrites,
    rewrite_checked,
    rewrite_for_export,
)
from vitx.models import Block, VisionTransformer

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPROCESSING = Preprocessing(image_size=16, mean=MEAN, std=STD)
SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}


def vitx_network(**options: Any) -> Any:
    model: Any = VisionTransformer(**{**SMALL, **options})
    model.pretrained_cfg = {"first_conv": "patch_embed.proj"}
    return randomize(model.double()).eval()


def timm_network(**options: Any) -> Any:
    return randomize(timm.create_model("vit_tiny_patch16_224", **{**SMALL, **options}).double()).eval()


def places_of_identities(model: Any, size: int = 16) -> dict[str, int]:
    """In how many places each rewrite applies, after a check that together they keep the function."""
    pixels = torch.randint(0, 256, (3, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        expected = model((pixels.permute(0, 3, 1, 2).double() / 255 - mean) / std)
        classifier = ImageClassifier(model, PREPROCESSING).eval()
        applied = applied_rewrites(classifier, tuple(REWRITES))
        found = classifier(pixels)
    torch.testing.assert_close(found, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)
    return applied


@pytest.mark.parametrize(
    ("pool", "fc_norm", "norms"),
    [
        ("max", False, 4),  # the largest of γx + β is not γ times the largest of x, plus β
        ("avgmax", False, 4),
        ("max", True, 4),  # only the token and the average are known to commute, so it is not tried
        ("avg", False, 5),
        ("avg", True, 5),
        ("token", False, 5),
    ],
)
def test_the_last_norm_goes_into_the_head_only_where_pooling_commutes(pool: str, fc_norm: bool, norms: int) -> None:
    model = timm_network(global_pool=pool, fc_norm=fc_norm, class_token=True)
    applied = places_of_identities(model)
    assert applied["fold-layer-norm-affine"] == norms
    assert applied["compute-class-token-only"] == (1 if pool == "token" else 0)


def test_attention_pooling_is_left_alone() -> None:
    applied = places_of_identities(timm_network(global_pool="map", class_token=False))
    assert (applied["fold-layer-norm-affine"], applied["compute-class-token-only"]) == (4, 0)


@pytest.mark.parametrize(("scale", "places"), [(-0.5, 0), (0.5, 2), (2.0, 2)])
def test_a_negative_residual_scale_turns_the_sign_of_a_norm(scale: float, places: int) -> None:
    assert places_of_identities(vitx_network(residual_scale=scale))["fold-residual-scale"] == places


def test_a_norm_without_a_mean_is_left_alone() -> None:
    model = vitx_network(norm_layer=partial(RmsNorm, eps=1e-6), residual_scale=0.5)
    applied = places_of_identities(model)
    assert (applied["fold-residual-scale"], applied["fold-layer-norm-affine"]) == (0, 0)
    assert applied["compute-class-token-only"] == 0
    assert last_norm(model) is None


def test_a_network_that_divides_by_zero_is_left_alone() -> None:
    assert fold_residual_scale(vitx_network(residual_scale=0.0)) == 0


@pytest.mark.parametrize(("attention", "places"), [("re-attention", 0), ("plain", 2)])
def test_values_keep_their_bias_where_the_number_of_tokens_may_change(attention: str, places: int) -> None:
    """A bias on a map counts once a token; with another size the fold would be of the wrong number."""
    model = vitx_network(attention=attention, dynamic_img_size=True)
    assert places_of_identities(model, size=24)["fold-value-bias"] == places


class OtherHead(VisionTransformerDistilled):
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        logits: Tensor = super().forward_head(x)
        logits += self.head(x.mean(1))  # reads all tokens
        return logits


def test_a_distilled_network_with_another_head_computes_all_tokens() -> None:
    small = {**SMALL, "weight_init": "skip"}
    networks: list[tuple[Any, int, int]] = [(VisionTransformerDistilled, 1, 5), (OtherHead, 0, 4)]
    for network, tokens, norms in networks:
        applied = places_of_identities(randomize(network(**small).double()).eval())
        assert (applied["compute-class-token-only"], applied["fold-layer-norm-affine"]) == (tokens, norms)


def test_a_distilled_network_without_a_second_classifier_keeps_its_last_norm() -> None:
    model: Any = VisionTransformerDistilled(**SMALL)  # type: ignore[no-untyped-call]  # timm's
    model.head_dist = nn.Sequential(nn.Linear(24, 5))
    assert places_of_identities(randomize(model.double()).eval())["fold-layer-norm-affine"] == 4


def test_two_queries_pass_through_mixes_and_biases_over_heads() -> None:
    """No published network has two class tokens and a mix over heads; the canonical block has both."""
    for attention in ("plain", "re-attention", "talking-heads"):
        model = vitx_network(attention=attention, talking_heads_bias=attention == "talking-heads")
        x = torch.randn(3, 17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model.blocks[-1](x)[:, :2]
            block = canonical_blocks(model)[-1]
            block.attn.queries = 2
            for joined in (False, True):
                block.joined = joined
                torch.testing.assert_close(block(x), expected, atol=1e-10, rtol=1e-10)


class OtherBlock(Block):
    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        return super().forward(x) + x.flip(1)  # reads all tokens


class OtherMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        assert self.fc2.bias is not None
        return hidden * self.fc2.bias


def test_subclasses_that_compute_something_else_are_left_alone() -> None:
    model = vitx_network()
    model.blocks[-1].__class__ = OtherBlock
    applied = places_of_identities(model)
    assert (applied["compute-class-token-only"], applied["fold-value-bias"]) == (0, 1)
    model = vitx_network(residual_scale=0.5)
    model.blocks[0].mlp.__class__ = OtherMlp
    assert places_of_identities(model)["fold-residual-scale"] == 1


class Stem(nn.Module):
    """A network of a first convolution alone, whose input is `channels` of the image's means over all channels."""

    def __init__(self, convolution: nn.Conv2d, *, grey: bool = False) -> None:
        super().__init__()
        self.stem, self.grey = convolution, grey
        self.pretrained_cfg = {"first_conv": "stem"}

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.stem(images.mean(1, keepdim=True) if self.grey else images)
        return out.square().mean((2, 3))


@pytest.mark.parametrize(
    ("stem", "grey", "left"),
    [
        (nn.Conv2d(3, 6, 3), False, (False, False)),
        (nn.Conv2d(3, 6, 3, bias=False), False, (False, False)),
        (nn.Conv2d(3, 6, 3, padding=1), False, (True, False)),
        (nn.Conv2d(3, 6, 3, padding=(0, 1)), False, (True, False)),
        (nn.Conv2d(3, 6, 3, padding="same"), False, (True, False)),
        (nn.Conv2d(3, 6, 3, padding="valid"), False, (False, False)),
        (nn.Conv2d(3, 6, 3, groups=3), False, (True, True)),
        (nn.Conv2d(1, 6, 3), True, (True, True)),
        (StdConv2d(3, 6, 3), False, (True, True)),  # it divides by its weights' spread
    ],
)
def test_the_normalisation_goes_only_into_a_plain_convolution_of_the_pixels(
    stem: nn.Conv2d, grey: bool, left: tuple[bool, bool]
) -> None:
    model = randomize(Stem(stem, grey=grey).double()).eval()
    classifier = ImageClassifier(model, PREPROCESSING)
    applied_rewrites(classifier, ["fold-normalization"])
    assert (classifier.subtract_mean, classifier.divide_by_std) == left
    places_of_identities(randomize(Stem(stem, grey=grey).double()).eval())


def test_an_embedding_that_pads_the_image_keeps_the_subtraction() -> None:
    model = timm_network(dynamic_img_pad=True, dynamic_img_size=True)
    assert places_of_identities(model, size=18)["fold-normalization"] == 1


@pytest.mark.parametrize("name", ["", "patch_embed"])
def test_a_hook_sees_normalised_pixels(name: str) -> None:
    model = timm_network()
    model.get_submodule(name).register_forward_pre_hook(lambda module, given: (given[0].clamp(-1, 1),))
    assert places_of_identities(model)["fold-normalization"] == 0


class Around(nn.Module):
    """A module around a transformer that reads its tokens, or a weight, on its own."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.vit, self.reads = vitx_network(), reads

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor
        if self.reads == "weight":
            logits = self.vit(x) + self.vit.blocks[0].mlp.fc1.weight.sum()
        elif self.reads == "tokens":
            logits = self.vit.head(self.vit.forward_features(x)[:, 1:].mean(dim=1))
        else:
            logits = self.vit.head(self.vit.forward_head(self.vit.forward_features(x), pre_logits=True))
        return logits


class LowRank(nn.Linear):
    """A Linear with a second branch, as LoRA adds it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(dim=-1, keepdim=True)


def _shared_or_changed(case: str) -> Any:
    model = vitx_network()
    first, second = model.blocks
    if case == "block twice":
        model.blocks[1] = first
    elif case == "MLP twice":
        second.mlp = first.mlp
    elif case == "norm twice":
        second.norm1 = first.norm1
    elif case == "weight twice":
        second.attn.proj.weight = first.attn.proj.weight
    elif case == "qkv of a subclass":
        first.attn.qkv.__class__ = LowRank
    elif case == "layer of a subclass":
        second.mlp.fc1.__class__ = LowRank
    elif case == "head of a subclass":
        model.head.__class__ = LowRank
    elif case.startswith("a hook of "):
        model.get_submodule(case.removeprefix("a hook of ")).register_forward_hook(
            lambda module, given, out: 2 * out - out.mean(dim=1, keepdim=True)
        )
    elif case == "weight norm":
        weight_norm(second.mlp.fc2)
    else:
        return Around(case)
    return model


@pytest.mark.parametrize(
    "case",
    [
        *("block twice", "MLP twice", "norm twice", "weight twice", "qkv of a subclass", "layer of a subclass"),
        *("head of a subclass", "weight norm", "tokens", "logits"),
        *(f"a hook of {name}" for name in ("blocks", "norm", "head_drop", "blocks.0.attn.proj", "blocks.1.mlp.drop1")),
        *("a hook of blocks.0.attn.attn_drop", "a hook of pos_drop"),
    ],
)
def test_what_is_used_twice_or_computes_something_else_is_left_alone(case: str) -> None:
    model = _shared_or_changed(case).double().eval()
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.inference_mode():
        found = rewrite_for_export(model, images="float", rewrites=tuple(REWRITES))(pixels)
        torch.testing.assert_close(found, model(pixels), rtol=1e-9, atol=1e-9)


def test_weights_that_a_hook_computes_are_made_permanent_first() -> None:
    model = vitx_network()
    prune.l1_unstructured(model.head, "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match=r"^the network cannot be copied: .* Make pruning or .*prune\.remove"):
        rewrite_for_export(model, images="float")
    prune.remove(model.head, "weight")  # type: ignore[no-untyped-call]
    rewrite_for_export(model, images="float")


def test_the_rewrite_that_changes_a_network_is_named() -> None:
    """Its code reads a weight that the fold changes."""

    def shared() -> ImageClassifier:
        return ImageClassifier(Around("weight"), PREPROCESSING).eval()

    with pytest.raises(CheckFailed, match=r"the rewrite 'fold-layer-norm-affine' changes this network, .* --without"):
        rewrite_checked(shared(), tuple(REWRITES), 16, rebuild=shared)
    without = tuple(name for name in REWRITES if name != "fold-layer-norm-affine")
    assert rewrite_checked(shared(), without, 16, rebuild=shared).keys() == set(without)


def test_a_network_without_finite_logits_is_not_blamed_on_a_rewrite() -> None:
    model = vitx_network()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    assert rewrite_checked(classifier, ("join-tokens",), 16, rebuild=lambda: classifier) == {"join-tokens": 2}
