"""What the training did to the network."""

from vitx.analyze.analysis import Analysis, analyze, chosen_metrics, compare_representations
from vitx.analyze.metric import NotApplicable, Options
from vitx.analyze.metrics import METRICS
from vitx.analyze.metrics.cka import MinibatchCKA, linear_cka
from vitx.analyze.metrics.lesions import lesion_study
from vitx.analyze.spectrum import feature_variance, fourier_log_amplitude
from vitx.models import attention_std, token_similarity
from vitx.models.similarity import map_similarity as attention_similarity

__all__ = [
    "METRICS",
    "Analysis",
    "MinibatchCKA",
    "NotApplicable",
    "Options",
    "analyze",
    "attention_similarity",
    "attention_std",
    "chosen_metrics",
    "compare_representations",
    "feature_variance",
    "fourier_log_amplitude",
    "lesion_study",
    "linear_cka",
    "token_similarity",
]
