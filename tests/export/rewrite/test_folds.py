"""Each rewrite alone and beside the class-token tail, on networks of two small blocks; what it leaves, by value."""

import copy
from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import Tensor, nn

from reference import randomize, randomize_like_trained
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite import folds, rewrites
from vitx.export.rewrite.canonical import (
    ExportAttention,
    ExportBlock,
    HeadMix,
)
from vitx.export.rewrite.rewrites import (
    REWRITES,
    ImageClassifier,
    applied_rewrites,
    first_convolutions,
)
from vitx.models import VisionTransformer
from vitx.models.attention import FirstValues

pytestmark = pytest.mark.usefixtures("one_thread")

PREPROCESSING = Preprocessing(image_size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SMALL: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 4,
    "mlp_ratio": 1.0,
}
RE: dict[str, Any] = {"attention": "re-attention"}
# Options, and in how many places each rewrite applies, in the order of REWRITES: dead outputs, normalisation,
# branches, head norm, rank-one bias, attention scale, residual scale, norm's affine, row constants, value bias, token,
# join, pad.
NETWORKS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "plain": ({}, [10, 1, 0, 0, 0, 2, 0, 5, 2, 2, 1, 2, 2]),
    "no-bias": ({"qkv_bias": False}, [10, 1, 0, 0, 0, 2, 0, 5, 0, 0, 1, 2, 2]),
    "scaled": ({"residual_scale": 0.5, "init_values": 0.1}, [10, 1, 0, 0, 0, 2, 6, 5, 2, 2, 1, 2, 2]),
    "mixed": ({**RE, "reatten_scale": 0.5}, [10, 1, 0, 2, 0, 4, 0, 5, 2, 0, 1, 2, 2]),
    "no-norm": ({**RE, "reatten_norm": "none"}, [10, 1, 0, 0, 2, 2, 0, 5, 2, 2, 1, 2, 2]),
    "no-norm-scaled": ({**RE, "reatten_norm": "none", "reatten_scale": 2.0}, [10, 1, 0, 2, 2, 4, 0, 5, 2, 2, 1, 2, 2]),
    "layer-norm": ({**RE, "reatten_norm": "layer", "reatten_scale": 0.5}, [10, 1, 0, 0, 0, 4, 0, 5, 2, 0, 1, 2, 2]),
    "talking": ({"attention": "talking-heads", "talking_heads_bias": True}, [10, 1, 0, 0, 2, 2, 0, 5, 4, 2, 1, 2, 2]),
    "attn-scale": ({"attention": "attn-scale"}, [10, 1, 0, 0, 0, 2, 0, 5, 2, 2, 1, 2, 2]),
    "feat-scale": ({"feat_scale": True}, [10, 1, 0, 0, 0, 2, 0, 5, 2, 2, 0, 2, 2]),
    "contranorm": ({"contranorm_scale": 0.5}, [10, 1, 0, 0, 0, 2, 0, 4, 2, 2, 0, 2, 2]),
    "contranorm-scaled": (
        {"contranorm_scale": 2.0, "contranorm_temperature": 0.2, "residual_scale": 0.5, "init_values": 0.1},
        [10, 1, 0, 0, 0, 2, 6, 4, 2, 2, 0, 2, 2],
    ),
    "neutreno": ({"attention": "neutreno"}, [10, 1, 0, 0, 0, 2, 0, 5, 2, 1, 1, 2, 0]),
    "both-scales": (
        {"feat_scale": True, "attention": "attn-scale", "residual_scale": 0.5, "init_values": 0.1},
        [10, 1, 0, 0, 0, 2, 6, 5, 2, 2, 0, 2, 2],
    ),
    "two-kinds": ({"attention": ["re-attention", "plain"]}, [10, 1, 0, 1, 0, 2, 0, 5, 2, 1, 1, 2, 2]),
    "other-order": ({"attention": ["plain", "re-attention"]}, [10, 1, 0, 1, 0, 2, 0, 5, 2, 1, 1, 2, 2]),
    "average": ({**RE, "global_pool": "avg", "fc_norm": True}, [10, 1, 0, 2, 0, 2, 0, 5, 2, 0, 0, 2, 2]),
}
EVERY = tuple(REWRITES)


def network(name: str, **more: Any) -> Any:
    model: Any = VisionTransformer(**{**SMALL, **NETWORKS[name][0], **more})
    model.pretrained_cfg = {"first_conv": "patch_embed.proj"}
    return randomize(model.double()).eval()


def pixels(count: int = 2, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)


def logits_of(model: Any, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    with torch.no_grad():
        out: Tensor = model((images.permute(0, 3, 1, 2).double() / 255 - mean) / std)
    return out


def require_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)


def changed(name: str, names: tuple[str, ...], **more: Any) -> tuple[ImageClassifier, dict[str, int]]:
    """The rewritten network, which gives the same logits as before."""
    model = network(name, **more)
    expected = logits_of(model, pixels())
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    applied = applied_rewrites(classifier, names)
    with torch.no_grad():
        require_equal(classifier(pixels()), expected)
    return classifier, applied


@pytest.mark.parametrize("rewrite", EVERY)
@pytest.mark.parametrize("name", NETWORKS)
def test_each_rewrite_alone_is_an_identity_in_so_many_places(name: str, rewrite: str) -> None:
    classifier, applied = changed(name, (rewrite,))
    expected = dict(zip(EVERY, NETWORKS[name][1], strict=True))[rewrite]
    assert applied == {rewrite: expected}
    with torch.no_grad():
        again = applied_rewrites(classifier, (rewrite,))
        require_equal(classifier(pixels()), logits_of(network(name), pixels()))
    assert again == {rewrite: 0}, "what is done is not done again"


@pytest.mark.parametrize("rewrite", EVERY)
@pytest.mark.parametrize(
    "name", ["mixed", "no-norm-scaled", "layer-norm", "talking", "attn-scale", "neutreno", "scaled", "no-bias"]
)
def test_each_rewrite_beside_the_class_token_tail(name: str, rewrite: str) -> None:
    for names in ((rewrite, "compute-class-token-only"), (rewrite, "compute-class-token-only", "join-tokens")):
        classifier, _ = changed(name, names)
        block = classifier.model.blocks[-1]  # type: ignore[index]
        given = FirstValues()
        given.values_BND = torch.randn(2, 5, 12, dtype=torch.float64)
        with torch.no_grad():
            out = block(torch.randn(2, 5, 12, dtype=torch.float64), given)  # type: ignore[operator]
        assert out.shape == (2, 1, 12), "the other tokens are gone"


@pytest.mark.parametrize("name", NETWORKS)
def test_all_in_order_and_all_backwards(name: str) -> None:
    changed(name, EVERY)
    model = network(name)
    expected = logits_of(model, pixels())
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    with torch.no_grad():
        for rewrite in reversed(EVERY):
            REWRITES[rewrite](classifier)
        require_equal(classifier(pixels()), expected)


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (0, 2)])
def test_neutrenos_blocks_share_values_where_some_stay_as_they_are(kept: tuple[int, ...]) -> None:
    model = network("neutreno", depth=3, embed_dim=24)  # heads of 8 channels, which every rewrite leaves
    for index in kept:  # of a subclass, as LoRA's layers are
        model.blocks[index].mlp.fc1.__class__ = type("Other", (nn.Linear,), {})
    expected = logits_of(model, pixels())
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    assert applied_rewrites(classifier, EVERY)["join-tokens"] == 3 - len(kept)
    with torch.no_grad():
        require_equal(classifier(pixels()), expected)


def attention_of(name: str, rewrite: str) -> tuple[Any, ExportAttention]:
    """The last block's attention before, and after the rewrite."""
    before = network(name).blocks[-1].attn
    classifier, _ = changed(name, (rewrite,))
    return before, classifier.model.blocks[-1].attn  # type: ignore[index, union-attr]


def test_the_head_norm_is_in_the_mix() -> None:
    before, after = attention_of("mixed", "fold-head-norm")
    s = before.var_norm.weight / torch.sqrt(before.var_norm.running_var + before.var_norm.eps)
    assert isinstance(after.after, HeadMix)
    assert after.value_scale == 1.0
    require_equal(after.after.weight_HH, 0.5 * s[:, None] * before.reatten_matrix.weight[:, :, 0, 0])
    shift = s * (before.reatten_matrix.bias - before.var_norm.running_mean) + before.var_norm.bias
    assert after.after.bias_H is not None
    require_equal(after.after.bias_H, 0.5 * shift)


def test_a_mix_without_bias_gets_that_of_the_norm() -> None:
    classifier = ImageClassifier(network("mixed"), PREPROCESSING)
    (first, _) = folds._attentions(classifier)
    mix, norm = folds._mix_and_norm(first)
    assert mix is not None
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mix.bias_H = None
    s = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    expected = 0.5 * (norm.bias - s * norm.running_mean)
    with torch.no_grad():
        assert folds.fold_head_norm(classifier) == 2
    assert isinstance(first.after, HeadMix)
    assert first.after.bias_H is not None
    require_equal(first.after.bias_H, expected.detach())


def test_the_bias_of_a_map_is_a_bias_of_its_row() -> None:
    before, after = attention_of("no-norm", "split-rank-one-bias")
    assert isinstance(after.after, HeadMix)
    assert after.after.bias_H is None
    assert after.row_bias_H is not None
    assert torch.equal(after.row_bias_H, before.reatten_matrix.bias)
    assert torch.equal(after.after.weight_HH, before.reatten_matrix.weight[:, :, 0, 0])


def test_scales_are_in_the_weights() -> None:
    before, after = attention_of("no-norm-scaled", "fold-attention-scale")
    query, key, value = before.qkv.weight.chunk(3)
    biases = before.qkv.bias.chunk(3)
    assert (after.scale, after.value_scale) == (1.0, 1.0)
    require_equal(after.query.weight, 0.5 * query)  # 1/√4
    require_equal(after.query.bias, 0.5 * biases[0])
    require_equal(after.value.weight, 2 * value)
    require_equal(after.value.bias, 2 * biases[2])
    assert torch.equal(after.key.weight, key)
    assert after.query.weight.requires_grad


def test_the_residual_scale_is_in_eps_and_in_the_last_layers() -> None:
    before = network("scaled").blocks[0]
    classifier, _ = changed("scaled", ("fold-residual-scale",))
    after: Any = classifier.model.blocks[0]  # type: ignore[index]
    assert after.residual_scale == 1.0
    assert [norm.eps for norm in (after.norm1, after.norm2)] == pytest.approx([4 * before.norm1.eps] * 2)
    assert isinstance(after.ls1, nn.Identity)
    assert isinstance(after.ls2, nn.Identity)
    for found, old, gamma in (
        (after.attn.proj, before.attn.proj, before.ls1.gamma),
        (after.mlp.fc2, before.mlp.fc2, before.ls2.gamma),
    ):
        require_equal(found.weight, 2 * gamma[:, None] * old.weight)
        require_equal(found.bias, 2 * gamma * old.bias)


@pytest.mark.parametrize(("name", "last"), [("plain", "norm"), ("average", "fc_norm")])
def test_a_norms_affine_is_in_the_layers_after_it(name: str, last: str) -> None:
    model = network(name)
    classifier, _ = changed(name, ("fold-layer-norm-affine",))
    after: Any = classifier.model
    norm = getattr(model, last)
    require_equal(after.head.weight, model.head.weight * norm.weight)
    require_equal(after.head.bias, model.head.bias + model.head.weight @ norm.bias)
    block, found = model.blocks[0], after.blocks[0]
    require_equal(found.mlp.fc1.weight, block.mlp.fc1.weight * block.norm2.weight)
    for part, linear in enumerate((found.attn.query, found.attn.key, found.attn.value)):
        weight, bias = block.attn.qkv.weight.chunk(3)[part], block.attn.qkv.bias.chunk(3)[part]
        require_equal(linear.weight, weight * block.norm1.weight)
        require_equal(linear.bias, bias + weight @ block.norm1.bias)
    for each in (found.norm1, found.norm2, getattr(after, last)):
        assert each.weight is None is each.bias
        assert not each.elementwise_affine
    shift = nn.LayerNorm(12, bias=False).double()
    linear = nn.Linear(12, 2, bias=False).double()
    assert folds._fold_affine(shift, [linear]) == 1
    assert linear.bias is None, "nothing was to be added"
    assert folds._fold_affine(nn.LayerNorm(12, elementwise_affine=False), [linear]) == 0
    assert folds._fold_affine(nn.Identity(), [linear]) == 0


def test_the_values_bias_is_in_that_of_the_projection() -> None:
    """Rows of the mixed maps sum to Σ_g W[h, g] + 5·b_h."""
    for name, factor in (("no-norm", 1.0), ("no-norm-scaled", 2.0)):
        before, after = attention_of(name, "fold-value-bias")
        mix = before.reatten_matrix
        rows = mix.weight[:, :, 0, 0].sum(1) + 5 * mix.bias
        constant = factor * (rows[:, None] * before.qkv.bias.chunk(3)[2].view(3, 4)).flatten()
        require_equal(after.proj.bias, before.proj.bias + before.proj.weight @ constant)
        assert after.value.bias is None
    plain, after = attention_of("plain", "fold-value-bias")
    require_equal(after.proj.bias, plain.proj.bias + plain.proj.weight @ plain.qkv.bias.chunk(3)[2])


def test_a_projection_without_bias_gets_one() -> None:
    model = network("plain")
    model.blocks[0].attn.proj.bias = None
    expected = logits_of(model, pixels())
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    assert applied_rewrites(classifier, ["fold-value-bias"]) == {"fold-value-bias": 2}
    require_equal(classifier(pixels()).detach(), expected)


def test_a_block_that_has_no_value_bias_is_passed_over() -> None:
    model = network("talking")
    model.blocks[0].attn.qkv.bias = None
    expected = logits_of(model, pixels())
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    assert applied_rewrites(classifier, ["drop-row-constants", "fold-value-bias"]) == {
        "drop-row-constants": 3,
        "fold-value-bias": 1,
    }
    require_equal(classifier(pixels()).detach(), expected)


@pytest.mark.parametrize("token_kinds", [{"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_all_tokens_count_in_a_row(token_kinds: dict[str, Any]) -> None:
    assert changed("no-norm", ("fold-value-bias",), **token_kinds)[1] == {"fold-value-bias": 2}


def test_blocks_behind_one_that_is_passed_over_are_folded() -> None:
    """The first needs the number of tokens, which may change here."""
    kinds = {"attention": ["re-attention", "plain"], "dynamic_img_size": True}
    assert changed("no-norm", ("fold-value-bias",), **kinds)[1] == {"fold-value-bias": 1}


def test_blocks_on_their_own_are_of_no_known_number_of_tokens() -> None:
    for name, places in (("no-norm", 0), ("plain", 2)):
        blocks = nn.Sequential(*network(name).blocks)
        assert folds.fold_value_bias(blocks) == places
        assert folds.compute_class_token_only(blocks) == 0
        assert folds.fold_layer_norm_affine(blocks) == 4


def test_heads_are_padded_with_zeros() -> None:
    before, after = attention_of("plain", "pad-head-dim")
    assert (after.head_dim, after.scale) == (8, 0.5)
    for part, linear in enumerate((after.query, after.key, after.value)):
        assert (linear.in_features, linear.out_features) == (12, 24)
        weight, bias = linear.weight.view(3, 8, 12), linear.bias.view(3, 8)
        assert torch.equal(weight[:, :4].flatten(0, 1), before.qkv.weight.chunk(3)[part])
        assert torch.equal(bias[:, :4].flatten(), before.qkv.bias.chunk(3)[part])
        assert not weight[:, 4:].any()
        assert not bias[:, 4:].any()
    assert (after.proj.in_features, after.proj.out_features) == (24, 12)
    padded = after.proj.weight.view(12, 3, 8)
    assert torch.equal(padded[:, :, :4].flatten(1), before.proj.weight)
    assert not padded[:, :, 4:].any()
    _, without = attention_of("no-bias", "pad-head-dim")
    assert without.query.bias is None
    wide = changed("plain", ("pad-head-dim",), embed_dim=48)[1]
    assert wide == {"pad-head-dim": 0}, "16 is a multiple of eight"


def test_the_tail_is_that_of_a_network_whose_last_block_was_found() -> None:
    model = network("plain")
    model.blocks[1].mlp.norm = nn.LayerNorm(12).double()
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    assert applied_rewrites(classifier, ["compute-class-token-only"]) == {"compute-class-token-only": 0}
    assert isinstance(classifier.model.blocks[0], ExportBlock)  # type: ignore[index]
    assert not isinstance(classifier.model.blocks[1], ExportBlock)  # type: ignore[index]
    model = network("plain")
    model.norm = nn.BatchNorm1d(5)  # over tokens
    assert folds.compute_class_token_only(model) == 0


def test_dead_outputs() -> None:
    """Four dropouts a block, those of positions and head; here also two drop paths and the patch head."""
    dropped, applied = changed("plain", ("remove-dead-outputs",), patch_head=True, drop_path_rate=0.5)
    assert applied == {"remove-dead-outputs": 13}
    assert dropped.model.patch_head is None
    assert not any(type(module).__name__ in ("Dropout", "DropPath") for module in dropped.modules())
    assert not any(module.training for module in dropped.modules())
    trained = ImageClassifier(network("plain"), PREPROCESSING).train()
    assert rewrites.remove_dead_outputs(trained) == 10
    assert isinstance(trained.model.head_drop, nn.Identity)
    assert trained.model.head_drop.training


def test_the_normalisation_by_hand() -> None:
    model = network("plain")
    classifier = ImageClassifier(copy.deepcopy(model), PREPROCESSING)
    assert (classifier.mean.dtype, classifier.mean.shape) == (torch.float64, (1, 3, 1, 1))
    torch.testing.assert_close(classifier.mean.flatten(), torch.tensor([102.0, 127.5, 153.0], dtype=torch.float64))
    torch.testing.assert_close(classifier.std.flatten(), torch.tensor([51.0, 76.5, 63.75], dtype=torch.float64))
    require_equal(classifier(pixels()).detach(), logits_of(model, pixels()))
    with torch.no_grad():
        assert rewrites.fold_normalization(classifier) == 1
        assert rewrites.fold_normalization(classifier) == 0
    proj: Any = classifier.model.patch_embed.proj  # type: ignore[union-attr]
    old = model.patch_embed.proj
    std, mean = torch.tensor([0.2, 0.3, 0.25]), torch.tensor([0.4, 0.5, 0.6])
    weight = old.weight.float() / (255 * std[:, None, None])
    torch.testing.assert_close(proj.weight.float(), weight)
    bias = old.bias.float() - (old.weight.float() * (mean / std)[:, None, None]).sum((1, 2, 3))
    torch.testing.assert_close(proj.bias.float(), bias, rtol=1e-5, atol=1e-5)


def test_images_that_are_padded_keep_the_subtraction() -> None:
    model = network("plain", dynamic_img_size=True, dynamic_img_pad=True)
    expected = logits_of(model, pixels(size=10))
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    applied_rewrites(classifier, ["fold-normalization"])
    assert (classifier.subtract_mean, classifier.divide_by_std) == (True, False)
    require_equal(classifier(pixels(size=10)).detach(), expected)


def test_the_first_convolutions_are_those_that_timm_names() -> None:
    model = network("plain")
    stem = model.patch_embed.proj
    assert first_convolutions(model) == [stem]
    for configuration in ({}, None, {"first_conv": ("patch_embed.proj", "b")}, {"first_conv": "head"}):
        model.pretrained_cfg = configuration
        assert first_convolutions(model) == []
    model.patch_embed.conv1 = nn.Conv2d(4, 4, 1)  # which does not read three channels
    for name in ("patch_embed.conv2", "patch_embed.conv1"):
        model.pretrained_cfg = {"first_conv": name}
        assert first_convolutions(model) == []
    del model.pretrained_cfg
    assert first_convolutions(model) == []


@pytest.mark.parametrize(("padding", "subtracts"), [(0, False), (1, True)])
def test_every_branch_of_a_stem_takes_the_normalisation(padding: int, subtracts: bool) -> None:
    class TwoBranches(nn.Module):
        pretrained_cfg: ClassVar = {"first_conv": ("wide", "narrow")}

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv2d(3, 4, 2 * padding + 1, padding=padding, bias=False)
            self.narrow = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled: Tensor = (self.wide(x) + self.narrow(x)).mean((2, 3))
            return pooled

    model = TwoBranches().double()
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    expected = classifier(pixels()).detach()
    assert applied_rewrites(classifier, ["fold-normalization"]) == {"fold-normalization": 1}
    assert (classifier.subtract_mean, classifier.divide_by_std) == (subtracts, False)
    require_equal(classifier(pixels()).detach(), expected)


@pytest.mark.parametrize(("name", "size"), [("fastvit_t8", 64), ("repvit_m0_9", 64), ("levit_128s", 224)])
def test_branches_of_training_become_one_layer(name: str, size: int) -> None:
    """In the network's own type, also where timm makes a layer anew."""
    model = randomize_like_trained(timm.create_model(name, num_classes=5)).double().eval()
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    expected = classifier(pixels(size=size)).detach()
    layers = sum(isinstance(module, nn.Conv2d | nn.BatchNorm2d) for module in model.modules())
    (places,) = applied_rewrites(classifier, ["reparameterize"]).values()
    assert places > 0
    assert sum(isinstance(module, nn.Conv2d | nn.BatchNorm2d) for module in model.modules()) < 0.6 * layers
    found = classifier(pixels(size=size)).detach()
    assert found.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_a_part_of_another_library_is_not_merged() -> None:
    """What its attribute `fuse` means is not known."""
    model: Any = timm.create_model("test_vit", num_classes=5)
    model.head.fuse = True
    assert applied_rewrites(ImageClassifier(model, PREPROCESSING), ["reparameterize"]) == {"reparameterize": 0}


def test_a_network_that_was_built_merged_stays_as_it_is() -> None:
    """Of FastViT's some modules fail if they are asked to merge what they no longer have."""
    model = timm.create_model("fastvit_t8", num_classes=5, inference_mode=True)
    assert applied_rewrites(ImageClassifier(model, PREPROCESSING), ["reparameterize"]) == {"reparameterize": 0}


class Adapted(nn.Linear):
    """As LoRA's layers: more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize("change", ["hook", "layer"])
def test_what_a_merge_would_not_see_is_not_merged(change: str) -> None:
    model: Any = timm.create_model("levit_128s", num_classes=5).eval()
    projection = model.stages[0].blocks[0].attn.qkv
    if change == "hook":
        projection.linear.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    else:
        projection.linear.__class__ = Adapted
    assert applied_rewrites(ImageClassifier(model, PREPROCESSING), ["reparameterize"]) == {"reparameterize": 0}
