"""The names under which timm finds our networks: `import vitx.models; timm.create_model("deepvit_s")`.

| names | what |
|---|---|
| `deit_{tiny,small,base}_{12,24,48}`, `deit_large_24` | DeiT at the depths of Gong et al. |
| … `_talking`, … `_384`, … `_512` | with talking heads; at another image size |
| `deepvit_{16b,24b,32b,s,l,l_384}` | DeepViT (Zhou et al., table 5 and table 8) |
| `plainvit_{16b,24b,32b,s,l}` | the plain ViT of the same size |
| `attnscale_{small,base}_{12,24}`, `featscale_…` | DeiT with AttnScale or FeatScale (Wang et al.), by their names |
| `attnscale_cait_s24_224`, `featscale_cait_s24_224` | CaiT-S24 with them, likewise |
| `deit_tiny_neutreno_patch16_224` | DeiT with NeuTRENO (Nguyen et al.), by its name and in its size |
| `alternet_{18,34,50,101,152}`, … `_cifar` | AlterNet (Park & Kim) |
| `deit_digits`, `deepvit_digits` | 0.26 M parameters at 32 px, for the embedded data set |

Arguments of VisionTransformer or AlterNet override: `timm.create_model("deit_small_24", patch_head=True)`.
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.cait import Cait
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from vitx.core.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD
from vitx.models.alternet import AlterNet
from vitx.models.cait import AttnScaleTalkingHeadAttn, FeatScaleBlock
from vitx.models.vit import VisionTransformer

default_cfgs: dict[str, Any] = {}
# DeiT's pixels, of timm's pretrained configurations.
IMAGENET: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop_pct": 0.875}


def _cfg(image_size: int = 224, **kwargs: Any) -> dict[str, Any]:
    """timm's pretrained configuration, by default DeepViT's (docs/maths.md §3.4)."""
    return {
        "num_classes": 1000,
        "input_size": (3, image_size, image_size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": HALF,
        "std": HALF,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


def _register(name: str, network: type[nn.Module], defaults: dict[str, Any], cfg: dict[str, Any], what: str) -> None:
    """Register `name` with timm as `network(**defaults)`; `what` is its docstring and its line in `vitx models`."""

    def create(pretrained: bool = False, **overrides: Any) -> nn.Module:
        model: nn.Module = build_model_with_cfg(
            network,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn if network is VisionTransformer else None,
            feature_cfg={"out_indices": (0, 1, 2, 3) if network is AlterNet else 3, "feature_cls": "getter"},
            **{**defaults, **overrides},
        )
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = what
    default_cfgs.update(generate_default_cfgs({name: cfg}))
    globals()[name] = register_model(create)  # as timm's own: a function of this module


def _last_blocks(depth: int, count: int) -> list[str]:
    """Re-Attention in the last `count` of `depth` blocks, plain attention before."""
    return ["plain"] * (depth - count) + ["re-attention"] * count


# Width and heads.
DEIT_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}


def _register_deit() -> None:
    for size, (width, heads) in DEIT_SIZES.items():
        for depth in (24,) if size == "large" else (12, 24, 48):
            for attention, kind in (("", "plain"), ("_talking", "talking-heads")):
                for image_size in (224, 384, 512):
                    name = f"deit_{size}_{depth}{attention}" + ("" if image_size == 224 else f"_{image_size}")
                    defaults = {"embed_dim": width, "depth": depth, "num_heads": heads, "attention": kind}
                    cfg = _cfg(image_size, **IMAGENET | ({} if image_size == 224 else {"crop_pct": 1.0}))
                    what = f"DeiT-{size}, {depth} blocks, {kind} attention, {image_size} px."
                    _register(name, VisionTransformer, {**defaults, "img_size": image_size}, cfg, what)


def _register_anti_oversmoothing() -> None:
    cfg = _cfg(**IMAGENET)
    neutreno = {"embed_dim": 192, "depth": 12, "num_heads": 3, "attention": "neutreno"}
    what = "DeiT-tiny, 12 blocks, with NeuTRENO."
    _register("deit_tiny_neutreno_patch16_224", VisionTransformer, neutreno, cfg, what)
    for method, changed in (("AttnScale", {"attention": "attn-scale"}), ("FeatScale", {"feat_scale": True})):
        for size in ("small", "base"):
            width, heads = DEIT_SIZES[size]
            for depth in (12, 24):
                defaults = {"embed_dim": width, "depth": depth, "num_heads": heads, **changed}
                what = f"DeiT-{size}, {depth} blocks, with {method}."
                _register(f"{method.lower()}_{size}_{depth}", VisionTransformer, defaults, cfg, what)
    size_s24 = {"embed_dim": 384, "depth": 24, "num_heads": 8, "init_values": 1e-5}
    for method, part in (
        ("AttnScale", {"attn_block": AttnScaleTalkingHeadAttn}),
        ("FeatScale", {"block_layers": FeatScaleBlock}),
    ):
        _register(f"{method.lower()}_cait_s24_224", Cait, {**size_s24, **part}, cfg, f"CaiT-S24 with {method}.")


def _register_deepvit() -> None:
    common: dict[str, Any] = {"num_heads": 12, "mlp_ratio": 3.0}
    cnn = {**common, "patch_embedding": "cnn", "residual_scale": 0.5}
    small = {**cnn, "embed_dim": 396, "depth": 16, "reatten_scale": 33**-0.5}
    large = {**cnn, "embed_dim": 420, "depth": 32}
    conv: dict[str, Any] = {"first_conv": "patch_embed.conv1"}
    for depth in (16, 24, 32):
        defaults = {**common, "embed_dim": 384, "depth": depth}
        what = f"DeepViT, {depth} blocks of width 384, Re-Attention in all."
        _register(f"deepvit_{depth}b", VisionTransformer, {**defaults, "attention": "re-attention"}, _cfg(), what)
        what = f"The plain ViT of deepvit_{depth}b's size."
        _register(f"plainvit_{depth}b", VisionTransformer, defaults, _cfg(), what)
    for name, defaults, last in (("s", small, 5), ("l", large, 12)):
        depth, width = defaults["depth"], defaults["embed_dim"]
        what = f"DeepViT-{name.upper()}: CNN embedding, {depth} blocks × {width}, Re-Attention in the last {last}."
        attention = {"attention": _last_blocks(int(depth), last)}
        _register(f"deepvit_{name}", VisionTransformer, {**defaults, **attention}, _cfg(**conv), what)
        what = f"The plain ViT of deepvit_{name}'s size."
        _register(f"plainvit_{name}", VisionTransformer, defaults, _cfg(**conv), what)
    at_384 = {**large, "attention": _last_blocks(32, 12), "img_size": 384}
    _register("deepvit_l_384", VisionTransformer, at_384, _cfg(384, crop_pct=1.0, **conv), "DeepViT-L at 384 px.")


def _register_alternet() -> None:
    cfg = _cfg(**IMAGENET, first_conv="stem.0", fixed_input_size=False, pool_size=(7, 7))
    for depth, unit, depths, attention_depths in (
        (18, "basic", (2, 2, 2, 2), (0, 1, 1, 1)),
        (34, "basic", (3, 4, 6, 4), (0, 1, 3, 2)),
        (50, "bottleneck", (3, 4, 6, 4), (0, 1, 3, 2)),
        (101, "bottleneck", (3, 4, 23, 4), (0, 1, 3, 2)),
        (152, "bottleneck", (3, 8, 36, 4), (0, 1, 3, 2)),
    ):
        defaults = {"unit": unit, "depths": depths, "attention_depths": attention_depths}
        _register(f"alternet_{depth}", AlterNet, defaults, cfg, f"AlterNet-{depth} for ImageNet.")
        cifar = {**cfg, "input_size": (3, 32, 32), "num_classes": 100, "crop_pct": 1.0, "pool_size": (4, 4)}
        small = {**defaults, "stem": "cifar", "window_size": 4, "num_classes": 100}
        what = f"AlterNet-{depth} for CIFAR-100, 32 px, window 4."
        _register(f"alternet_{depth}_cifar", AlterNet, small, cifar, what)


def _register_digits() -> None:
    size = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 6,
        "num_heads": 4,
        "mlp_ratio": 3.0,
        "num_classes": 10,
    }
    cfg = _cfg(32, num_classes=10, crop_pct=1.0)
    _register("deit_digits", VisionTransformer, size, cfg, "A plain ViT of 6 blocks × 64 at 32 px, patch 4.")
    deep = {**size, "attention": _last_blocks(6, 3)}
    _register("deepvit_digits", VisionTransformer, deep, cfg, "The same with Re-Attention in the last 3 blocks.")


_register_deit()
_register_anti_oversmoothing()
_register_deepvit()
_register_alternet()
_register_digits()
