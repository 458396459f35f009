"""The networks, registered with timm: `import vitx.models; timm.create_model("deepvit_s")`."""

from vitx.models import registry
from vitx.models.alternet import AlterNet
from vitx.models.attention import (
    AttnScaleAttention,
    NeutrenoAttention,
    PlainAttention,
    ReAttention,
    TalkingHeadsAttention,
    fold_head_mix,
    reattention_impl,
)
from vitx.models.attention_maps import attention_maps
from vitx.models.build import Normalization, build_model, image_tensor, load_run_model, load_weights
from vitx.models.public_checkpoint import LoadReport, load_public_checkpoint
from vitx.models.recalibration import recalibrate
from vitx.models.similarity import attention_std, token_similarity
from vitx.models.vit import Block, ContraNorm, TokenOutputs, VisionTransformer, forward_with_tokens
from vitx.models.window_attention import LocalAttention, WindowAttention

__all__ = [
    "AlterNet",
    "AttnScaleAttention",
    "Block",
    "ContraNorm",
    "LoadReport",
    "LocalAttention",
    "NeutrenoAttention",
    "Normalization",
    "PlainAttention",
    "ReAttention",
    "TalkingHeadsAttention",
    "TokenOutputs",
    "VisionTransformer",
    "WindowAttention",
    "attention_maps",
    "attention_std",
    "build_model",
    "fold_head_mix",
    "forward_with_tokens",
    "image_tensor",
    "load_public_checkpoint",
    "load_run_model",
    "load_weights",
    "reattention_impl",
    "recalibrate",
    "registry",
    "token_similarity",
]
