"""The networks, registered with timm: `import vitx.models; timm.create_model("deepvit_s")`."""

from vitx.models import registry
from vitx.models.attention import PlainAttention, ReAttention, TalkingHeadsAttention, fold_head_mix
from vitx.models.build import build_model, image_tensor, load_run_model, load_weights
from vitx.models.similarity import attention_std, token_similarity
from vitx.models.vit import Block, TokenOutputs, VisionTransformer

__all__ = [
    "Block",
    "PlainAttention",
    "ReAttention",
    "TalkingHeadsAttention",
    "TokenOutputs",
    "VisionTransformer",
    "attention_std",
    "build_model",
    "fold_head_mix",
    "image_tensor",
    "load_run_model",
    "load_weights",
    "registry",
    "token_similarity",
]
