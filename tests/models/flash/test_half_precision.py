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

DTYPES = (torch.bfloat16, torch.float16)
SCALE = 1024.0  # of the loss, as a gradient scaler has it
# The same networks at other image sizes have other positions alone.
ZOO = [name for name in timm.list_models(module="registry") if not name.endswith(("_384", "_512"))]


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
        for block in blocks_of(one)
    ]


def blocks_of(model: Any) -> list[Any]:
    return [*model.blocks] if hasattr(model, "blocks") else [unit for stage in model.stages for unit in stage]


def assert_near_float64(model: Any, images: int, size: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    noise = torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(1))
    exact = block_gradients(model, noise, None)
    for dtype in dtypes:
        pairs = zip(exact, block_gradients(model, noise, dtype), strict=True)
        cosines = [float(F.cosine_similarity(*pair, dim=0)) for pair in pairs]
        assert all(cosine >= 0.99 for cosine in cosines), (dtype, cosines)


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("alternet")])
def test_gradients_of_fresh_networks_are_those_of_float64(name: str) -> None:
    """Every transformer of the zoo at 224 px, its own depth and heads, with 8 or 16 channels a head.

    At full width, and in float16: benchmarks/models/half_precision.py.
    """
    with torch.device("meta"):
        full: Any = timm.create_model(name)
    heads = full.blocks[0].attn.num_heads
    torch.manual_seed(0)
    size: dict[str, Any] = {} if name.endswith("digits") else {"embed_dim": heads * (16 if heads < 6 else 8)}
    model: Any = timm.create_model(name, num_classes=8, **size).train()
    assert_near_float64(model, 1, model.patch_embed.img_size[0], DTYPES[:1])


@pytest.mark.parametrize(("name", "size"), [("deepvit_16b", 64), ("deepvit_s", 64), ("deit_tiny_12_talking", 64)])
def test_gradients_in_float16_are_those_of_float64(name: str, size: int) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=8, img_size=size, embed_dim=96).train()
    assert_near_float64(model, 8, size, DTYPES[1:])


@pytest.mark.parametrize(("name", "size"), [("alternet_18", 64), ("alternet_18_cifar", 32)])
def test_alternet_computes_in_float32_while_it_trains(name: str, size: int) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=8).train()
    assert_near_float64(model, 4, size)
    images = torch.randn(4, 3, size, size)
    with torch.autocast("cpu", torch.bfloat16):
        _, deepest = model.forward_intermediates(images), model.eval().forward_features(images)
    assert deepest.dtype == torch.bfloat16  # autocast's again


def test_gradients_with_a_layer_norm_over_heads_are_those_of_float64() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 2, "embed_dim": 192, "reatten_norm": "layer"}
    assert_near_float64(timm.create_model("deepvit_16b", img_size=96, num_classes=3, **options).train(), 3, 96)


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
