"""Every metric by name. Each file holds one metric: its record, its formula, its line of text and its figure."""

from vitx.analyze.metric import Metric
from vitx.analyze.metrics.adversarial import ADVERSARIAL_METRIC
from vitx.analyze.metrics.attention_collapse import ATTENTION_COLLAPSE_METRIC, MIXED_ATTENTION_COLLAPSE_METRIC
from vitx.analyze.metrics.cka import CKA_METRIC
from vitx.analyze.metrics.confidence import CONFIDENCE_METRIC
from vitx.analyze.metrics.corruptions import CORRUPTIONS_METRIC
from vitx.analyze.metrics.feature_similarity import FEATURE_SIMILARITY_METRIC
from vitx.analyze.metrics.fourier import FOURIER_METRIC
from vitx.analyze.metrics.frequency_noise import FREQUENCY_NOISE_METRIC
from vitx.analyze.metrics.hessian import HESSIAN_METRIC
from vitx.analyze.metrics.hessian_density import HESSIAN_DENSITY_METRIC
from vitx.analyze.metrics.landscape import LANDSCAPE_METRIC
from vitx.analyze.metrics.lesions import LESIONS_METRIC
from vitx.analyze.metrics.occlusion import OCCLUSION_METRIC
from vitx.analyze.metrics.over_smoothing import OVER_SMOOTHING_METRIC
from vitx.analyze.metrics.residual_update import RESIDUAL_UPDATE_METRIC
from vitx.analyze.metrics.rollout import ROLLOUT_METRIC
from vitx.analyze.metrics.temperature import TEMPERATURE_METRIC
from vitx.analyze.metrics.trajectory import TRAJECTORY_METRIC
from vitx.analyze.metrics.variance import VARIANCE_METRIC

METRICS: dict[str, Metric] = {
    "over-smoothing": OVER_SMOOTHING_METRIC,
    "attention-collapse": ATTENTION_COLLAPSE_METRIC,
    "attention-collapse-mixed": MIXED_ATTENTION_COLLAPSE_METRIC,
    "residual-update": RESIDUAL_UPDATE_METRIC,
    "feature-similarity": FEATURE_SIMILARITY_METRIC,
    "rollout": ROLLOUT_METRIC,
    "fourier": FOURIER_METRIC,
    "variance": VARIANCE_METRIC,
    "cka": CKA_METRIC,
    "lesions": LESIONS_METRIC,
    "confidence": CONFIDENCE_METRIC,
    "temperature": TEMPERATURE_METRIC,
    "corruptions": CORRUPTIONS_METRIC,
    "frequency-noise": FREQUENCY_NOISE_METRIC,
    "occlusion": OCCLUSION_METRIC,
    "adversarial": ADVERSARIAL_METRIC,
    "hessian": HESSIAN_METRIC,
    "hessian-density": HESSIAN_DENSITY_METRIC,
    "landscape": LANDSCAPE_METRIC,
    "trajectory": TRAJECTORY_METRIC,
}
