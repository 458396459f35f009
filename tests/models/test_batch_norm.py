"""Statistics of BatchNorm measured anew, against their closed form and a pass by hand."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vitx.models  # noqa: F401  # registers deepvit_digits
from reference import randomize_like_trained
from vitx.models.attention import ReAttention
from vitx.models.flash.reattention import Mixes, plain_reattention
from vitx.models.recalibration import measure_batch_norm


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    network = timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"], proj_drop_rate=0.5)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.load_state_dict({key: torch.full_like(value, 9) for key, value in module.state_dict().items()})
    return network


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_the_mean_is_the_closed_form_and_the_variance_that_of_the_maps(model: Any) -> None:
    attention = model.blocks[1].attn
    mixed: list[Tensor] = []
    handle = attention.var_norm.register_forward_pre_hook(lambda _, inputs: mixed.append(inputs[0]))
    measure_batch_norm([model.eval()], iter([images(1), images(2)]))
    handle.remove()
    matrix = attention.reatten_matrix
    closed = matrix.weight.flatten(1).sum(1) / 65 + matrix.bias
    torch.testing.assert_close(attention.var_norm.running_mean, closed, rtol=0, atol=1e-6)
    variances = torch.stack([maps.transpose(0, 1).flatten(1).var(dim=1) for maps in mixed])
    torch.testing.assert_close(attention.var_norm.running_var, variances.mean(0), rtol=1e-4, atol=0)


def test_training_is_a_linear_mix_of_statistics_that_need_no_map() -> None:
    """The two-pass form (docs/models.md): the H×H products of the maps make BatchNorm a mix, output and gradients."""
    layer: Any = randomize_like_trained(ReAttention(12, 3)).double().train()
    B, N = 2, 5
    x = torch.randn(B, N, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = layer.var_norm.running_var.clone()
    output = layer(x)
    weight, bias = layer.reatten_matrix.weight.flatten(1), layer.reatten_matrix.bias
    q, k, v = layer.split_heads(layer.qkv(x))
    maps = (layer.scale * q @ k.transpose(-2, -1)).softmax(dim=-1)
    products = torch.einsum("bgnm,bhnm->gh", maps, maps)
    covariance = products / (B * N**2) - 1 / N**2
    variance = (weight @ covariance @ weight.T).diagonal()
    mean = weight.sum(dim=1) / N + bias
    scale = layer.var_norm.weight / torch.sqrt(variance + layer.var_norm.eps)
    mixes = Mixes(scale[:, None] * weight, scale * (bias - mean) + layer.var_norm.bias)
    mixed = plain_reattention(q, k, v, mixes, layer.scale) * layer.reatten_scale
    folded = layer.proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(folded, output, rtol=0, atol=1e-12)
    unbiased = 0.1 * variance * B * N**2 / (B * N**2 - 1)
    measured = layer.var_norm.running_var - 0.9 * before
    torch.testing.assert_close(measured, unbiased, rtol=1e-9, atol=0)
    parameters = [parameter for parameter in layer.parameters() if parameter is not bias]  # the mean takes b away again
    expected = torch.autograd.grad(output.square().sum(), parameters)
    found = torch.autograd.grad(folded.square().sum(), parameters)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_modes_and_momentum_are_restored_and_dropout_is_off(model: Any) -> None:
    """The dropout of the first block is in training mode, and the maps of the second would see it."""
    reference = copy.deepcopy(model).eval()
    measure_batch_norm([reference], iter([images(1)]))
    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    measure_batch_norm([model], iter([images(1)]))
    assert [module.training for module in model.modules()] == modes
    norm = model.blocks[1].attn.var_norm
    assert norm.momentum == 0.1
    assert torch.equal(norm.running_var, reference.blocks[1].attn.var_norm.running_var), "dropout was on"
    assert norm.num_batches_tracked == 1


def test_without_batch_norm_no_image_is_read() -> None:
    images = iter(["the first batch"])
    assert measure_batch_norm([timm.create_model("deit_digits", depth=1)], images) == 0
    assert next(images) == "the first batch"
