"""Statistics of BatchNorm measured anew, against their closed form and a pass by hand."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vitx.models  # noqa: F401  # registers deepvit_digits
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


def test_modes_and_momentum_are_restored_and_dropout_is_off(model: Any) -> None:
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    measure_batch_norm([model], iter([images(1)]))
    first = model.blocks[1].attn.var_norm.running_var.clone()
    assert [module.training for module in model.modules()] == modes
    assert model.blocks[1].attn.var_norm.momentum == 0.1
    measure_batch_norm([model], iter([images(1)]))
    assert torch.equal(first, model.blocks[1].attn.var_norm.running_var), "dropout was on"


def test_without_batch_norm_no_image_is_read() -> None:
    def refuse() -> Any:
        raise AssertionError("an image was read")
        yield

    measure_batch_norm([timm.create_model("deit_digits", depth=1)], refuse())
