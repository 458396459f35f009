"""The vision transformer: sizes, blocks, heads, timm's interface."""

import math
from typing import Any, get_args

import pytest
import timm
import torch
from torch import Tensor

from reference import randomize, seq
from vitx.core.errors import InputError
from vitx.models import (
    Block,
    ContraNorm,
    VisionTransformer,
    attention_maps,
    attention_std,
    forward_with_tokens,
    token_similarity,
)
from vitx.models.attention import AttnScaleAttention, ReAttention, TalkingHeadsAttention
from vitx.models.cait import FeatScaleBlock
from vitx.models.vit import AttentionKind, scale_frequencies

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}


def block(kind: str, residual_scale: float = 1.0) -> Block:
    model: Any = VisionTransformer(**{**SMALL, "attention": kind, "residual_scale": residual_scale}).double().eval()
    randomize(model)
    first = model.blocks[0]
    assert isinstance(first, Block)
    return first


@pytest.mark.parametrize("kind", ["plain", "talking-heads", "re-attention", "attn-scale"])
def test_residual_scale_is_a_branch_multiplier(kind: str) -> None:
    """s = .5 equals a plain block with branches × 2 and a LayerNorm eps of eps/s²."""
    scaled: Any = block(kind, 0.5)
    plain: Any = block(kind)
    plain.norm1.eps = plain.norm2.eps = scaled.norm1.eps / 0.25
    x = torch.randn(2, 17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    middle = x + 2 * plain.attn(plain.norm1(x))
    expected = middle + 2 * plain.mlp(plain.norm2(middle))
    torch.testing.assert_close(scaled(x), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "chosen",
    [
        *({"attention": kind} for kind in get_args(AttentionKind)),
        {"contranorm_scale": 0.1},
        {"feat_scale": True, "init_values": 0.1},
        {"patch_head": True},
    ],
    ids=str,
)
def test_every_tensor_of_a_network_is_made_on_the_device_and_in_the_type(chosen: dict[str, Any]) -> None:
    model = VisionTransformer(**SMALL, global_pool="avg", device="meta", dtype=torch.float64, **chosen)
    made = {(tensor.device.type, tensor.dtype) for tensor in model.state_dict().values() if tensor.is_floating_point()}
    assert made == {("meta", torch.float64)}


def test_feat_scale_reproduces_the_reference() -> None:
    expected = [0.012778, -1.497059, -2.828836, -2.273512, -0.72228, -0.20156, -0.767081, -0.791714]
    found = scale_frequencies(seq(3, 1, 3, 8), seq(0.2, 8), seq(0.4, 8))[0, 0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_cait_adds_each_part_of_feat_scale_once() -> None:
    """As its authors' code does; DeiT's adds both twice."""
    block: Any = randomize(FeatScaleBlock(8, 2, qkv_bias=True).double()).eval()
    x = seq(3, 2, 5, 8)
    y = block.attn(block.norm1(x))
    mean = y.mean(1, keepdim=True)
    expected = x + block.gamma_1 * (y + block.lamb1 * mean + block.lamb2 * (y - mean))
    expected = expected + block.gamma_2 * block.mlp(block.norm2(expected))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-13)


def test_feat_scale_is_behind_attention_and_begins_without_change() -> None:
    """The authors' steps: what attention gives, its mean and the rest of it each added twice with a factor."""
    scaled: Any = VisionTransformer(**SMALL, feat_scale=True).double().eval()
    plain: Any = VisionTransformer(**SMALL).double().eval()
    plain.load_state_dict({key: value for key, value in scaled.state_dict().items() if "lamb" not in key})
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(scaled(images), plain(images), atol=1e-12, rtol=0)
    first = randomize(scaled).get_submodule("blocks.0")
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    y: Any = first.attn(first.norm1(x))  # type: ignore[operator]
    low = y.mean(-2, keepdim=True) * first.lamb1
    high = (y - y.mean(-2, keepdim=True)) * first.lamb2
    middle = x + ((y + low + high) + low + high)
    torch.testing.assert_close(first(x), middle + first.mlp(first.norm2(middle)), atol=1e-12, rtol=0)  # type: ignore[operator]


def test_contranorm_reproduces_the_reference() -> None:
    norm = ContraNorm(8, scale=0.5, temperature=0.25).double()
    parted = [-0.013438, -0.360406, -0.537869, -0.462364, -0.169402, 0.203232, 0.480283, 0.53145]
    normed = [0.071247, -0.823581, -1.281258, -1.086531, -0.330983, 0.63004, 1.344554, 1.476511]
    x = seq(3, 1, 3, 8)
    for found, expected in ((norm.contrast(x), parted), (norm(x), normed)):
        torch.testing.assert_close(found[0, 0], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_contranorm_is_every_norm_of_its_network_by_its_definition() -> None:
    """Token by token: logits and every gradient; an image does not see the others; s·x is parted like x."""
    model: Any = VisionTransformer(
        **SMALL, contranorm_scale=0.7, contranorm_temperature=0.3, residual_scale=0.5
    ).double()
    assert not [key for key in randomize(model).state_dict() if "contrast" in key]

    def normed(x: Tensor, norm: Any) -> Tensor:
        rows = []
        for token in x:
            alike = [(token @ other / (token.norm() * other.norm()) / 0.3).exp() for other in x]
            mean = sum(weight * other for weight, other in zip(alike, x, strict=True)) / sum(alike)
            rows.append(token - 0.7 * mean)
        return torch.nn.functional.layer_norm(torch.stack(rows), (24,), norm.weight, norm.bias, 1e-6)

    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    logits = []
    for image in images:
        x = torch.cat([model.cls_token[0], model.patch_embed(image[None])[0]]) + model.pos_embed[0]
        for each in model.blocks:
            x = x + 2 * each.attn(normed(x / 2, each.norm1.layernorm)[None])[0]
            x = x + 2 * each.mlp(normed(x / 2, each.norm2.layernorm))
        logits.append(model.head(normed(x, model.norm.layernorm)[0]))
    expected, found = torch.stack(logits), model(images)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad(out.square().sum(), [*model.parameters()]) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contranorm_scale": -0.1}, "contranorm_scale is -0.1: expected a number above 0"),
        ({"contranorm_scale": math.inf}, "contranorm_scale is inf: expected a number above 0"),
        ({"contranorm_temperature": 0.0}, "contranorm_temperature is 0.0: expected a number above 0"),
        ({"contranorm_temperature": math.nan}, "contranorm_temperature is nan: expected a number above 0"),
        ({"fc_norm": True, "global_pool": "avg"}, "contranorm_scale is for norms of tokens: leave out fc_norm, "),
        ({"global_pool": "map"}, "contranorm_scale is for norms of tokens: leave out fc_norm, global_pool=map, "),
        ({"norm_layer": "rmsnorm"}, "contranorm_scale is for norms of tokens: .*, norm_layer"),
    ],
)
def test_a_contranorm_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VisionTransformer(**{**SMALL, "contranorm_scale": 0.2, **options})


def neutreno_by_hand(model: Any, images: Tensor, alpha: float) -> Tensor:
    """Logits of a class token, image by image and head by head, from the definition."""
    x = torch.cat([model.cls_token.expand(len(images), -1, -1), model.patch_embed(images)], dim=1) + model.pos_embed
    first: dict[tuple[int, int], Tensor] = {}
    for index, each in enumerate(model.blocks):
        q, k, v = each.attn.qkv(each.norm1(x)).chunk(3, dim=-1)
        rows = []
        for image in range(len(images)):
            heads = []
            for head in range(3):
                own = slice(8 * head, 8 * head + 8)
                Q, K, V = q[image, :, own], k[image, :, own], v[image, :, own]
                V0 = first.setdefault((image, head), V)
                heads.append((Q @ K.T / 8**0.5).softmax(-1) @ V + (alpha * (V0 - V) if index else 0))
            rows.append(torch.cat(heads, dim=-1))
        x = x + each.attn.proj(torch.stack(rows))
        x = x + each.mlp(each.norm2(x))
    logits: Tensor = model.head(model.norm(x)[:, 0])
    return logits


@pytest.mark.parametrize("checkpointed", [False, True])
def test_neutreno_is_its_definition(checkpointed: bool) -> None:
    """Logits and every gradient, in each way through the blocks; two passes before one backward pass, too."""
    model: Any = randomize(VisionTransformer(**SMALL, attention="neutreno", neutreno_alpha=0.3).double())
    model.set_grad_checkpointing(checkpointed)
    images, others = torch.rand(2, 2, 3, 16, 16, dtype=torch.float64)
    expected, beside = neutreno_by_hand(model, images, 0.3), neutreno_by_hand(model, others, 0.3)
    theirs = torch.autograd.grad((expected * beside).sum(), [*model.parameters()])
    intermediate = model.forward_head(model.forward_intermediates(images)[0])
    ways = {"forward": model(images), "tokens": forward_with_tokens(model, images).logits_BC, "features": intermediate}
    for way, found in ways.items():
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12, msg=way)
        ours = torch.autograd.grad((found * model(others)).sum(), [*model.parameters()])
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    with attention_maps(model):  # by way of the maps
        torch.testing.assert_close(model(images), expected, atol=1e-12, rtol=1e-12)


def test_neutreno_has_a_plain_networks_weights() -> None:
    model: Any = timm.create_model("deit_tiny_neutreno_patch16_224", img_size=32, depth=3)
    plain: Any = timm.create_model("deit_tiny_12", img_size=32, depth=3)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(randomize(model).state_dict())
    images = torch.rand(2, 3, 32, 32)
    assert not torch.allclose(model(images), plain(images))
    assert {each.attn.alpha for each in model.blocks} == {0.6}
    assert [each.attn.first for each in model.blocks] == [True, False, False]
    for each in model.blocks[1:]:
        each.attn.alpha = 0.0
    torch.testing.assert_close(model(images), plain(images))


def test_neutreno_reads_the_first_block_that_has_it() -> None:
    model: Any = VisionTransformer(**SMALL, attention=["plain", "neutreno", "neutreno"]).eval()
    assert [model.blocks[1].attn.first, model.blocks[2].attn.first] == [True, False]
    x = torch.randn(2, 17, 24)
    assert model.blocks[1](x).shape == x.shape, "the first needs no other"
    with pytest.raises(InputError, match="read the values of the first: call the network, not one of its blocks"):
        model.blocks[2](x)
    with pytest.raises(InputError, match="attention masks are not supported"):
        model.forward_features(torch.rand(2, 3, 16, 16), torch.ones(17, 17))
    with pytest.raises(InputError, match="attention masks are not supported"):
        model.forward_intermediates(torch.rand(2, 3, 16, 16), attn_mask=torch.ones(17, 17))


def test_initial_weights_of_a_network_without_memory() -> None:
    """As FSDP builds it: on the meta device, given memory, and initialised."""
    with torch.device("meta"):
        model = VisionTransformer(**SMALL, attention="attn-scale", feat_scale=True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    model.init_weights()
    scales = [parameter for name, parameter in model.named_parameters() if "lamb" in name]
    assert scales
    assert not any(scale.any() for scale in scales)


def test_attention_in_chosen_blocks() -> None:
    model = VisionTransformer(**SMALL, attention=["attn-scale", "talking-heads", "re-attention"])
    assert isinstance(model.blocks[0].attn, AttnScaleAttention)
    assert isinstance(model.blocks[1].attn, TalkingHeadsAttention)
    assert isinstance(model.blocks[2].attn, ReAttention)


@pytest.mark.parametrize("embedding", ["patch", "cnn"])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_heads_and_embeddings(embedding: str, pool: str) -> None:
    options = {"patch_embedding": embedding, "global_pool": pool, "patch_head": True}
    model = VisionTransformer(**{**SMALL, **options}).eval()
    images = torch.rand(2, 3, 16, 16)
    outputs = forward_with_tokens(model, images)
    assert outputs.patch_logits_BnC is not None
    assert outputs.late_BnD.shape == outputs.early_BnD.shape == (2, 16, 24)
    assert outputs.patch_logits_BnC.shape == (2, 16, 5)
    torch.testing.assert_close(outputs.logits_BC, model(images))
    tokens = model.forward_features(images)
    assert tokens.shape[1] == (17 if pool == "token" else 16)
    torch.testing.assert_close(outputs.late_BnD, tokens[:, tokens.shape[1] - 16 :])


@pytest.mark.parametrize("dynamic", [False, True])
def test_tokens_are_those_of_their_places(dynamic: bool) -> None:
    """Before positions are added, after the first of three blocks, and after the last norm."""
    model: Any = randomize(VisionTransformer(**SMALL, patch_head=True, dynamic_img_size=dynamic).double()).eval()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    found = forward_with_tokens(model, images)
    patches = model.patch_embed(images).reshape(2, 16, 24)
    first = torch.cat([model.cls_token.expand(2, -1, -1), patches], dim=1) + model.pos_embed
    x = model.blocks[0](first)
    torch.testing.assert_close(found.embedding_BnD, patches)
    torch.testing.assert_close(found.early_BnD, x[:, 1:])
    last = model.norm(model.blocks[2](model.blocks[1](x)))
    torch.testing.assert_close(found.late_BnD, last[:, 1:])
    torch.testing.assert_close(found.patch_logits_BnC, last[:, 1:] @ model.patch_head.weight.T + model.patch_head.bias)
    torch.testing.assert_close(found.logits_BC, last[:, 0] @ model.head.weight.T + model.head.bias)
    assert forward_with_tokens(model, images, classify_patches=False).patch_logits_BnC is None


@pytest.mark.parametrize("embedding", ["patch", "cnn"])
def test_images_of_another_size(embedding: Any) -> None:
    """A network for any size is the one for a fixed size on that size, and takes wider images too."""
    options: dict[str, Any] = {**SMALL, "patch_embedding": embedding}
    fixed = randomize(VisionTransformer(**options)).eval()
    dynamic = VisionTransformer(**options, dynamic_img_size=True).eval()
    dynamic.load_state_dict(fixed.state_dict())
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(dynamic(images), fixed(images))
    assert dynamic.forward_features(torch.rand(2, 3, 16, 24)).shape == (2, 1 + 4 * 6, 24)


def test_a_patch_may_be_given_as_rows_and_columns() -> None:
    model: Any = VisionTransformer(**{**SMALL, "patch_size": (4, 2)})
    images = torch.rand(2, 3, 16, 16)
    assert model(images).shape == (2, 5)
    assert model.num_tokens == 1 + 4 * 8
    model.set_input_size(patch_size=(2, 4))
    assert model(images).shape == (2, 5)
    assert model.patch_embed.grid_size == (8, 4)
    with pytest.raises(InputError, match=r"^img_size \(16, 16\) is not divisible by patch_size \(4, 3\): change one"):
        model.set_input_size(patch_size=(4, 3))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False, "fc_norm": True}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {"patch_size": 8}),
        ("vit_base_patch16_siglip_224", {}),
    ],
)
def test_timms_networks_give_their_tokens(name: str, kwargs: dict[str, Any]) -> None:
    small: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
    model: Any = randomize(timm.create_model(name, **small, **kwargs)).eval()
    images, seen = torch.rand(2, 3, 32, 32), []
    with model.blocks[0].register_forward_hook(lambda block, given, found: seen.append(found)):
        outputs = forward_with_tokens(model, images)
    prefix = model.num_prefix_tokens
    torch.testing.assert_close(outputs.logits_BC, model(images))
    torch.testing.assert_close(outputs.embedding_BnD, model.patch_embed(images).reshape(2, -1, 24))
    torch.testing.assert_close(outputs.early_BnD, seen[0][:, prefix:])
    torch.testing.assert_close(outputs.late_BnD, model.forward_features(images)[:, prefix:])
    assert outputs.patch_logits_BnC is None


def test_each_rate_reaches_its_layers() -> None:
    rates: dict[str, Any] = {
        "attn_drop_rate": 0.1,
        "proj_drop_rate": 0.2,
        "drop_path_rate": 0.3,
        "drop_rate": 0.4,
        "patch_head": True,
    }
    for kind in ("plain", "talking-heads", "re-attention"):
        model: Any = VisionTransformer(**SMALL, **rates, attention=kind)
        for index, each in enumerate(model.blocks):
            assert (each.attn.attn_drop.p, each.attn.proj_drop.p) == (0.1, 0.2)
            assert (each.mlp.drop1.p, each.mlp.drop2.p) == (0.2, 0.2)
            paths = [getattr(path, "drop_prob", 0.0) for path in (each.drop_path1, each.drop_path2)]
            assert paths == pytest.approx([0.15 * index] * 2)  # 0 in the first of three blocks
        model.train()
        ones = torch.ones(50, 24)
        assert model.head_drop.p == 0.4
        assert model.classify_patches(ones).std(0).max() > 0, "the patch head has the head's dropout"


def test_initial_weights_have_their_spread() -> None:
    options: dict[str, Any] = {**SMALL, "img_size": 64, "embed_dim": 192, "patch_head": True}
    for spread in (0.02, 0.5):
        model: Any = VisionTransformer(**options, position_std=spread)
        assert model.pos_embed.std().item() == pytest.approx(spread, rel=0.05)
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.25)
    assert model.patch_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.patch_head.bias.any()


def test_checkpointing_changes_nothing() -> None:
    model = VisionTransformer(**SMALL, attention="re-attention")
    images = torch.rand(2, 3, 16, 16)
    plain = forward_with_tokens(model.eval(), images).logits_BC
    model.set_grad_checkpointing()
    torch.testing.assert_close(forward_with_tokens(model, images).logits_BC, plain)


def test_reset_classifier_resets_both_heads() -> None:
    model = VisionTransformer(**SMALL, patch_head=True)
    model.reset_classifier(7)
    assert model.patch_head is not None
    assert (model.head.out_features, model.patch_head.out_features) == (7, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": 30}, "img_size 30 is not divisible by patch_size 4"),
        ({"num_heads": 5}, "embed_dim 24 is not divisible by num_heads 5"),
        ({"attention": ["plain"]}, "attention lists 1 blocks but depth is 3"),
        ({"depth": 10**9}, "depth is 1000000000: expected 1 to 1,000 blocks"),
        ({"attention": "talking"}, "unknown attention 'talking'"),
        ({"qk_norm": True}, "qk_norm is not supported by this network"),
        ({"proj_bias": False}, "proj_bias=False is not supported by this network"),
    ],
)
def test_impossible_shapes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VisionTransformer(**{**SMALL, **changes})


def test_token_similarity_reproduces_the_reference() -> None:
    tokens = seq(1.5, 2, 5, 4) + 0.3
    assert token_similarity(tokens).item() == pytest.approx(-0.128733, abs=1e-6)
    assert token_similarity(tokens, absolute=True).item() == pytest.approx(0.693884, abs=1e-6)


def test_token_similarity_equals_the_double_loop() -> None:
    tokens = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def slow(image: Tensor) -> float:
        pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
        return sum(torch.cosine_similarity(image[i], image[j], dim=0).item() for i, j in pairs) / len(pairs)

    assert token_similarity(tokens).item() == pytest.approx(sum(map(slow, tokens)) / 3, abs=1e-12)


def test_attention_std_reproduces_the_reference() -> None:
    maps = seq(0, 2, 3, 4, 4).softmax(-1)
    assert attention_std(maps).item() == pytest.approx(0.134072, abs=1e-6)
    assert maps.std(-1, unbiased=False).mean().item() == pytest.approx(0.116109, abs=1e-6)
    assert math.isclose(maps.sum(-1).mean().item(), 1.0)
