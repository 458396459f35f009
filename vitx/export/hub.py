"""timm's and Hugging Face's layout of a network: config.json, model.safetensors, README.md (the model card).

A plain ViT is written as timm's own network, so that timm and transformers' TimmWrapper load it without vitx. Others
keep their name, which `import vitx.models` registers with timm, and the card says so.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import check_folder, staged_folder, write_bytes, write_json
from vitx.export.hub_card import CARD, CONFIG, WEIGHTS, TimmForm, model_card
from vitx.models.attention import PlainAttention
from vitx.models.build import save_tensors
from vitx.models.source import Source, SourceRequest
from vitx.models.vit import AttentionOptions, ContraNorm, VisionTransformer

# timm's name that stands for any plain ViT: all of its sizes are arguments.
PLAIN_VIT = "vit_tiny_patch16_224"
# Arguments of ours that a plain ViT does not need, or that matter while it trains only.
NOT_WRITTEN = (
    *("attention", "feat_scale", "residual_scale", "patch_embedding", "patch_head", "position_std", "weight_init"),
    *("contranorm_scale", "contranorm_temperature"),
    *(field.name for field in fields(AttentionOptions)),
    *("drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate"),
)
# Largest relative difference of logits that the order of summation explains in float32.
TOLERANCE = 1e-5


def check_hub_folder(out: Path) -> None:
    """Raise InputError when `out` holds something else than a network in this layout: all of it is replaced."""
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if out.is_file() or (found and CONFIG not in found):
        raise InputError(f"--hub {out} exists and holds no {CONFIG}: choose another folder")
    check_folder(out)
    if others := [name for name in found if name not in (CONFIG, WEIGHTS, CARD)]:
        raise InputError(
            f"--hub {out} is replaced whole, and holds {others[0]} too: choose another folder, and copy its files there"
        )


def write_hub_folder(request: SourceRequest, bundle: Bundle, out: Path) -> Path:
    """Write the network that `bundle` was exported from, with the bundle's certificate in the model card.

    timm builds it once from what is written, and must give its logits: CheckFailed otherwise, and where the weights are
    not those of the bundle any more.
    """
    check_hub_folder(out)
    source = request.load_again(bundle.manifest.provenance.checkpoint_sha256)
    form = _form(source)
    tensors = dict(source.model.state_dict())
    if not form.imports:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("patch_head.")}
    _require_equal(source, form, tensors)
    with staged_folder(out) as stage:
        write_json(stage / CONFIG, _config(source, form))
        save_tensors(tensors, stage / WEIGHTS, metadata={"format": "pt"})
        write_bytes(stage / CARD, model_card(source, form, bundle).encode())
    return out


def _form(source: Source) -> TimmForm:
    model, spec = source.model, source.spec
    if not isinstance(model, VisionTransformer):
        imports = ("vitx.models",) if type(model).__module__.startswith("vitx.") else ()
        return TimmForm(spec.name, dict(spec.kwargs), imports)
    blocks: list[Any] = list(model.blocks)
    plain = not isinstance(model.norm, ContraNorm) and all(
        type(block.attn) is PlainAttention and block.lamb1 is None and block.residual_scale == 1 for block in blocks
    )
    if not plain or type(model.patch_embed) is not timm.layers.PatchEmbed:
        return TimmForm(spec.name, dict(spec.kwargs), ("vitx.models",))
    arguments = {
        "img_size": source.preprocessing.image_size,
        "patch_size": model.patch_embed.patch_size[0],
        "embed_dim": model.embed_dim,
        "depth": len(blocks),
        "num_heads": blocks[0].attn.num_heads,
        "mlp_ratio": blocks[0].mlp.fc1.out_features / model.embed_dim,
        "class_token": model.cls_token is not None,
        "global_pool": model.global_pool,
        "fc_norm": not isinstance(model.fc_norm, nn.Identity),
    }
    given = {key: value for key, value in spec.kwargs.items() if key not in NOT_WRITTEN}
    return TimmForm(PLAIN_VIT, {**arguments, **given}, ())


def _require_equal(source: Source, form: TimmForm, tensors: dict[str, Tensor]) -> None:
    """Build the network as a reader of the folder will, and compare logits on noise."""
    size = source.preprocessing.image_size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        other: nn.Module = timm.create_model(
            form.architecture, num_classes=len(source.class_names), **form.arguments
        ).eval()
        other.load_state_dict(tensors)
        with torch.inference_mode():
            own, found = source.model(images), other(images)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise CheckFailed(f"--hub: timm's '{form.architecture}' cannot be '{source.name}': {error}") from None
    difference = float((own - found).abs().max() / own.abs().max().clamp(min=1e-6))
    if not difference <= TOLERANCE:
        raise CheckFailed(
            f"--hub: timm's '{form.architecture}' gives other logits than '{source.name}' (relative error "
            f"{difference:.3g}, allowed {TOLERANCE:g}): export the bundle alone"
        )


def _config(source: Source, form: TimmForm) -> dict[str, Any]:
    model: Any = source.model
    pixels, published = source.preprocessing, getattr(model, "pretrained_cfg", {})
    return {
        "architecture": form.architecture,
        "num_classes": len(source.class_names),
        "num_features": getattr(model, "num_features", None),
        "label_names": list(source.class_names),
        "model_args": form.arguments,
        "pretrained_cfg": {
            "num_classes": len(source.class_names),
            "input_size": [3, pixels.image_size, pixels.image_size],
            "fixed_input_size": published.get("fixed_input_size", True),
            "pool_size": None,
            "interpolation": pixels.interpolation,
            "crop_pct": pixels.crop_fraction,
            "crop_mode": pixels.crop_mode,
            "mean": list(pixels.mean),
            "std": list(pixels.std),
            "first_conv": published.get("first_conv"),
            "classifier": published.get("classifier"),
        },
    }
