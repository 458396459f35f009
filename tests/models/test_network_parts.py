"""What vision transformers and AlterNets are made of: each argument's place, defaults, refusals, timm's interface."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from reference import randomize, randomize_like_trained
from vitx.core.errors import InputError
from vitx.models import AlterNet, Block, VisionTransformer, alternet, forward_with_tokens, vit
from vitx.models.alternet import AttentionUnit, BasicUnit, BottleneckUnit, attention_sequence
from vitx.models.attention import PlainAttention, ReAttention, TalkingHeadsAttention
from vitx.models.vit import attention_of_blocks

SMALL: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 5,
    "mlp_ratio": 2.0,
}


def network(**options: Any) -> Any:
    return VisionTransformer(**{**SMALL, **options})


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_each_argument_reaches_its_block() -> None:
    model = network(
        attention=["plain", "talking-heads", "re-attention"],
        residual_scale=0.5,
        init_values=0.25,
        reatten_norm="layer",
        reatten_init="identity",
        reatten_scale=0.75,
        talking_heads_bias=True,
        talking_heads_init="identity",
        drop_path_rate=0.2,
        proj_drop_rate=0.3,
        attn_drop_rate=0.4,
        qkv_bias=False,
        drop_rate=0.6,
    )
    assert [type(block.attn) for block in model.blocks] == [PlainAttention, TalkingHeadsAttention, ReAttention]
    for index, block in enumerate(model.blocks):
        assert (block.attn.num_heads, block.residual_scale) == (3, 0.5)
        assert (block.attn.attn_drop.p, block.attn.proj_drop.p, block.mlp.drop1.p) == (0.4, 0.3, 0.3)
        assert block.attn.qkv.bias is None
        assert (block.mlp.fc1.out_features, type(block.mlp.act)) == (48, nn.GELU)
        assert block.norm1.eps == block.norm2.eps == 1e-6
        for scale in (block.ls1, block.ls2):
            assert isinstance(scale, LayerScale)
            assert scale.gamma.tolist() == [0.25] * 24
        for path in (block.drop_path1, block.drop_path2):
            if index == 0:
                assert isinstance(path, nn.Identity)
            else:
                assert isinstance(path, DropPath)
                assert path.drop_prob == pytest.approx(0.1 * index)
    mixed = model.blocks[2].attn
    assert isinstance(mixed.var_norm, nn.LayerNorm)
    assert (mixed.init, mixed.reatten_scale) == ("identity", 0.75)
    assert torch.equal(mixed.reatten_matrix.weight.flatten(1), torch.eye(3))
    assert model.blocks[1].attn.proj_pre.bias is not None
    assert torch.equal(model.blocks[1].attn.proj_pre.weight, torch.eye(3))
    assert model.head_drop.p == 0.6
    plain = network()
    for block in plain.blocks:
        assert isinstance(block.ls1, nn.Identity)
        assert isinstance(block.ls2, nn.Identity)
        assert isinstance(block.drop_path2, nn.Identity)
        assert block.attn.qkv.bias is not None


def test_the_defaults_are_those_of_vit_b16() -> None:
    model: Any = VisionTransformer(device="meta")
    assert model.patch_embed.img_size == (224, 224)
    assert model.patch_embed.patch_size == (16, 16)
    assert (len(model.blocks), model.embed_dim, model.num_classes) == (12, 768, 1000)
    assert {(block.attn.num_heads, block.mlp.fc1.out_features, block.residual_scale) for block in model.blocks} == {
        (12, 3072, 1.0)
    }
    assert (model.cls_token.shape, model.pos_embed.shape, model.num_tokens) == ((1, 1, 768), (1, 197, 768), 197)
    assert model.patch_head is None
    block = Block(12, 3, attention=["plain"], attention_options={}, depth=0)
    assert (block.mlp.fc1.out_features, block.residual_scale) == (48, 1.0)
    assert isinstance(block.norm1, nn.LayerNorm)
    mixed = network(attention="re-attention").blocks[0].attn
    assert (mixed.norm, mixed.init, mixed.reatten_scale) == ("batch", "random", 1.0)
    assert network(attention="talking-heads").blocks[0].attn.proj_pre.bias is None


@pytest.mark.parametrize(
    ("pool", "given", "tokens", "fc_norm"),
    [("token", None, 5, False), ("avg", None, 4, True), ("avg", True, 5, False), ("token", True, 5, False)],
)
def test_the_class_token_and_the_pool(pool: str, given: bool | None, tokens: int, fc_norm: bool) -> None:
    model = network(global_pool=pool, class_token=given, fc_norm=fc_norm)
    assert model.global_pool == pool
    assert model.num_tokens == model.pos_embed.shape[1] == tokens
    assert isinstance(model.fc_norm, nn.LayerNorm) is fc_norm
    assert isinstance(model.norm, nn.LayerNorm) is not fc_norm
    assert network(norm_layer=partial(nn.LayerNorm, eps=0.5)).norm.eps == 0.5


def test_how_a_network_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[tuple[int, ...], float]] = []
    draw = nn.init.trunc_normal_

    def recorded(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *more: Any, **named: Any) -> Tensor:
        drawn.append((tuple(tensor.shape), std))
        return draw(tensor, mean, std, *more, **named)

    monkeypatch.setattr(nn.init, "trunc_normal_", recorded)
    model = network(position_std=0.5, patch_head=True, embed_dim=240)
    assert drawn.count(((1, 1, 240), 0.02)) == 1, "the class token"
    assert drawn.count(((1, 5, 240), 0.5)) == 1, "positions"
    assert drawn.count(((5, 240), 0.02)) == 1, "the patch head"
    assert model.pos_embed.std().item() == pytest.approx(0.5, rel=0.1)
    assert model.patch_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.patch_head.bias.any()
    drawn.clear()
    assert network(embed_dim=240).pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert ((1, 5, 240), 0.02) not in drawn, "timm's own draw is kept"
    assert network(global_pool="avg").cls_token is None
    assert network(pos_embed="none", position_std=0.5).pos_embed is None
    skipped = network(weight_init="skip")
    assert len({network(weight_init=mode).head.bias[0].item() for mode in ("jax", "jax_nlhb")}) == 2
    assert skipped.cls_token is not None


def test_timm_is_told_how_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = network(), list[Any]()
    model.cls_token.data.zero_()
    monkeypatch.setattr(TimmVisionTransformer, "init_weights", lambda _, *given: asked.append(given))
    model.init_weights("jax", False)
    model.init_weights()
    assert asked == [("jax", False), ("", True)]
    assert model.cls_token.all()


def test_attention_is_one_kind_or_one_a_block() -> None:
    assert attention_of_blocks("plain", 2) == ["plain", "plain"]
    assert attention_of_blocks(("re-attention", "plain"), 2) == ["re-attention", "plain"]
    with pytest.raises(InputError, match=r"^unknown attention 're-atention': did you mean re-attention"):
        attention_of_blocks(["plain", "re-atention"], 2)  # type: ignore[list-item]
    with pytest.raises(InputError) as refused:
        attention_of_blocks(["plain"], 2)
    assert str(refused.value) == "attention lists 1 blocks but depth is 2: give one kind a block"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 30}, "img_size 30 is not divisible by patch_size 4: change one of them"),
        ({"img_size": (8, 30)}, "img_size (8, 30) is not divisible by patch_size 4: change one of them"),
        ({"img_size": (30, 8)}, "img_size (30, 8) is not divisible by patch_size 4: change one of them"),
        ({"num_heads": 5}, "embed_dim 24 is not divisible by num_heads 5: change one of them"),
        ({"qk_norm": True}, "qk_norm is not supported by this network: leave it out"),
        (
            {"qk_norm": True, "proj_bias": False},
            "qk_norm, proj_bias=False is not supported by this network: leave it out",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        network(**options)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (VisionTransformer, r"^VisionTransformer\.__init__\(\) got an unexpected keyword argument 'bias'$"),
        (AlterNet, r"^unexpected kwargs \{'bias'\}$"),
    ],
)
def test_an_argument_that_nobody_knows_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(bias=True, device="meta")


def test_what_a_block_does_not_know_may_ask_for_nothing() -> None:
    """timm passes every option of its own blocks; a later release may have more."""
    given: dict[str, Any] = {"attention": ["plain"], "attention_options": {}, "depth": 0}
    assert isinstance(Block(12, 3, **given, another=False, attn_layer="attn").attn, PlainAttention)
    with pytest.raises(InputError, match=r"^another is not supported by this network: leave it out$"):
        Block(12, 3, **given, another=True)
    for layer in ("diff", nn.Identity):
        with pytest.raises(InputError, match=r"^attn_layer .* is timm's choice of attention.*: give attention$"):
            VisionTransformer(img_size=32, embed_dim=12, depth=1, num_heads=3, attn_layer=layer)


def test_a_block_takes_no_mask() -> None:
    block = network().blocks[0]
    x = torch.zeros(1, 5, 24)
    for given in ({"attn_mask": x}, {"is_causal": True}):
        with pytest.raises(InputError, match=r"^attention masks are not supported: images have none$"):
            block(x, **given)


@pytest.mark.parametrize(("branch", "scale"), [("attn", 1.0), ("attn", 0.5), ("mlp", 1.0), ("mlp", 0.5)])
def test_drop_path_and_layer_scale_are_of_each_branch(branch: str, scale: float) -> None:
    """All paths dropped, or a γ of zero, leave what the other branch adds."""
    for dropped in (True, False):
        block: Any = randomize(network(residual_scale=scale, init_values=0.3, drop_path_rate=0.5).double().blocks[2])
        one, other = (1, 2) if branch == "attn" else (2, 1)
        if dropped:
            getattr(block, f"drop_path{one}").drop_prob = 1.0
            setattr(block, f"drop_path{other}", nn.Identity())
            block.train()
        else:
            getattr(block, f"ls{one}").gamma.data.zero_()
            block.eval()
        x = double(2, 5, 24)
        layer = block.mlp if branch == "attn" else block.attn
        expected = x + getattr(block, f"ls{other}")(layer(getattr(block, f"norm{other}")(scale * x))) / scale
        torch.testing.assert_close(block(x), expected, atol=1e-12, rtol=0)


def test_another_classifier() -> None:
    model = network(patch_head=True).double()
    model.reset_classifier(7, "avg")
    assert (model.num_classes, model.global_pool) == (7, "avg")
    assert (model.head.weight.shape, model.patch_head.weight.shape) == ((7, 24), (7, 24))
    assert model.patch_head.weight.dtype == torch.float64
    plain = network()
    plain.reset_classifier(7)
    assert plain.patch_head is None
    assert network(device="meta", patch_head=True).patch_head.weight.shape == (5, 24)


def test_every_tensor_is_made_on_the_device_and_in_the_type() -> None:
    options = {"init_values": 0.1, "dtype": torch.float64}
    for parameter in network(**options).parameters():
        assert parameter.dtype == torch.float64
    on_meta = network(init_values=0.1, patch_head=False, device="meta")
    on_meta.patch_head = nn.Linear(24, 5, device="meta")
    on_meta.reset_classifier(7)
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}


def test_another_size_moves_the_means() -> None:
    model = network(attention="re-attention", dynamic_img_size=False).double()
    attention = model.blocks[0].attn
    closed = attention.reatten_matrix.weight.flatten(1).sum(1)
    for size, patch, tokens in ((16, None, 17), ((8, 16), None, 9), (None, 8, 3)):
        model.set_input_size(size, patch)
        assert model.num_tokens == model.pos_embed.shape[1] == tokens
        expected = closed / tokens + attention.reatten_matrix.bias
        torch.testing.assert_close(attention.var_norm.running_mean, expected.detach())
    kept = torch.full_like(attention.var_norm.running_mean, 9.0)
    attention.var_norm.running_mean.copy_(kept)
    model.set_input_size((8, 16))
    assert torch.equal(attention.var_norm.running_mean, kept), "as many tokens as before: trained means stay"
    for given in ((20, None), (None, 5)):
        with pytest.raises(InputError, match=r"is not divisible by patch_size"):
            model.set_input_size(*given)


def test_checkpointed_blocks_give_the_same_tokens_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = randomize_like_trained(network(patch_head=True)).double()
    images = double(2, 3, 8, 8)
    called: list[Any] = []
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        vit,
        "checkpoint",
        lambda block, x, **named: called.append((block, named)) or checkpoint(block, x, **named),  # type: ignore[func-returns-value]
    )
    found = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        tokens = forward_with_tokens(model, images)
        tokens.logits_BC.sum().backward()
        found.append((tokens, model.patch_embed.proj.weight.grad.clone()))
        assert [block for block, _ in called] == (list(model.blocks) if enabled else [])
    assert all(named == {"use_reentrant": False} for _, named in called)
    for first, second in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(first, second)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_the_tokens_of_a_pass() -> None:
    model: Any = randomize_like_trained(network(patch_head=True, reg_tokens=2, pre_norm=True)).double().eval()
    images = double(2, 3, 8, 8)
    tokens = forward_with_tokens(model, images)
    embedding = model.patch_embed(images)
    x = model.norm_pre(model._pos_embed(embedding))
    first = model.blocks[0](x)
    late = model.norm(model.blocks[2](model.blocks[1](first)))
    torch.testing.assert_close(tokens.embedding_BnD, embedding)
    torch.testing.assert_close(tokens.early_BnD, first[:, 3:])
    torch.testing.assert_close(tokens.late_BnD, late[:, 3:])
    torch.testing.assert_close(tokens.patch_logits_BnC, model.patch_head(late[:, 3:]))
    torch.testing.assert_close(tokens.logits_BC, model(images))
    assert forward_with_tokens(model, images, classify_patches=False).patch_logits_BnC is None
    assert forward_with_tokens(network(), images.float()).patch_logits_BnC is None
    with pytest.raises(AssertionError, match="built without patch_head=True"):
        network().classify_patches(tokens.late_BnD)
    dropping = network(patch_head=True, drop_rate=1.0 - 1e-9).train()
    assert torch.equal(dropping.classify_patches(torch.ones(4, 24)), dropping.patch_head.bias.expand(4, 5))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """AlterNets of 4 to 32 channels, and the options of one with attention in the last two stages."""
    monkeypatch.setattr(alternet, "STEM_WIDTH", 4)
    monkeypatch.setattr(alternet, "STAGE_WIDTHS", (4, 8, 16, 32))
    return {
        "depths": (1, 2, 2, 3),
        "attention_depths": (0, 0, 1, 1),
        "num_heads": (1, 2, 3, 4),
        "head_dim": 4,
        "window_size": 2,
        "num_classes": 5,
    }


KINDS = [[False], [False, False], [False, True], [False, False, True]]


@pytest.mark.parametrize(("unit", "expansion"), [("basic", 1), ("bottleneck", 4)])
def test_the_units_of_an_alternet(narrow: dict[str, Any], unit: Any, expansion: int) -> None:
    model: Any = AlterNet(**narrow, unit=unit, drop_path_rate=0.7, drop_rate=0.25)
    dim, number = 4, 0
    units: Any
    one: Any
    for stage, (units, kinds, width) in enumerate(zip(model.stages, KINDS, (4, 8, 16, 32), strict=True)):
        assert len(units) == len(kinds)
        for position, (one, is_attention) in enumerate(zip(units, kinds, strict=True)):
            strided = stage > 0 and position == 0
            out = width * expansion
            assert type(one) is (AttentionUnit if is_attention else BasicUnit if unit == "basic" else BottleneckUnit)
            assert one.norm.num_features == dim
            assert (one.shortcut is None) is (dim == out and not strided)
            if one.shortcut is not None:
                assert one.shortcut.weight.shape == (out, dim, 1, 1)
                assert (one.shortcut.stride, one.shortcut.bias) == ((2, 2) if strided else (1, 1), None)  # type: ignore[comparison-overlap]
            rate = 0.7 * number / 7
            assert isinstance(one.drop_path, nn.Identity if number == 0 else DropPath)
            assert number == 0 or one.drop_path.drop_prob == pytest.approx(rate)
            if is_attention:
                assert isinstance(one.activation, nn.GELU)
                assert (one.conv.weight.shape, one.conv.bias) == ((out // expansion, out, 1, 1), None)  # type: ignore[union-attr]
                assert one.inner_norm.num_features == out // expansion  # type: ignore[union-attr]
                attention = one.attn
                assert (attention.num_heads, attention.head_dim, attention.window_size) == (stage + 1, 4, 2)  # type: ignore[union-attr]
                assert (attention.qkv.in_channels, attention.proj.out_channels) == (out // expansion, out)  # type: ignore[union-attr]
            else:
                assert isinstance(one.activation, nn.ReLU)
                strides = (
                    [(one.conv1, 2 if strided else 1)] if unit == "basic" else [(one.conv2[2], 2 if strided else 1)]  # type: ignore[index]
                )
                assert all(layer.stride == (stride, stride) for layer, stride in strides)
            dim, number = out, number + 1
    assert (model.num_features, model.head_hidden_size, model.norm.num_features) == (dim, dim, dim)
    assert (model.head.weight.shape, model.head_drop.p, model.drop_rate) == ((5, dim), 0.25, 0.25)
    assert (model.num_classes, model.in_chans, model.grad_checkpointing) == (5, 3, False)
    assert model.feature_info == [
        {"module": f"stages.{i}", "num_chs": width * expansion, "reduction": 4 * 2**i}
        for i, width in enumerate((4, 8, 16, 32))
    ]


def test_the_stems(narrow: dict[str, Any]) -> None:
    images = double(2, 3, 16, 16)
    large: Any = randomize(AlterNet(**narrow).double()).eval()
    weight = large.stem[0].weight
    assert weight.shape == (4, 3, 7, 7)
    expected = F.max_pool2d(F.conv2d(images, weight, None, 2, 3), 3, 2, 1)
    torch.testing.assert_close(large.stem(images), expected)
    small: Any = randomize(AlterNet(**narrow, stem="cifar", in_chans=1).double()).eval()
    assert small.stem[0].weight.shape == (4, 1, 3, 3)
    torch.testing.assert_close(small.stem(images[:, :1]), F.conv2d(images[:, :1], small.stem[0].weight, None, 1, 1))
    assert [info["reduction"] for info in small.feature_info] == [1, 2, 4, 8]
    assert large.stem[0].bias is None is small.stem[0].bias
    assert small.in_chans == 1


def test_a_pass_and_its_intermediates(narrow: dict[str, Any]) -> None:
    model: Any = randomize_like_trained(AlterNet(**narrow, stem="cifar", unit="basic")).double().eval()
    images = double(2, 3, 16, 16)
    x, outputs = model.stem(images), []
    for stage in model.stages:
        x = stage(x)
        outputs.append(x)
    normed = model.norm(x).clamp_min(0)
    assert [tuple(each.shape[1:]) for each in outputs] == [(4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2)]
    torch.testing.assert_close(model.forward_features(images), normed)
    pooled = normed.mean((2, 3))
    torch.testing.assert_close(model.forward_head(normed, pre_logits=True), pooled)
    torch.testing.assert_close(model(images), model.head(pooled))
    final, found = model.forward_intermediates(images)
    torch.testing.assert_close(final, normed)
    torch.testing.assert_close(found, outputs)
    _, chosen = model.forward_intermediates(images, indices=[1, 3], norm=True)
    torch.testing.assert_close(chosen, [outputs[1], normed])
    last = model.forward_intermediates(images, indices=2, intermediates_only=True)
    torch.testing.assert_close(last, outputs[2:])
    model.stages[2].register_forward_hook(lambda *_: pytest.fail("stopped before"))
    early = model.forward_intermediates(images, indices=[0, 1], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early, outputs[:2])
    with pytest.raises(InputError) as refused:
        model.forward_intermediates(images, output_fmt="NLC")
    assert str(refused.value) == "output_fmt 'NLC' of an AlterNet: only NCHW"


def test_stages_are_checkpointed_in_training_alone(narrow: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AlterNet(**narrow, stem="cifar")
    ran: list[Any] = []
    monkeypatch.setattr(alternet, "checkpoint_seq", lambda stage, x: ran.append(stage) or stage(x))  # type: ignore[func-returns-value]
    images = torch.randn(2, 3, 16, 16)
    for enabled, training, expected in ((False, True, 0), (True, False, 0), (True, True, 4)):
        model.train(training).set_grad_checkpointing(enabled)
        ran.clear()
        model(images)
        assert len(ran) == expected
    model.set_grad_checkpointing()
    assert model.grad_checkpointing is True


def test_the_classifier_of_an_alternet(narrow: dict[str, Any]) -> None:
    model: Any = AlterNet(**narrow, dtype=torch.float64, drop_rate=1.0 - 1e-9)
    for parameter in model.parameters():
        assert parameter.dtype == torch.float64
    assert model.get_classifier() is model.head
    model.train()
    assert torch.equal(model.forward_head(double(2, 128, 2, 2)), model.head.bias.expand(2, 5))
    model.reset_classifier(7)
    assert (model.num_classes, model.head.weight.shape, model.head.weight.dtype) == (7, (7, 128), torch.float64)
    model.reset_classifier(0, "avg")
    assert isinstance(model.head, nn.Identity)
    assert isinstance(AlterNet(**{**narrow, "num_classes": 0}).head, nn.Identity)
    with pytest.raises(InputError) as refused:
        model.reset_classifier(7, "max")
    assert str(refused.value) == "global_pool 'max' of an AlterNet: only avg"
    on_meta: Any = AlterNet(**narrow, device="meta")
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}
    on_meta.reset_classifier(2)
    assert on_meta.head.weight.device.type == "meta"


def test_timms_groups_of_an_alternet(narrow: dict[str, Any]) -> None:
    model = AlterNet(**narrow)
    tables = {"stages.2.1.attn.relative_position", "stages.3.2.attn.relative_position"}
    assert model.no_weight_decay() == tables
    fine, coarse = model.group_matcher(), model.group_matcher(coarse=True)
    assert fine == {"stem": r"^stem", "blocks": [(r"^stages\.(\d+)\.(\d+)", None), (r"^norm", (99999,))]}
    assert coarse == {"stem": r"^stem", "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))]}


def test_the_defaults_are_those_of_alternet_50() -> None:
    model: Any = AlterNet(device="meta")
    kinds = [[isinstance(unit, AttentionUnit) for unit in stage] for stage in model.stages]
    assert kinds == [attention_sequence(*each) for each in ((3, 0), (4, 1), (6, 3), (4, 2))]
    heads = [{u.attn.num_heads for u in stage if isinstance(u, AttentionUnit)} for stage in model.stages]
    assert heads == [set(), {6}, {12}, {24}]
    last = model.stages[3][1].attn
    assert (last.head_dim, last.window_size) == (64, 7)
    assert (model.num_features, model.num_classes, model.in_chans) == (2048, 1000, 3)
    assert (model.stem[0].weight.shape, model.head_drop.p) == ((64, 3, 7, 7), 0)
    with torch.device("meta"):
        assert len(AlterNet(drop_path_rate=0.1).stages) == 4, "rates are numbers where no tensor has a value"
    first: Any = AlterNet(device="meta", attention_depths=(1, 1, 1, 1))
    assert first.stages[0][2].attn.num_heads == 3
    assert isinstance(model.stages[0][0], BottleneckUnit)


@pytest.mark.parametrize(
    ("depths", "attention", "message"),
    [
        ((2, 2, 2), (0, 0, 0, 0), "depths (2, 2, 2) and attention_depths (0, 0, 0, 0): four stages each"),
        ((2, 2, 2, 2), (0, 0, 0), "depths (2, 2, 2, 2) and attention_depths (0, 0, 0): four stages each"),
        (
            (2, 2, 3, 2),
            (0, 1, 2, 0),
            "stage 2 has 3 units and 2 of attention: at most every second can be, so change depths or attention_depths",
        ),
    ],
)
def test_impossible_depths_are_refused(depths: Any, attention: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        AlterNet(depths=depths, attention_depths=attention, device="meta")
    assert str(refused.value) == message
