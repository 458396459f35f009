"""The tensors of Hugging Face's transformers' ViT, DeiT and DINOv2, under timm's names."""

import re

import torch
from torch import Tensor

_FAMILY = r"(?:(?:vit|deit|dinov2|dinov2_with_registers)\.)?"
# What is written to a file, in all releases; where release 5 calls it otherwise in memory, that too. In this order.
_NAMES = (
    ("^" + _FAMILY, ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.", ""),  # cls_token; mask_token and register_tokens are what timm converts itself
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
_FIRST = re.compile(_FAMILY + r"embeddings\.patch_embeddings\.projection\.weight")
_PROJECTION = re.compile(r"(blocks\.\d+\.)attention\.(?:attention\.)?(query|key|value|q_proj|k_proj|v_proj)\.(\w+)")


def with_timms_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a ViT, DeiT or DINOv2 of transformers; return those of anything else as they are.

    Queries, keys and values, (C, C) each, become `attn.qkv`, (3C, C). The pooler, which no classifier reads, is left
    out. Raises RuntimeError for queries, keys and values whose shapes do not fit together.
    """
    if not any(map(_FIRST.fullmatch, tensors)):
        return tensors
    renamed: dict[str, Tensor] = {}
    projections: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        for old, new in _NAMES:
            key = re.sub(old, new, key)
        if found := _PROJECTION.fullmatch(key):
            block, which, part = found.groups()
            projections.setdefault(f"{block}attn.qkv.{part}", {})[which[0]] = tensor
        elif not key.startswith("pooler."):
            renamed[key] = tensor
    return renamed | {key: torch.cat([of[which] for which in "qkv" if which in of]) for key, of in projections.items()}
