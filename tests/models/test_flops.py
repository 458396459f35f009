"""FLOPs of a forward pass beside formulas written out for every network of the zoo, and beside torch's own counter."""

import functools
import json
from importlib.resources import files
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitx.core.errors import InputError
from vitx.models import LocalAttention
from vitx.models.flops import count_flops
from vitx.models.network_summary import vitx_networks

DEIT_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
# Blocks, width, blocks with Re-Attention, CNN embedding; 12 heads and an MLP of three times the width in all.
DEEPVIT = {
    "deepvit_16b": (16, 384, 16, False),
    "deepvit_24b": (24, 384, 24, False),
    "deepvit_32b": (32, 384, 32, False),
    "deepvit_s": (16, 396, 5, True),
    "deepvit_l": (32, 420, 12, True),
    "deepvit_l_384": (32, 420, 12, True),
    "plainvit_16b": (16, 384, 0, False),
    "plainvit_24b": (24, 384, 0, False),
    "plainvit_32b": (32, 384, 0, False),
    "plainvit_s": (16, 396, 0, True),
    "plainvit_l": (32, 420, 0, True),
}
# Units of the four stages, and how many of them are attention.
ALTERNET = {
    18: ((2, 2, 2, 2), (0, 1, 1, 1)),
    34: ((3, 4, 6, 4), (0, 1, 3, 2)),
    50: ((3, 4, 6, 4), (0, 1, 3, 2)),
    101: ((3, 4, 23, 4), (0, 1, 3, 2)),
    152: ((3, 8, 36, 4), (0, 1, 3, 2)),
}


def convolution(side: int, kernel: int, channels: int, channels_out: int) -> int:
    """On an output of side × side."""
    return 2 * side**2 * kernel**2 * channels * channels_out


def patch_embedding(image: int, patch: int, D: int) -> int:
    return convolution(image // patch, patch, 3, D)


def cnn_embedding(image: int, D: int) -> int:
    """7×7 with stride 2 to 64 channels, 3×3, then 8×8 with stride 8."""
    return convolution(image // 2, 7, 3, 64) + convolution(image // 2, 3, 64, 64) + convolution(image // 16, 8, 64, D)


def vit(N: int, D: int, H: int, *, blocks: int, ratio: int, mixes: int, embedding: int, classes: int = 1000) -> int:
    """N tokens, class token included; `mixes` over H heads in all blocks together."""
    qkv, attention, proj, mlp = 2 * N * D * 3 * D, 2 * 2 * N**2 * D, 2 * N * D**2, 2 * 2 * N * D * ratio * D
    return embedding + blocks * (qkv + attention + proj + mlp) + mixes * 2 * H**2 * N**2 + 2 * D * classes


def deit(name: str) -> int:
    _, size, depth, *options = name.split("_")
    (D, H), image = DEIT_SIZES[size], next((int(option) for option in options if option.isdigit()), 224)
    mixes = 2 * int(depth) if "talking" in options else 0  # before and after softmax
    embedding = patch_embedding(image, 16, D)
    return vit((image // 16) ** 2 + 1, D, H, blocks=int(depth), ratio=4, mixes=mixes, embedding=embedding)


def cait_s24() -> int:
    """24 blocks of 196 patches with two mixes; two whose class token alone is a query, beside the patches' tokens."""
    patches, D, n = patch_embedding(224, 16, 384), 384, 196
    class_attention = 2 * 2 * (n + 1) * D**2 + 2 * 2 * (n + 1) * D + 2 * 2 * D**2 + 2 * 2 * D * 4 * D
    return vit(n, D, 8, blocks=24, ratio=4, mixes=48, embedding=patches) + 2 * class_attention


def deepvit(name: str) -> int:
    blocks, D, mixes, cnn = DEEPVIT[name]
    image = 384 if name.endswith("_384") else 224
    embedding = cnn_embedding(image, D) if cnn else patch_embedding(image, 16, D)
    return vit((image // 16) ** 2 + 1, D, 12, blocks=blocks, ratio=3, mixes=mixes, embedding=embedding)


def digits(mixes: int) -> int:
    return vit(65, 64, 4, blocks=6, ratio=3, mixes=mixes, embedding=patch_embedding(32, 4, 64), classes=10)


def attention_unit(side: int, C: int, inner: int, heads: int, window: int) -> int:
    """1×1 to the inner width; queries, keys and values of heads × 64; whole windows, padded ones too; 1×1 back to C."""
    tokens = (-(-side // window) * window) ** 2
    products = 2 * 2 * tokens * window**2 * heads * 64
    projections = convolution(side, 1, inner, 3 * heads * 64) + convolution(side, 1, heads * 64, C)
    return convolution(side, 1, C, inner) + projections + products


def alternet(name: str) -> int:
    depth, cifar = int(name.split("_")[1]), name.endswith("_cifar")
    bottleneck = depth >= 50
    expansion, window = 4 if bottleneck else 1, 4 if cifar else 7
    side, C = 32 if cifar else 56, 64
    flops = convolution(32, 3, 3, 64) if cifar else convolution(112, 7, 3, 64)
    for stage, (units, attention) in enumerate(zip(*ALTERNET[depth], strict=True)):
        W = 64 * 2**stage
        for unit in range(units):
            before, side = side, side // 2 if stage > 0 and unit == 0 else side
            if unit >= units - 2 * attention and (units - unit) % 2:  # every second one, from the stage's end
                flops += attention_unit(side, C, C // expansion, 3 * 2**stage, window)
                continue
            if bottleneck:
                flops += convolution(before, 1, C, W) + convolution(side, 3, W, W) + convolution(side, 1, W, 4 * W)
            else:
                flops += convolution(side, 3, C, W) + convolution(side, 3, W, W)
            if (before, C) != (side, expansion * W):
                flops += convolution(side, 1, C, expansion * W)
            C = expansion * W
    return flops + 2 * C * (100 if cifar else 1000)


def by_hand(name: str) -> int:
    if name.endswith("_digits"):
        return digits(mixes=3 if name.startswith("deepvit") else 0)
    if name.endswith("_cait_s24_224"):
        return cait_s24()
    if name.startswith(("attnscale", "featscale")):  # no product more than DeiT
        return deit(name.replace(name.split("_")[0], "deit"))
    if name == "deit_tiny_neutreno_patch16_224":
        return deit("deit_tiny_12")
    return {"deit": deit, "deepvit": deepvit, "plainvit": deepvit, "alternet": alternet}[name.split("_")[0]](name)


def on_meta(name: str, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs).eval()


def image_of(model: Any, batch: int = 1) -> Tensor:
    return torch.empty(batch, *model.pretrained_cfg["input_size"], device="meta")


def with_torchs_counter(model: nn.Module, images: Tensor) -> int:
    """torch's count with every attention written out: by vitx's own switch, and by the backend for timm's networks."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("name", "gflops"),
    [
        ("deit_base_12", 35.13),
        ("deit_base_12_talking", 35.40),
        ("plainvit_16b", 10.37),
        ("deepvit_16b", 10.54),
        ("deepvit_s", 12.72),
        ("deepvit_l", 26.30),
        ("alternet_50", 10.03),
    ],
)
def test_gflops_in_plain_numbers(name: str, gflops: float) -> None:
    assert by_hand(name) / 1e9 == pytest.approx(gflops, abs=0.005)


def test_the_table_of_networks_by_hand() -> None:
    """All of zoo.json; test_network_summary.py compares some of every family with the networks themselves."""
    table = json.loads(files("vitx.models").joinpath("zoo.json").read_text())
    assert [entry["name"] for entry in table] == vitx_networks()
    assert {entry["name"]: entry["gmacs"] for entry in table} == {
        entry["name"]: pytest.approx(by_hand(entry["name"]) / 2e9, abs=1e-4) for entry in table
    }


@pytest.mark.parametrize(
    "name",
    [
        *("deit_tiny_12", "deit_tiny_12_talking", "deit_tiny_12_384", "deit_tiny_12_talking_512", "deit_tiny_24"),
        *("deit_small_12", "deit_base_12_talking", "deit_large_24"),
        *("deepvit_16b", "deepvit_s", "deepvit_l_384", "plainvit_16b", "plainvit_s"),
        *("alternet_18", "alternet_18_cifar", "alternet_34", "alternet_50", "alternet_50_cifar"),
        *("deit_digits", "deepvit_digits"),
    ],
)
def test_networks_by_hand_and_by_torch(name: str) -> None:
    """Of every family each width, kind of block, embedding and image size; other names are deeper or combine them."""
    model = on_meta(name)
    assert count_flops(model, image_of(model)) == by_hand(name) == with_torchs_counter(model, image_of(model))


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("vit_tiny_patch16_224", {"depth": 2}),
        ("cait_xxs24_224", {"depth": 2}),
        ("swin_tiny_patch4_window7_224", {"depths": (2, 2, 2, 2)}),
        ("pit_ti_224", {}),
        ("mobilenetv3_small_050", {}),
    ],
)
def test_networks_of_timm_by_torch(name: str, smaller: dict[str, Any]) -> None:
    """Class attention, shifted windows, grouped convolutions."""
    model = on_meta(name, **smaller)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # torch's counter asks for a gradient otherwise
    assert count_flops(model, image_of(model)) == with_torchs_counter(model, image_of(model))


def test_a_network_that_runs() -> None:
    """The count is torch's for a forward pass on a CPU with the maps written out; the network stays as it was."""
    model = timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"])
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    images = torch.randn(3, 3, 32, 32)
    found = count_flops(model, images)
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        torch.testing.assert_close(tensor, before[name][1])
    assert found == 3 * count_flops(model, images[:1]) == with_torchs_counter(model.eval(), images)


class TwiceInTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        once = super().forward(x)
        return super().forward(once) if self.training else once


def test_what_evaluation_does_not_run_is_not_counted() -> None:
    plain, with_patch_head = on_meta("deit_digits"), on_meta("deit_digits", patch_head=True)
    assert count_flops(with_patch_head.train(), image_of(plain)) == count_flops(plain, image_of(plain))
    assert count_flops(TwiceInTraining(7, 7), torch.empty(1, 7)) == 2 * 7 * 7


def test_in_inference_mode_and_half_precision() -> None:
    model = timm.create_model("deit_digits").half()
    with torch.inference_mode():
        assert count_flops(model, torch.empty(1, 3, 32, 32, dtype=torch.float16)) == by_hand("deit_digits")


def test_local_attention_by_hand() -> None:
    N, D, k = 36, 24, 3
    flops = count_flops(LocalAttention(D, 3, kernel_size=k), torch.empty(2, N, D))
    assert flops == 2 * (2 * N * D * 3 * D + 2 * 2 * N * k**2 * D + 2 * N * D**2)


@pytest.mark.parametrize(
    ("layer", "flops"),
    [
        (nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4), 2 * 5**2 * 12 * 2 * 9),
        (nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4), 2 * 9**2 * 8 * 3 * 9),
        (nn.Conv2d(8, 12, (1, 3), bias=False), 2 * 9 * 7 * 12 * 8 * 3),
    ],
)
def test_a_convolution_by_hand(layer: nn.Module, flops: int) -> None:
    assert count_flops(layer, torch.empty(1, 8, 9, 9)) == flops


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x: x[0] @ x[0].T, 2 * 5 * 5 * 7),
        (lambda x: x @ x[0, 0], 2 * 3 * 5 * 7),
        (lambda x: x[0, 0] @ x[0, 1], 2 * 7),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), 2 * 3 * 5 * 5 * 7),
        (lambda x: (x + torch.ones(7)) @ torch.ones(7, 4), 2 * 3 * 5 * 7 * 4),  # constants made in the forward pass
        (functools.partial(F.interpolate, size=9, mode="linear"), 0),
    ],
)
def test_a_product_by_hand(function: Any, flops: int) -> None:
    assert count_flops(Calls(function), torch.empty(3, 5, 7)) == flops


@torch.library.custom_op("vitx_test::foreign_operator", mutates_args=())
def foreign_operator(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.fft.fft2, "aten._fft_c2c"),
        (lambda x: torch.addbmm(x[0, :, :5], x, x.transpose(1, 2)), "aten.addbmm"),
        (lambda x: torch.cdist(x, x), "aten._cdist_forward"),
        (lambda x: foreign_operator(x), "vitx_test.foreign_operator"),
    ],
)
def test_an_operator_without_a_formula_is_refused(function: Any, operator: str) -> None:
    with pytest.raises(InputError, match=f"no formula for the operator '{operator}'"):
        count_flops(Calls(function), torch.empty(3, 5, 7))
