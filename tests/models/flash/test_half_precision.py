"""Re-Attention inside autocast: its gradients are those of float64, in bfloat16 and in float16 with a scaled loss."""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import vitx.models  # noqa: F401  # registers the networks
from vitx.models import ReAttention
from vitx.models.head_mix import mix_heads

SCALE = 1024.0  # of the loss, as a gradient scaler has it


def block_gradients(model: Any, images: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Of each block the gradients of all its parameters, as one vector in float64."""
    one = copy.deepcopy(model) if dtype is not None else copy.deepcopy(model).double()
    scale = SCALE if dtype == torch.float16 else 1.0
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = one(images if dtype is not None else images.double())
    wide = logits if logits.dtype == torch.float64 else logits.float()
    torch.autograd.backward(scale * F.cross_entropy(wide, torch.arange(len(images))))
    return [
        torch.cat([parameter.grad.flatten().double() / scale for parameter in block.parameters()])
        for block in one.blocks
    ]


def cosines(model: Any, dtype: torch.dtype) -> list[float]:
    images = torch.randn(3, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    pairs = zip(block_gradients(model, images, None), block_gradients(model, images, dtype), strict=True)
    return [float(F.cosine_similarity(exact, found, dim=0)) for exact, found in pairs]


def fresh(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, img_size=96, num_classes=3, **options).train()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepvit_16b", {"depth": 4, "embed_dim": 192, "num_heads": 12}),
        ("deepvit_s", {"depth": 4, "attention": ["plain", *["re-attention"] * 3]}),
        ("deepvit_16b", {"depth": 2, "embed_dim": 192, "reatten_norm": "layer"}),
        ("deit_tiny_12", {"depth": 2}),
    ],
    ids=["conv patches", "CNN patches", "layer norm", "plain"],
)
def test_gradients_of_fresh_blocks_are_those_of_float64(name: str, options: Any, dtype: torch.dtype) -> None:
    """The 224-px networks of the zoo are in benchmarks/models/half_precision.py."""
    found = cosines(fresh(name, **options), dtype)
    assert min(found) >= 0.99, found


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    return ReAttention(24, 6)


def softmax_maps(tokens: int) -> Tensor:
    scores = 0.05 * torch.randn(2, 6, tokens, tokens, generator=torch.Generator().manual_seed(0))
    return scores.softmax(dim=-1)


@pytest.mark.parametrize("training", [True, False])
def test_inside_autocast_the_mix_and_its_statistics_are_those_of_float32(layer: Any, training: bool) -> None:
    maps, layer = softmax_maps(50), layer.train(training)
    other = copy.deepcopy(layer)
    expected = layer.after_softmax(maps)
    with torch.autocast("cpu", torch.bfloat16):
        found = other.after_softmax(maps)
        assert other.after_softmax(maps.bfloat16()).dtype == torch.float32
        assert (maps @ maps).dtype == torch.bfloat16  # what follows is autocast's again
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if training:
        other.var_norm.load_state_dict(copy.deepcopy(layer.var_norm.state_dict()))
        with torch.autocast("cpu", torch.bfloat16):
            other.after_softmax(maps)
        layer.after_softmax(maps)
        for name, value in layer.var_norm.state_dict().items():
            torch.testing.assert_close(other.var_norm.state_dict()[name], value, rtol=0, atol=0)


def test_the_bias_is_lost_in_bfloat16(layer: Any) -> None:
    """What the mix in bfloat16 would leave of the maps' deviation from their mean: why it is not taken."""
    maps = softmax_maps(197)
    weight, bias = layer.reatten_matrix.weight.flatten(1), layer.reatten_matrix.bias
    exact = mix_heads(maps.double(), weight.double(), bias.double())
    rounded = mix_heads(maps.bfloat16(), weight.bfloat16(), bias.bfloat16()).double()
    deviation, error = exact.std(dim=(0, 2, 3)), (rounded - exact).std(dim=(0, 2, 3))
    assert (error > deviation).any()


def test_a_network_of_half_precision_weights_mixes_in_them(layer: Any) -> None:
    assert layer.bfloat16().eval().after_softmax(softmax_maps(5).bfloat16()).dtype == torch.bfloat16
