"""What the training did to the network."""

from vitx.analyze.over_smoothing import OverSmoothing, over_smoothing
from vitx.models import attention_std, token_similarity

__all__ = ["OverSmoothing", "attention_std", "over_smoothing", "token_similarity"]
