"""The names under which timm finds our models: `import vitx.models; timm.create_model("deepvit_s")`."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn

from vitx.models.vit import VisionTransformer


def _cfg(image_size: int = 224, **kwargs: Any) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, image_size, image_size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


_CNN = {"first_conv": "patch_embed.conv1"}
_DIGITS = {"num_classes": 10, "crop_pct": 1.0}

default_cfgs = generate_default_cfgs(
    {
        "deepvit_16b": _cfg(),
        "deepvit_24b": _cfg(),
        "deepvit_32b": _cfg(),
        "deepvit_s": _cfg(**_CNN),
        "deepvit_l": _cfg(**_CNN),
        "deepvit_l_384": _cfg(384, crop_pct=1.0, **_CNN),
        "deit_digits": _cfg(32, **_DIGITS),
        "deepvit_digits": _cfg(32, **_DIGITS),
    }
)


def _create(variant: str, pretrained: bool, defaults: dict[str, Any], overrides: dict[str, Any]) -> VisionTransformer:
    model: VisionTransformer = build_model_with_cfg(
        VisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**defaults, **overrides},
    )
    return model


def _last_blocks(depth: int, count: int) -> list[str]:
    """Re-Attention in the last `count` of `depth` blocks, plain attention before."""
    return ["plain"] * (depth - count) + ["re-attention"] * count


def _deepvit_b(variant: str, depth: int, pretrained: bool, overrides: dict[str, Any]) -> VisionTransformer:
    defaults = {"embed_dim": 384, "depth": depth, "num_heads": 12, "mlp_ratio": 3.0, "attention": "re-attention"}
    return _create(variant, pretrained, defaults, overrides)


@register_model
def deepvit_16b(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT, 16 blocks, Re-Attention in all (DeepViT table 5)."""
    return _deepvit_b("deepvit_16b", 16, pretrained, kwargs)


@register_model
def deepvit_24b(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT, 24 blocks, Re-Attention in all."""
    return _deepvit_b("deepvit_24b", 24, pretrained, kwargs)


@register_model
def deepvit_32b(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT, 32 blocks, Re-Attention in all."""
    return _deepvit_b("deepvit_32b", 32, pretrained, kwargs)


@register_model
def deepvit_s(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT-S: CNN embedding, 16 blocks of width 396, Re-Attention in the last 5."""
    defaults = {
        "embed_dim": 396,
        "depth": 16,
        "num_heads": 12,
        "mlp_ratio": 3.0,
        "attention": _last_blocks(16, 5),
        "patch_embedding": "cnn",
        "residual_scale": 0.5,
        "reatten_scale": 33**-0.5,
    }
    return _create("deepvit_s", pretrained, defaults, kwargs)


_DEEPVIT_L = {
    "embed_dim": 420,
    "depth": 32,
    "num_heads": 12,
    "mlp_ratio": 3.0,
    "attention": _last_blocks(32, 12),
    "patch_embedding": "cnn",
    "residual_scale": 0.5,
}


@register_model
def deepvit_l(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT-L: CNN embedding, 32 blocks of width 420, Re-Attention in the last 12."""
    return _create("deepvit_l", pretrained, _DEEPVIT_L, kwargs)


@register_model
def deepvit_l_384(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeepViT-L at 384 px."""
    return _create("deepvit_l_384", pretrained, {**_DEEPVIT_L, "img_size": 384}, kwargs)


_DIGITS_SIZE = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 6, "num_heads": 4, "mlp_ratio": 3.0}


@register_model
def deit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """A plain ViT of 6 blocks × 64 at 32 px, patch 4."""
    return _create("deit_digits", pretrained, _DIGITS_SIZE, kwargs)


@register_model
def deepvit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """The same with Re-Attention in the last 3 blocks."""
    return _create("deepvit_digits", pretrained, {**_DIGITS_SIZE, "attention": _last_blocks(6, 3)}, kwargs)
