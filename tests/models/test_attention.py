"""Re-Attention and talking heads against docs/maths.md §3, a plain formula in float64, and autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference import randomize, randomize_like_trained, seq
from vitx.core.errors import InputError
from vitx.models import (
    AttnScaleAttention,
    NeutrenoAttention,
    PlainAttention,
    ReAttention,
    TalkingHeadsAttention,
    fold_head_mix,
)
from vitx.models.attention import FirstValues
from vitx.models.head_mix import mix_heads


def reference_re_attention() -> ReAttention:
    attention = ReAttention(8, 2).double()
    with torch.no_grad():
        attention.qkv.weight.copy_(seq(0, 24, 8))
        attention.qkv.bias.copy_(seq(0.3, 24))
        attention.proj.weight.copy_(seq(1, 8, 8))
        attention.proj.bias.copy_(seq(2, 8))
        attention.reatten_matrix.weight.copy_(torch.tensor([[1, 0.5], [-0.25, 0.75]]).view(2, 2, 1, 1))
        assert attention.reatten_matrix.bias is not None
        attention.reatten_matrix.bias.copy_(torch.tensor([0.1, -0.2], dtype=torch.float64))
        assert isinstance(attention.var_norm, nn.BatchNorm2d)
        attention.var_norm.weight.copy_(torch.tensor([1.5, 0.8], dtype=torch.float64))
        attention.var_norm.bias.copy_(torch.tensor([0.05, -0.1], dtype=torch.float64))
    return attention


def test_re_attention_reproduces_the_reference() -> None:
    attention = reference_re_attention().train()
    seen: list[Tensor] = []
    attention.var_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    y = attention(seq(3, 2, 3, 8))
    expected_y = [-31.721928, -31.014548, -16.394888, 5.589397, 25.082329, 33.337965, 26.644379, 7.99276]
    expected_map = [
        [2.334154, -1.09199, -1.092164],
        [2.317974, -1.075815, -1.092159],
        [-0.695309, 1.735793, -0.890484],
    ]
    torch.testing.assert_close(y[0, 0], torch.tensor(expected_y, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen[0][0, 0], torch.tensor(expected_map, dtype=torch.float64), atol=1e-6, rtol=0)
    norm = attention.var_norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.tolist() == pytest.approx([0.06, -0.003333], abs=1e-6)
    assert norm.running_var.tolist() == pytest.approx([0.945654, 0.904999], abs=1e-6)


def test_talking_heads_reproduce_the_reference() -> None:
    attention = TalkingHeadsAttention(8, 2, qkv_bias=False).double()
    with torch.no_grad():
        attention.qkv.weight.copy_(seq(0, 24, 8))
        attention.proj.weight.copy_(seq(1, 8, 8))
        attention.proj.bias.copy_(seq(2, 8))
        attention.proj_pre.weight.copy_(torch.tensor([[1, 0.5], [-0.25, 1]]))
        attention.proj_post.weight.copy_(torch.tensor([[0.75, 0.25], [0.1, 0.9]], dtype=torch.float64))
    expected = [-7.547371, -14.598654, -15.106232, -8.827621, 1.430979, 11.068622, 15.753045, 13.368208]
    torch.testing.assert_close(
        attention(seq(3, 1, 3, 8))[0, 0], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
    )


def reference_attn_scale() -> AttnScaleAttention:
    attention = AttnScaleAttention(8, 2, qkv_bias=False).double()
    with torch.no_grad():
        attention.qkv.weight.copy_(seq(0, 24, 8))
        attention.proj.weight.copy_(seq(1, 8, 8))
        attention.proj.bias.copy_(seq(2, 8))
        attention.lamb.copy_(torch.tensor([0.5, -0.25]))
    return attention


@pytest.mark.parametrize("fused", [True, False])
def test_attn_scale_reproduces_the_reference(fused: bool) -> None:
    attention = reference_attn_scale()
    attention.fused_attn = fused
    expected = [-9.055067, -16.11517, -15.950851, -8.621221, 2.595752, 12.668939, 17.070574, 13.811552]
    torch.testing.assert_close(
        attention(seq(3, 1, 3, 8))[0, 0], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_attn_scale_is_the_authors_formula() -> None:
    """Their steps on whole maps: subtract 1/N, scale, add it again."""
    attention = reference_attn_scale()
    x, N = seq(3, 2, 5, 8), 5
    q, k, v = attention.qkv(x).reshape(2, N, 3, 2, 4).permute(2, 0, 3, 1, 4)
    low = torch.ones(N, N, dtype=torch.float64) / N
    high = (q @ k.transpose(-2, -1) / 2).softmax(-1) - low
    maps = low + high * (1 + attention.lamb[None, :, None, None])
    expected = attention.proj((maps @ v).transpose(1, 2).reshape(2, N, 8))
    torch.testing.assert_close(attention(x), expected, atol=1e-12, rtol=0)
    (theirs,) = torch.autograd.grad(expected.square().sum(), [attention.lamb])
    (ours,) = torch.autograd.grad(attention(x).square().sum(), [attention.lamb])
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_attn_scale_begins_as_plain_attention() -> None:
    attention, plain = AttnScaleAttention(24, 3), PlainAttention(24, 3)
    plain.load_state_dict({key: value for key, value in attention.state_dict().items() if key != "lamb"})
    x = torch.randn(2, 7, 24)
    assert torch.equal(attention(x), plain(x))


def test_attn_scale_drops_the_same_entries_fused_or_not() -> None:
    attention = reference_attn_scale().train()
    attention.attn_drop.p = 0.5
    found = []
    for fused in (True, False):
        attention.fused_attn = fused
        torch.manual_seed(0)
        found.append(attention(seq(3, 2, 5, 8)))
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0], attention.eval()(seq(3, 2, 5, 8)))


@pytest.mark.parametrize("fused", [True, False])
def test_neutreno_reproduces_the_reference(fused: bool) -> None:
    shared, found = FirstValues(), []
    for phase, first in ((3, True), (4, False)):
        attention = NeutrenoAttention(8, 2, qkv_bias=False, first=first).double()
        attention.fused_attn = fused
        weights = reference_attn_scale().state_dict()
        attention.load_state_dict({key: value for key, value in weights.items() if key != "lamb"})
        found.append(attention(seq(phase, 1, 3, 8), shared)[0, 0].tolist())
    plain = [-7.547923, -14.599133, -15.106423, -8.827438, 1.431453, 11.069176, 15.753429, 13.36825]
    second = [-11.890672, -16.10467, -13.098959, -4.208061, 6.589252, 14.450224, 15.840082, 10.121612]
    np.testing.assert_allclose(found, [plain, second], atol=1e-6, rtol=0)


def test_the_fold_reproduces_the_reference() -> None:
    attention = ReAttention(9, 3).double()
    norm = attention.var_norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert attention.reatten_matrix.bias is not None
    with torch.no_grad():
        attention.reatten_matrix.weight.copy_(seq(0.2, 3, 3).view(3, 3, 1, 1))
        attention.reatten_matrix.bias.copy_(seq(0.4, 3))
        norm.weight.copy_(torch.tensor([1.5, 0.8, 0.6], dtype=torch.float64))
        norm.bias.copy_(torch.tensor([0.05, -0.1, 0.2], dtype=torch.float64))
        norm.running_mean.copy_(torch.tensor([0.06, -0.003, 0.01], dtype=torch.float64))
        norm.running_var.copy_(torch.tensor([0.9, 0.5, 0.25], dtype=torch.float64))
    weight, bias = fold_head_mix(attention)
    expected = [0.314122, 1.238542, 1.580456, 0.843661, 0.159657, -0.599435, -1.141900, -1.110955, -0.557511]
    assert weight.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert bias.tolist() == pytest.approx([0.570853, 0.911670, 1.356594], abs=1e-6)


def plain_formula(attention: ReAttention, x: Tensor) -> Tensor:
    """Re-Attention in evaluation mode, one head and one image at a time."""
    norm, convolution = attention.var_norm, attention.reatten_matrix
    out = []
    for tokens in x:
        qkv = tokens @ attention.qkv.weight.T + attention.qkv.bias
        q, k, v = (part.reshape(len(tokens), attention.num_heads, -1) for part in qkv.chunk(3, dim=-1))
        maps = [torch.softmax(q[:, h] @ k[:, h].T / attention.head_dim**0.5, -1) for h in range(attention.num_heads)]
        heads = []
        for h in range(attention.num_heads):
            mixed = sum(convolution.weight[h, g, 0, 0] * maps[g] for g in range(attention.num_heads))
            assert convolution.bias is not None
            mixed = mixed + convolution.bias[h]
            if isinstance(norm, nn.BatchNorm2d):
                assert norm.running_mean is not None
                assert norm.running_var is not None
                mixed = (mixed - norm.running_mean[h]) / torch.sqrt(norm.running_var[h] + norm.eps)
                mixed = norm.weight[h] * mixed + norm.bias[h]
            heads.append(attention.reatten_scale * mixed @ v[:, h])
        out.append(torch.cat(heads, dim=-1) @ attention.proj.weight.T + attention.proj.bias)
    return torch.stack(out)


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("scale", [1.0, 33**-0.5])
def test_re_attention_equals_the_plain_formula(norm: str, scale: float) -> None:
    attention = ReAttention(24, 3, norm=norm, reatten_scale=scale).double()  # type: ignore[arg-type]
    randomize(attention).eval()
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attention(x), plain_formula(attention, x), atol=1e-10, rtol=0)


def test_evaluation_equals_the_folded_mix() -> None:
    attention = ReAttention(24, 3, reatten_scale=0.5).double()
    randomize(attention).eval()
    maps = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    expected = mix_heads(maps, *fold_head_mix(attention))
    attention.var_norm.register_forward_hook(lambda *_: pytest.fail("evaluation pays for the norm"))
    torch.testing.assert_close(0.5 * attention.after_softmax(maps), expected, atol=1e-10, rtol=0)


def test_layer_norm_over_heads_cannot_be_folded() -> None:
    with pytest.raises(InputError, match="not linear in the maps"):
        fold_head_mix(ReAttention(8, 2, norm="layer"))


def test_training_rows_sum_to_tokens_times_beta() -> None:
    attention = reference_re_attention().train()
    N = 5
    maps = torch.rand(4, 2, N, N, dtype=torch.float64).softmax(-1)
    rows = attention.after_softmax(maps).sum(-1).mean(dim=(0, 2))
    assert rows.tolist() == pytest.approx([N * 0.05, N * -0.1], abs=1e-9)


def test_mix_heads_is_a_1x1_convolution() -> None:
    convolution = nn.Conv2d(3, 3, 1).double()
    maps = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(mix_heads(maps, convolution.weight.flatten(1), convolution.bias), convolution(maps))


@pytest.mark.parametrize("exporting", [False, True])
def test_an_exported_mix_is_a_product_that_fixes_no_batch(monkeypatch: pytest.MonkeyPatch, exporting: bool) -> None:
    maps, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 4, 5), (3, 3), (3,)))
    products: list[tuple[int, ...]] = []
    matmul = torch.matmul
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    monkeypatch.setattr(torch, "matmul", lambda a, b: products.append(tuple(a.shape)) or matmul(a, b))  # type: ignore[func-returns-value]
    mixed = torch.einsum("hg,bgij->bhij", weight, maps)
    torch.testing.assert_close(mix_heads(maps, weight), mixed, atol=1e-12, rtol=0)
    torch.testing.assert_close(mix_heads(maps, weight, bias), mixed + bias.view(3, 1, 1), atol=1e-12, rtol=0)
    assert products == ([(3, 3)] * 2 if exporting else [])


def test_identity_initialisation_is_plain_attention() -> None:
    plain = PlainAttention(12, 3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mixed in (ReAttention(12, 3, norm="none", init="identity"), TalkingHeadsAttention(12, 3, init="identity")):
        mixed.double().load_state_dict(plain.state_dict(), strict=False)
        torch.testing.assert_close(mixed(x), plain(x), atol=1e-12, rtol=0)


def test_fused_and_observable_attention_agree() -> None:
    attention = PlainAttention(12, 3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fused = attention(x)
    attention.fused_attn = False
    torch.testing.assert_close(attention(x), fused, atol=1e-12, rtol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "attention", [ReAttention(6, 2, reatten_scale=0.5), TalkingHeadsAttention(6, 2, mix_bias=True)]
)
def test_gradients(attention: nn.Module, training: bool) -> None:
    """Evaluation mode too: fine-tuning with frozen statistics goes through the folded mix."""
    attention.double().train(training)
    x = torch.randn(1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(attention, (x,))


def test_indivisible_width_names_both_numbers() -> None:
    with pytest.raises(InputError, match=r"dim 10 is not divisible by num_heads 3"):
        ReAttention(10, 3)


def test_the_mix_is_folded_once_and_again_when_a_weight_changed() -> None:
    """In evaluation without gradients; any change that torch knows of counts, in place or by another tensor."""
    attention: Any = randomize_like_trained(ReAttention(8, 2)).eval()
    folds: list[int] = []
    fold = attention.head_mix

    def counted() -> tuple[Tensor, Tensor]:
        folds.append(1)
        mix: tuple[Tensor, Tensor] = fold()
        return mix

    attention.head_mix = counted
    x = seq(3, 2, 3, 8).float()

    def folds_of(*calls: Tensor) -> int:
        before = len(folds)
        with torch.no_grad():
            for value in calls:
                found = attention(value)
        fresh = ReAttention(8, 2).to(found.dtype).eval()
        fresh.load_state_dict(attention.state_dict())
        torch.testing.assert_close(found, fresh(value), rtol=1e-5, atol=1e-6)
        return len(folds) - before

    assert folds_of(x, x, 2 * x) == 1
    assert folds_of(x) == 0
    with torch.no_grad():
        attention.reatten_matrix.weight.mul_(2)
    assert folds_of(x, x) == 1
    attention.var_norm.running_var = torch.full((2,), 0.3)
    assert folds_of(x, x) == 1
    attention.load_state_dict(randomize_like_trained(ReAttention(8, 2)).state_dict())
    assert folds_of(x, x) == 1
    attention.train()(x)  # moves the statistics
    attention.eval()
    assert folds_of(x, x) == 1
    attention.double()
    assert folds_of(x.double(), x.double()) == 1
    attention.zero_grad()
    attention(x.double()).sum().backward()  # with gradients the fold is part of the graph
    assert attention.var_norm.weight.grad is not None
    assert attention.var_norm.weight.grad.any()
    assert folds_of(x.double()) == 0
