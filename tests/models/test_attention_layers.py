"""The layers of attention by value: what each is made of, formulas in float64, and the path that writes no maps.

The kernels themselves need a GPU or an interpreter (flash/); here the plain path stands in for them.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import randomize_like_trained
from vitx.core.errors import InputError
from vitx.models import PlainAttention, ReAttention, TalkingHeadsAttention, VisionTransformer, attention, fold_head_mix
from vitx.models.attention import FlashWeights, HeadMixAttention, reattention_impl
from vitx.models.flash.reattention import Mixes, plain_reattention


def double(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_weights(layer: Any, seed: int = 0) -> Any:
    """float64, every parameter and statistic of its own."""
    generator = torch.Generator().manual_seed(seed)
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        for name, buffer in layer.named_buffers():
            if buffer.is_floating_point():
                values = torch.randn(buffer.shape, dtype=torch.float64, generator=generator)
                buffer.copy_(values.abs() + 0.5 if "var" in name else values)
    return layer


def by_hand(layer: Any, x: Tensor, mix: Any, before: Any = lambda scores: scores, scale: float = 1.0) -> Tensor:
    """One image and one head at a time; `before` and `mix` take a list of matrices, one a head."""
    H, K = layer.num_heads, layer.head_dim
    out = []
    for tokens in x:
        qkv = tokens @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
        q, k, v = ([qkv[:, part * H * K + h * K : part * H * K + (h + 1) * K] for h in range(H)] for part in range(3))
        scores = before([q[h] @ k[h].T / K**0.5 for h in range(H)])
        maps = mix([torch.softmax(score, dim=-1) for score in scores])
        heads = [scale * maps[h] @ v[h] for h in range(H)]
        out.append(torch.cat(heads, dim=1) @ layer.proj.weight.T + layer.proj.bias)
    return torch.stack(out)


def linear(weight: Tensor, bias: Tensor | None) -> Any:
    def mix(maps: list[Tensor]) -> list[Tensor]:
        rows = [sum(weight[h, g] * maps[g] for g in range(len(maps))) for h in range(len(maps))]
        return [row if bias is None else row + bias[h] for h, row in enumerate(rows)]  # type: ignore[misc]

    return mix


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_plain_attention_by_hand(qkv_bias: bool, fused: bool) -> None:
    layer = random_weights(PlainAttention(12, 3, qkv_bias=qkv_bias, attn_drop=0.5, proj_drop=0.5)).eval()
    assert layer.fused_attn is True
    assert (layer.qkv.bias is None) is not qkv_bias
    layer.fused_attn = fused
    x = double((2, 5, 12))
    torch.testing.assert_close(layer(x), by_hand(layer, x, lambda maps: maps), atol=1e-10, rtol=0)


@pytest.mark.parametrize("mix_bias", [True, False])
def test_talking_heads_by_hand(mix_bias: bool) -> None:
    layer = random_weights(TalkingHeadsAttention(12, 3, mix_bias=mix_bias, attn_drop=0.5, proj_drop=0.5)).eval()
    x = double((2, 5, 12))
    before, after = (linear(mix.weight, mix.bias) for mix in (layer.proj_pre, layer.proj_post))
    torch.testing.assert_close(layer(x), by_hand(layer, x, after, before), atol=1e-10, rtol=0)
    assert layer.mixes_linearly()
    pre, post = layer.proj_pre, layer.proj_post
    assert layer.linear_mixes() == Mixes(post.weight, post.bias, pre.weight, pre.bias)


def test_re_attention_with_a_layer_norm_over_heads_by_hand() -> None:
    layer = random_weights(ReAttention(12, 3, norm="layer", reatten_scale=0.25, attn_drop=0.5, proj_drop=0.5)).eval()
    mixed = linear(layer.reatten_matrix.weight[:, :, 0, 0], layer.reatten_matrix.bias)

    def mix(maps: list[Tensor]) -> list[Tensor]:
        stacked = torch.stack(mixed(maps))  # (H, N, N)
        mean, var = stacked.mean(0), stacked.var(0, unbiased=False)
        normed = (stacked - mean) / torch.sqrt(var + 1e-5)
        return [normed[h] * layer.var_norm.weight[h] + layer.var_norm.bias[h] for h in range(3)]

    x = double((2, 5, 12))
    torch.testing.assert_close(layer(x), by_hand(layer, x, mix, scale=0.25), atol=1e-10, rtol=0)
    for training in (True, False):
        layer.train(training)
        assert not layer.mixes_linearly()
        assert layer.linear_mixes() is None


def test_which_mixes_are_linear() -> None:
    plain, batch, none = PlainAttention(6, 2), ReAttention(6, 2), ReAttention(6, 2, norm="none")
    for training in (True, False):
        for layer in (plain, batch, none):
            layer.train(training)
        assert (plain.mixes_linearly(), plain.linear_mixes()) == (False, None)
        assert none.mixes_linearly()
        assert batch.mixes_linearly() is not training
        assert (batch.linear_mixes() is None) is training
    batch.var_norm.train()  # as when its statistics are measured again
    assert not batch.mixes_linearly()
    for found, expected in zip(none.linear_mixes() or (), (*none.head_mix(), None, None), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)  # type: ignore[arg-type]


def test_the_fold_has_the_scale_and_no_gradient() -> None:
    layer = random_weights(ReAttention(12, 3, reatten_scale=0.25)).eval()
    norm, matrix = layer.var_norm, layer.reatten_matrix
    s = norm.weight / torch.sqrt(norm.running_var + 1e-5)
    weight, bias = fold_head_mix(layer)
    torch.testing.assert_close(weight, 0.25 * s[:, None] * matrix.weight[:, :, 0, 0], atol=1e-12, rtol=0)
    torch.testing.assert_close(bias, 0.25 * (s * (matrix.bias - norm.running_mean) + norm.bias), atol=1e-12, rtol=0)
    assert not weight.requires_grad
    assert not bias.requires_grad
    assert all(part.requires_grad for part in layer.head_mix())
    x = double((2, 5, 12))
    torch.testing.assert_close(layer(x), by_hand(layer, x, linear(weight, bias)), atol=1e-10, rtol=0)


MIXED: list[Any] = [
    lambda **more: ReAttention(10, 2, **more),
    lambda **more: ReAttention(10, 2, norm="layer", **more),
    lambda **more: TalkingHeadsAttention(10, 2, mix_bias=True, **more),
    lambda **more: PlainAttention(10, 2, **more),
]


@pytest.mark.parametrize("make", MIXED)
def test_every_tensor_is_made_on_the_device_and_in_the_type(make: Any) -> None:
    for parameter in make(dtype=torch.float64).parameters():
        assert parameter.dtype == torch.float64
    on_meta = make(device="meta")
    for tensor in (*on_meta.parameters(), *on_meta.buffers()):
        assert tensor.device.type == "meta"


@pytest.mark.parametrize("make", MIXED)
def test_the_parts_of_a_layer(make: Any) -> None:
    layer = make(attn_drop=0.25, proj_drop=0.5)
    assert (layer.attn_drop.p, layer.proj_drop.p) == (0.25, 0.5)
    assert (layer.num_heads, layer.head_dim, layer.scale) == (2, 5, 5**-0.5)
    assert (layer.qkv.weight.shape, layer.qkv.bias.shape) == ((30, 10), (30,))
    assert (layer.proj.weight.shape, layer.proj.bias.shape) == ((10, 10), (10,))
    assert make(qkv_bias=False).qkv.bias is None
    assert (make().attn_drop.p, make().proj_drop.p) == (0, 0)
    assert make().value_scale == 1.0


def test_the_parts_of_the_mixes() -> None:
    assert isinstance(ReAttention(6, 2).var_norm, nn.BatchNorm2d)
    assert isinstance(ReAttention(6, 2, norm="layer").var_norm, nn.LayerNorm)
    assert isinstance(ReAttention(6, 2, norm="none").var_norm, nn.Identity)
    assert ReAttention(6, 2, norm="layer").var_norm.weight.shape == (2,)
    assert ReAttention(6, 2).reatten_matrix.weight.shape == (2, 2, 1, 1)
    assert TalkingHeadsAttention(6, 2).proj_pre.bias is None is TalkingHeadsAttention(6, 2).proj_post.bias
    scaled = ReAttention(6, 2, norm="layer", reatten_scale=0.5)
    assert (scaled.value_scale, scaled.reatten_scale, scaled.norm, scaled.init) == (0.5, 0.5, "layer", "random")
    assert repr(scaled).splitlines()[1].strip() == "num_heads=2, norm='layer', reatten_scale=0.5"
    with pytest.raises(InputError) as refused:
        ReAttention(6, 2, norm="group")  # type: ignore[arg-type]
    assert str(refused.value) == "norm 'group' of Re-Attention: expected batch, layer or none"
    with pytest.raises(InputError) as refused:
        PlainAttention(10, 3)
    assert str(refused.value) == "dim 10 is not divisible by num_heads 3: change embed_dim or num_heads"


def test_how_the_mixes_begin() -> None:
    re_attention = random_weights(ReAttention(8, 4, init="identity"))
    re_attention.init_weights()
    assert torch.equal(re_attention.reatten_matrix.weight.flatten(1), torch.eye(4, dtype=torch.float64))
    assert not re_attention.reatten_matrix.bias.any()
    kept = random_weights(ReAttention(8, 4))
    before = kept.reatten_matrix.weight.clone()
    kept.init_weights()
    assert torch.equal(kept.reatten_matrix.weight, before)
    talking = random_weights(TalkingHeadsAttention(8, 4, mix_bias=True, init="identity"))
    talking.init_weights()
    for mix in (talking.proj_pre, talking.proj_post):
        assert torch.equal(mix.weight, torch.eye(4, dtype=torch.float64))
        assert not mix.bias.any()
    drawn = random_weights(TalkingHeadsAttention(128, 128, mix_bias=True))
    drawn.init_weights()
    for mix in (drawn.proj_pre, drawn.proj_post):
        assert mix.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(mix.weight.mean()) < 1e-3
        assert not mix.bias.any()


@pytest.mark.parametrize("make", MIXED)
def test_dropout_is_that_of_training(make: Any) -> None:
    """All dropped: no map is left, so heads are what the mix adds to zeros; no output is left."""
    x = double((2, 5, 10))
    layer = random_weights(make(proj_drop=1.0)).train()
    assert not layer(x).any()
    assert layer.eval()(x).all()
    layer = random_weights(make(attn_drop=1.0)).train()
    _, _, v = layer.split_heads(layer.qkv(x))
    mixed = layer.after_softmax(torch.zeros(2, 2, 5, 5, dtype=torch.float64)) @ v
    expected = layer.proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)
    if isinstance(layer, PlainAttention):
        assert torch.equal(layer(x), layer.proj.bias.expand(2, 5, 10))


def test_queries_keys_and_values_are_timms() -> None:
    layer = PlainAttention(12, 3)
    qkv = torch.arange(2 * 5 * 36).view(2, 5, 36)
    found = layer.split_heads(qkv)
    assert found.shape == (3, 2, 3, 5, 4)
    for part, image, head, token, channel in ((0, 0, 0, 0, 0), (1, 0, 2, 3, 1), (2, 1, 1, 4, 3)):
        assert found[part, image, head, token, channel] == qkv[image, token, part * 12 + head * 4 + channel]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plain path in the kernels' place, on a CPU; what it is called with, and what is asked before."""
    calls: dict[str, list[Any]] = {"ran": [], "asked": [], "warned": []}
    calls["reason"] = [None]

    def ran(q: Tensor, k: Tensor, v: Tensor, mixes: Mixes, scale: float) -> Tensor:
        calls["ran"].append((q, k, v, mixes, scale))
        wide = Mixes(*(None if part is None else part.double() for part in mixes))  # type: ignore[arg-type]
        return plain_reattention(q, k, v, wide, scale)

    def why_not(*arguments: Any) -> str | None:
        calls["asked"].append(arguments)
        reason: str | None = calls["reason"][0]
        return reason

    monkeypatch.setattr(attention, "INTERPRETED", True)
    monkeypatch.setattr(attention, "why_not_flash", why_not)
    monkeypatch.setattr(attention, "flash_reattention", ran)
    monkeypatch.setattr(attention, "warn_plain", lambda *arguments: calls["warned"].append(arguments))
    return calls


LINEAR: list[Any] = [
    lambda width, **more: ReAttention(3 * width, 3, reatten_scale=0.25, **more),
    lambda width, **more: ReAttention(3 * width, 3, norm="none", **more),
    lambda width, **more: TalkingHeadsAttention(3 * width, 3, mix_bias=True, **more),
    lambda width, **more: TalkingHeadsAttention(3 * width, 3, **more),
]


@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("make", LINEAR)
def test_the_path_without_maps_equals_the_one_with_them(make: Any, qkv_bias: bool, width: int, kernels: Any) -> None:
    layer = random_weights(make(width, qkv_bias=qkv_bias, proj_drop=0.5)).eval()
    x = double((2, 5, 3 * width))
    found = layer(x)
    ((q, k, v, mixes, scale),) = kernels["ran"]
    assert (scale, q.shape) == (width**-0.5, (2, 3, 5, 8))
    for part in (q, k, v):
        assert not part[..., width:].any()
    assert all(part is None or (part.dtype == torch.float32 and part.is_contiguous()) for part in mixes)
    layer.fused_attn = False
    torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-5)
    assert len(kernels["ran"]) == 1
    layer.train()
    layer.fused_attn, layer.proj_drop.p = True, 1.0
    assert layer.mixes_linearly() is not isinstance(getattr(layer, "var_norm", None), nn.BatchNorm2d)
    assert not layer(x).any()


@pytest.mark.parametrize("width", [8, 6])
def test_the_weights_of_the_path_without_maps(width: int) -> None:
    layer = random_weights(TalkingHeadsAttention(2 * width, 2, mix_bias=True)).eval()
    layer.value_scale = 0.5
    found: FlashWeights = layer._flash_weights()
    assert found.qkv_bias is not None
    torch.testing.assert_close(found.mixes.weight, 0.5 * layer.proj_post.weight.float())
    torch.testing.assert_close(found.mixes.bias, 0.5 * layer.proj_post.bias.float())
    torch.testing.assert_close(found.mixes.before_weight, layer.proj_pre.weight.float())
    torch.testing.assert_close(found.mixes.before_bias, layer.proj_pre.bias.float())
    assert (found.qkv.shape, found.qkv_bias.shape, found.proj.shape) == ((48, 2 * width), (48,), (2 * width, 16))
    columns = [8 * head + channel for head in range(6) for channel in range(width)]
    assert torch.equal(found.qkv[columns], layer.qkv.weight)
    assert torch.equal(found.qkv_bias[columns], layer.qkv.bias)
    assert torch.equal(found.proj[:, columns[: 2 * width]], layer.proj.weight)
    padding = sorted(set(range(48)) - set(columns))
    assert not found.qkv[padding].any()
    assert not found.qkv_bias[padding].any()
    assert not found.proj[:, [place for place in padding if place < 16]].any()


def test_when_the_kernels_run(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_weights(ReAttention(6, 2, norm="none", attn_drop=0.5)).eval()
    x = double((1, 4, 6))

    def runs(one: Any = layer, tokens: Tensor = x) -> bool:
        return bool(one._uses_flash(tokens))

    assert runs()
    assert kernels["asked"] == [("cpu", torch.float64, 2, 4, 3)]
    assert not runs(layer.train()), "maps are dropped"
    layer.attn_drop.p = 0.0
    assert runs()
    assert not runs(ReAttention(6, 2).train())
    assert not runs(PlainAttention(6, 2))
    layer.fused_attn = False
    assert not runs()
    layer.fused_attn = True
    assert not runs(layer, x.to("meta"))
    monkeypatch.setattr(attention, "INTERPRETED", False)
    assert not runs()
    monkeypatch.setattr(attention, "INTERPRETED", True)
    assert kernels["warned"] == []
    kernels["reason"][0] = "too many heads"
    assert not runs()
    assert kernels["warned"] == [("cpu", torch.float64, "too many heads")]
    kernels["asked"].clear()
    with torch.autocast("cpu", torch.bfloat16):
        runs()
    runs(layer, torch.zeros(1, 7, 6))
    assert kernels["asked"] == [("cpu", torch.bfloat16, 2, 4, 3), ("cpu", torch.float32, 2, 7, 3)]


SMALL: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 3}


def test_how_a_network_runs_is_told_in_words(kernels: Any) -> None:
    model: Any = VisionTransformer(**SMALL, attention=["plain", "re-attention"])
    assert reattention_impl(model.train()) == "plain: BatchNorm in training, or a LayerNorm over heads"
    assert reattention_impl(model.eval()) == "flash"
    kernels["reason"][0] = "the tensors are on 'cpu'"
    assert reattention_impl(model) == "plain: the tensors are on 'cpu'"
    assert kernels["asked"] == [("cpu", torch.float32, 2, 5, 6)] * 2
    assert reattention_impl(VisionTransformer(**SMALL, attention="plain")) is None
    assert reattention_impl(nn.Sequential(TalkingHeadsAttention(6, 2).double())) == "plain: the tensors are on 'cpu'"
    assert kernels["asked"][-1] == ("cpu", torch.float64, 2, 1, 3)


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    layer = ReAttention(6, 2).eval()
    computed: list[int] = []

    def compute() -> int:
        computed.append(1)
        return len(computed)

    assert [layer.cached("a", compute) for _ in range(2)] == [1, 2], "a gradient may be asked for"
    with torch.no_grad():
        assert [layer.cached(name, compute) for name in ("a", "a", "b", "a", "b")] == [3, 3, 4, 3, 4]
        layer.var_norm.running_mean.add_(1)  # type: ignore[operator]
        assert [layer.cached(name, compute) for name in ("a", "b", "b")] == [5, 6, 6]
        layer.proj.weight.data = layer.proj.weight.data.clone()
        assert layer.cached("a", compute) == 7
    with torch.inference_mode():
        made_there = ReAttention(6, 2).eval()
        assert [made_there.cached("a", compute) for _ in range(2)] == [8, 9], "its weights count no versions"


def test_attention_without_a_mix_is_that_of_torch() -> None:
    layer: Any = randomize_like_trained(HeadMixAttention(12, 3)).double().eval()
    x = double((2, 5, 12))
    q, k, v = layer.split_heads(layer.qkv(x))
    expected = layer.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)
    layer.value_scale = 0.5
    halved = layer.proj(0.5 * F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), halved, atol=1e-12, rtol=0)
