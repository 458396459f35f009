"""What the training did to a network: metrics of its activations, its answers and its loss (docs/analyses.md)."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.analyze.analysis import Analysis, analyze, chosen_metrics, compare_representations
    from vitx.analyze.analysis_report import figure
    from vitx.analyze.curvature import hessian_eigenvalues
    from vitx.analyze.findings.differences import differences
    from vitx.analyze.metric import AnalysisOptions, NotApplicable
    from vitx.analyze.metrics import METRICS
    from vitx.analyze.metrics.cka import MinibatchCKA, linear_cka
    from vitx.analyze.metrics.landscape import filter_normalized_direction
    from vitx.analyze.metrics.lesions import lesion_study
    from vitx.analyze.network_analyses import analyze_networks
    from vitx.analyze.options import AnalysisRequest
    from vitx.analyze.spectrum import feature_variance, fourier_log_amplitude
    from vitx.models import attention_std, token_similarity
    from vitx.models.similarity import attention_similarity

__all__ = [
    "METRICS",
    "Analysis",
    "AnalysisOptions",
    "AnalysisRequest",
    "MinibatchCKA",
    "NotApplicable",
    "analyze",
    "analyze_networks",
    "attention_similarity",
    "attention_std",
    "chosen_metrics",
    "compare_representations",
    "differences",
    "feature_variance",
    "figure",
    "filter_normalized_direction",
    "fourier_log_amplitude",
    "hessian_eigenvalues",
    "lesion_study",
    "linear_cka",
    "token_similarity",
]

__getattr__ = lazy_names(
    __name__,
    {
        "vitx.analyze.analysis": ("Analysis", "analyze", "chosen_metrics", "compare_representations"),
        "vitx.analyze.analysis_report": ("figure",),
        "vitx.analyze.findings.differences": ("differences",),
        "vitx.analyze.network_analyses": ("analyze_networks",),
        "vitx.analyze.options": ("AnalysisRequest",),
        "vitx.analyze.metric": ("AnalysisOptions", "NotApplicable"),
        "vitx.analyze.metrics": ("METRICS",),
        "vitx.analyze.metrics.cka": ("MinibatchCKA", "linear_cka"),
        "vitx.analyze.metrics.lesions": ("lesion_study",),
        "vitx.analyze.spectrum": ("feature_variance", "fourier_log_amplitude"),
        "vitx.models": ("attention_std", "token_similarity"),
        "vitx.analyze.curvature": ("hessian_eigenvalues",),
        "vitx.analyze.metrics.landscape": ("filter_normalized_direction",),
        "vitx.models.similarity": ("attention_similarity",),
    },
)
