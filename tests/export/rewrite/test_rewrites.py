"""Each rewrite is an identity: checked in float64 on random weights and random normalisation statistics."""

import copy
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, rewrite_for_export
from vitx.export.rewrite.canonical import ExportAttention, ExportBlock, HeadMix, LayerNormOverHeads
from vitx.export.rewrite.rewrites import REWRITES, ImageClassifier, applied_rewrites
from vitx.models import AlterNet, ReAttention, VisionTransformer

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGENET = Preprocessing(image_size=16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 5,
    "patch_head": True,
    "drop_path_rate": 0.2,
    "attn_drop_rate": 0.1,
}
LAST_TWO = ["plain", "re-attention", "re-attention"]
CNN = {"patch_embedding": "cnn", "residual_scale": 0.5, "attention": LAST_TWO}
MODELS: dict[str, dict[str, Any]] = {
    "deit": {},
    "deit-layer-scale": {"init_values": 0.1, "qkv_bias": False, "residual_scale": 0.5},
    "deepvit-16b": {"attention": "re-attention"},
    "deepvit-s": {**CNN, "embed_dim": 3 * 33, "reatten_scale": 33**-0.5},
    "deepvit-l": {**CNN, "embed_dim": 3 * 35},
    "talking-heads": {"attention": "talking-heads"},
    "talking-heads-bias": {"attention": "talking-heads", "talking_heads_bias": True},
    "gap": {"attention": "re-attention", "global_pool": "avg"},
    "gap-fc-norm": {"global_pool": "avg", "fc_norm": True, "class_token": True},
    "no-norm": {"attention": "re-attention", "reatten_norm": "none", "reatten_scale": 0.5},
    "layer-norm": {"attention": "re-attention", "reatten_norm": "layer", "reatten_scale": 0.5},
}
TIMM: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {"qkv_bias": True},
    "vit_tiny_patch16_224": {"init_values": 0.1, "reg_tokens": 2, "class_token": True},
    "vit_small_patch16_224": {"global_pool": "avg", "qk_norm": True},
    "deit_tiny_distilled_patch16_224": {},
    "cait_xxs24_224": {"qkv_bias": True, "depth_token_only": 1},
    "attnscale_cait_s24_224": {"depth_token_only": 1},
    "featscale_cait_s24_224": {"depth_token_only": 1},
}
CAITS = ("cait_xxs24_224", "attnscale_cait_s24_224", "featscale_cait_s24_224")
ALTERNET: dict[str, Any] = {"unit": "basic", "depths": (1, 2, 1, 1), "attention_depths": (0, 1, 0, 0), "num_classes": 5}
NETWORKS = [*MODELS, *TIMM, "alternet"]


def network(name: str) -> Any:
    return copy.deepcopy(built(name))


@cache
def built(name: str) -> Any:
    if name in TIMM:
        small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
        model: Any = timm.create_model(name, **{**small, **TIMM[name]})
    elif name == "alternet":
        model = AlterNet(**ALTERNET, num_heads=(1, 1, 1, 1), head_dim=4, window_size=4, stem="cifar")
        model.pretrained_cfg = {"first_conv": "stem.0"}
    else:
        model = VisionTransformer(**{**SMALL, **MODELS[name]})
        model.pretrained_cfg = {
            "first_conv": "patch_embed.conv1" if MODELS[name].get("patch_embedding") == "cnn" else "patch_embed.proj"
        }
    return randomize(model.double()).eval()


def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def reference_logits(model: nn.Module) -> Tensor:
    images = pixels().permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (IMAGENET.mean, IMAGENET.std))
    logits: Tensor = model((images - mean) / std)
    return logits


EVERY = tuple(REWRITES)
ALONE = [(name,) for name in EVERY]
ALL_BUT_ONE = [tuple(n for n in EVERY if n != name) for name in EVERY]
TOGETHER = [(name, rewrites) for name in NETWORKS for rewrites in [(), ALL, EVERY]]
APART = [
    *[(name, rewrites) for name in NETWORKS for rewrites in ALONE],
    *[(name, rewrites) for name in ("deepvit-s", "talking-heads-bias", "gap") for rewrites in ALL_BUT_ONE],
]


def subset_name(names: tuple[str, ...]) -> str:
    if names in ALL_BUT_ONE and names != ALL:
        return f"all-but-{next(name for name in EVERY if name not in names)}"
    return {(): "none", ALL: "default", EVERY: "every"}.get(names, "+".join(names))


@pytest.mark.parametrize(("name", "rewrites"), APART, ids=lambda v: v if isinstance(v, str) else subset_name(v))
def test_each_rewrite_is_an_identity(name: str, rewrites: tuple[str, ...]) -> None:
    require_identity(name, rewrites)


@pytest.mark.parametrize(("name", "rewrites"), TOGETHER, ids=lambda v: v if isinstance(v, str) else subset_name(v))
def test_all_rewrites_together_are_an_identity(name: str, rewrites: tuple[str, ...]) -> None:
    require_identity(name, rewrites)


def require_identity(name: str, rewrites: tuple[str, ...]) -> None:
    model = network(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = reference_logits(model)
    rewritten = rewrite_for_export(model, IMAGENET, rewrites=rewrites)
    logits = rewritten(pixels())
    assert logits.dtype == torch.float64
    assert not rewritten.training
    torch.testing.assert_close(logits, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original was changed"


def test_the_reference_depends_on_what_is_folded() -> None:
    """The comparison can fail: with other BatchNorm statistics the logits differ."""
    model = network("deepvit-16b")
    expected = reference_logits(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    assert (reference_logits(model) - expected).abs().max() > 1e-3


# In how many places each rewrite must apply, so that no identity holds because nothing was changed.
PLACES = {
    "fold-normalization": {**dict.fromkeys(NETWORKS, 1)},
    "fold-head-norm": {"deepvit-16b": 3, "deepvit-s": 2, "deepvit-l": 2, "gap": 3, "no-norm": 3},
    "split-rank-one-bias": {
        "deepvit-16b": 3,
        "deepvit-s": 2,
        "deepvit-l": 2,
        "gap": 3,
        "no-norm": 3,
        "talking-heads-bias": 3,
        **dict.fromkeys(CAITS, 2),
    },
    "fold-residual-scale": {
        "deit-layer-scale": 9,
        "deepvit-s": 3,
        "deepvit-l": 3,
        "vit_tiny_patch16_224": 4,
        **dict.fromkeys(CAITS, 4),
    },
    "compute-class-token-only": {
        **dict.fromkeys(MODELS, 1),
        "deit_tiny_patch16_224": 1,
        "vit_tiny_patch16_224": 1,
        "deit_tiny_distilled_patch16_224": 1,
        "gap": 0,
        "gap-fc-norm": 0,
    },
    "pad-head-dim": {"deepvit-s": 3, "deepvit-l": 3},
}


@pytest.mark.parametrize("rewrite", PLACES)
def test_each_rewrite_finds_its_places(rewrite: str) -> None:
    found = {name: applied_rewrites(ImageClassifier(network(name), IMAGENET), EVERY)[rewrite] for name in NETWORKS}
    assert {name: count for name, count in found.items() if count} == {n: c for n, c in PLACES[rewrite].items() if c}


def test_layer_norm_affine_reaches_the_head() -> None:
    """Two norms a block, and the last one before the classifier."""
    for name in ("deit", "gap", "gap-fc-norm"):
        classifier = ImageClassifier(network(name), IMAGENET)
        assert applied_rewrites(classifier, ["fold-layer-norm-affine"]) == {"fold-layer-norm-affine": 7}
        assert not any(m.elementwise_affine for m in classifier.modules() if isinstance(m, nn.LayerNorm))


def test_both_class_tokens_of_a_distilled_network() -> None:
    """Its last block computes two tokens, and its last norm goes into two classifiers."""
    classifier = ImageClassifier(network("deit_tiny_distilled_patch16_224"), IMAGENET)
    assert applied_rewrites(classifier, ["fold-layer-norm-affine"]) == {"fold-layer-norm-affine": 5}
    applied_rewrites(classifier, ALL)
    blocks = [module for module in classifier.modules() if isinstance(module, ExportBlock)]
    assert [block.attn.queries for block in blocks] == [0, 2]
    assert blocks[-1](torch.zeros(3, 18, 24, dtype=torch.float64)).shape == (3, 2, 24)


def test_biases_that_softmax_or_proj_can_take_are_gone() -> None:
    rewritten = rewrite_for_export(network("talking-heads-bias"), IMAGENET)
    attentions = [module for module in rewritten.modules() if isinstance(module, ExportAttention)]
    assert attentions
    for attention in attentions:
        assert attention.key.bias is None
        assert attention.value.bias is None
        assert isinstance(attention.before, HeadMix)
        assert attention.before.bias_H is None
        assert attention.row_bias_H is not None


def test_no_batch_norm_is_left_in_re_attention() -> None:
    rewritten = rewrite_for_export(network("deepvit-16b"), IMAGENET)
    assert not any(isinstance(module, nn.BatchNorm2d | ReAttention) for module in rewritten.modules())
    mixes = [module for module in rewritten.modules() if isinstance(module, HeadMix)]
    assert len(mixes) == 3
    assert all(mix.bias_H is None for mix in mixes)


def test_layer_norm_over_heads_keeps_its_path() -> None:
    rewritten = rewrite_for_export(network("layer-norm"), IMAGENET)
    assert sum(isinstance(module, LayerNormOverHeads) for module in rewritten.modules()) == 3


def test_a_padded_stem_keeps_the_subtraction_only() -> None:
    kept = {}
    for name in ("deit", "deepvit-s"):
        classifier = ImageClassifier(network(name), IMAGENET)
        applied_rewrites(classifier, ["fold-normalization"])
        kept[name] = (classifier.subtract_mean, classifier.divide_by_std)
    assert kept == {"deit": (False, False), "deepvit-s": (True, False)}


def test_padded_heads_are_multiples_of_eight() -> None:
    rewritten = rewrite_for_export(network("deepvit-l"), IMAGENET, rewrites=EVERY)
    attentions = [module for module in rewritten.modules() if isinstance(module, ExportAttention)]
    assert [attention.head_dim for attention in attentions] == [40, 40, 40]
    assert all(attention.query.weight.shape == (120, 105) for attention in attentions)


def test_unsupported_blocks_stay_as_they_are() -> None:
    rewritten = rewrite_for_export(network("vit_small_patch16_224"), IMAGENET)
    assert not any(isinstance(module, ExportBlock) for module in rewritten.modules())


def test_dead_outputs_are_gone() -> None:
    rewritten = rewrite_for_export(network("deit"), IMAGENET)
    assert not any(isinstance(module, nn.Dropout) for module in rewritten.modules())
    assert not any("patch_head" in name for name, _ in rewritten.named_parameters())


def test_float_input_keeps_the_models_own_input() -> None:
    model = network("deepvit-16b")
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    rewritten = rewrite_for_export(model, images="float")
    expected = model(images)
    torch.testing.assert_close(rewritten(images), expected, atol=1e-10 * expected.abs().max().item(), rtol=0)


def test_unknown_rewrite() -> None:
    with pytest.raises(InputError, match="unknown rewrite 'fold-head-norms': did you mean fold-head-norm"):
        rewrite_for_export(network("deit"), IMAGENET, rewrites=["fold-head-norms"])
