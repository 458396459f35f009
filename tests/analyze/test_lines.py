"""What `vitx analyze` prints of each metric, from records whose numbers are known."""

from typing import Any

import pytest

from vitx.analyze import METRICS
from vitx.analyze.lanczos import Eigenvalues
from vitx.analyze.metrics.adversarial import AdversarialRobustness
from vitx.analyze.metrics.attention_collapse import AttentionCollapse
from vitx.analyze.metrics.confidence import Confidence
from vitx.analyze.metrics.corruptions import CorruptionRobustness
from vitx.analyze.metrics.fourier import Fourier, Spectrum
from vitx.analyze.metrics.frequency_noise import FrequencyRobustness
from vitx.analyze.metrics.hessian import HessianSpectrum
from vitx.analyze.metrics.hessian_density import HessianDensity
from vitx.analyze.metrics.landscape import LossLandscape
from vitx.analyze.metrics.lesions import Lesion, Lesions
from vitx.analyze.metrics.occlusion import Occlusion
from vitx.analyze.metrics.over_smoothing import OverSmoothing
from vitx.analyze.metrics.residual_update import ResidualUpdate
from vitx.analyze.metrics.rollout import Rollout
from vitx.analyze.metrics.temperature import TemperatureScaling
from vitx.analyze.metrics.trajectory import Trajectory
from vitx.analyze.metrics.variance import Variance
from vitx.core.files import Record

HALF, FEW = "50.0 % [40.4, 59.6]", "10.0 % [5.5, 17.4]"  # of 100 images, Wilson


def made(kind: type[Record], **fields: Any) -> Record:
    """A record of which only the fields that a line reads are given."""
    return kind.model_construct(**fields)


def eigenvalues(*values: float) -> Eigenvalues:
    return Eigenvalues(values=[*values], residuals=[0.0] * len(values), products=4, converged=True)


def lesion(accuracy: float, lost: int, gained: int) -> Lesion:
    return Lesion(accuracy=accuracy, lost=lost, gained=gained, kind="attention")


def units(**amplitudes: float) -> dict[str, Spectrum]:
    kinds: dict[str, Any] = {"embedding": None, "a": "attention", "b": "mlp", "c": "attention"}
    return {
        name: Spectrum(kind=kinds[name], frequencies=(0.0, 1.0), log_amplitude=(0.0, value))
        for name, value in amplitudes.items()
    }


LINES: list[tuple[str, Record, str]] = [
    (
        "adversarial",
        made(
            AdversarialRobustness, images=100, epsilons=(1 / 255, 4 / 255), clean=0.5, fgsm=(0.4, 0.1), pgd=(0.3, 0.0)
        ),
        f"{HALF}; ε = 4/255: FGSM {FEW}, PGD 0.0 % [0.0, 3.7]",
    ),
    (
        "attention-collapse",
        made(
            AttentionCollapse,
            layers=("0", "1", "2"),
            columns=("0", "1", "2"),
            matrix=((1.0, 0.5, 0.1), (0.5, 1.0, 0.95), (0.1, 0.95, 1.0)),
            threshold=0.9,
            similar_blocks=1,
            head_diversity={"0": 0.3, "2": 0.4},
            intervals={"neighbours": {"2": (0.9, 0.99)}, "head_diversity": {}},
        ),
        "1 of 2 layers above 0.9 to the one before; similarity to it 0.5 → 0.95 [0.9, 0.99]; "
        "1 − cosine of heads 0.3 → 0.4",
    ),
    (
        "confidence",
        made(
            Confidence,
            images=100,
            accuracy=0.5,
            nll=1.23456,
            ece=0.0712,
            null_ece=(0.021, 0.043),
            brier=0.6,
            intervals={"nll": {"": (1.1, 1.4)}, "ece": {"": (0.05, 0.0955)}, "brier": {"": (0.5, 0.7)}},
        ),
        f"top-1 {HALF}, NLL 1.235 [1.100, 1.400], ECE 7.1 [5.0, 9.6] % (perfect calibration: 2.1 %, up to 4.3 %), "
        "Brier 0.600 [0.500, 0.700]",
    ),
    (
        "corruptions",
        made(
            CorruptionRobustness,
            images=100,
            clean=0.5,
            accuracy={"fog": (0.4, 0.3), "snow": (0.1, 0.2)},
            mean_accuracy=0.25,
            intervals={"mean_accuracy": {"": (0.2, 0.3125)}},
        ),
        f"{HALF} → 25.0 [20.0, 31.2] % on average of 2 of 15 corruptions, {FEW} under the worst severity of snow",
    ),
    (
        "fourier",
        made(
            Fourier,
            units=units(embedding=-1.0, a=-2.0, b=-1.5, c=-3.0),
            step={"a": -1.0, "b": 0.5, "c": -1.5},
            intervals={"highest": {"c": (-3.5, -2.5)}, "step": {"a": (-1.2, 0.1), "b": (0.1, 0.9), "c": (-2.0, -1.0)}},
        ),
        "highest frequency -1 → -3 [-3.5, -2.5]; 1 of 2 attention units lower it, 0 raise it; "
        "0 of 1 MLP units lower it, 1 raise it",
    ),
    (
        "frequency-noise",
        made(FrequencyRobustness, images=100, clean=0.5, accuracy=(0.1, 0.3, 0.5)),
        f"clean {HALF}; lowest band {FEW}, highest {HALF}",
    ),
    (
        "hessian",
        made(
            HessianSpectrum,
            batches=[eigenvalues(4.0, -1.0), eigenvalues(-2.0, -3.0), eigenvalues(6.0, 3.0)],
            mean_positive=13 / 3,
        ),
        # Means of 4, −2, 6; of 4, 6 and 3, by the residuals 4 − R, 0 and 9 − 2R; of 50, 100, 0 %.
        "largest 2.67 [-7.68, 13], mean of the positive 4.33 [3.51, 5.16], negative 50 [0, 100] %",
    ),
    (
        "hessian",
        made(HessianSpectrum, batches=[eigenvalues(4.0, -1.0)], mean_positive=4.0),
        "largest 4, mean of the positive 4, negative 50 %",
    ),
    (
        "hessian-density",
        made(HessianDensity, nodes=[0.5, -0.25, 8.0], products=12),
        "nodes from -0.25 to 8, 12 products",
    ),
    (
        "landscape",
        made(LossLandscape, axis=[-1, 0, 1], nll=[[2, 3, None], [4, 0.5, 5], [6, 7, 9]], path_share=0.4),
        "NLL 0.500 at the weights, 2 to 9 at the edge; 40 % of the training path lies in the plane",
    ),
    (
        "landscape",
        made(LossLandscape, axis=[-1, 0, 1], nll=[[None] * 3, [None] * 3, [None] * 3], path_share=None),
        "NLL not finite at the weights, not finite at the edge",
    ),
    (
        "lesions",
        made(
            Lesions,
            images=100,
            accuracy=0.5,
            units={"a": lesion(0.1, 42, 2), "b": lesion(0.3, 20, 0), "c": lesion(0.51, 3, 4)},
        ),
        f"{HALF}; without a -40.0 [-49.6, -28.8] points; without c +1.0 [-4.5, +6.4] points",
    ),
    (
        "occlusion",
        made(
            Occlusion,
            images=100,
            ratios=(0.1, 0.4, 0.9),
            clean=0.5,
            random=(0.5, 0.1, 0.0),
            most_salient=(0.4, 0.1, 0.0),
            least_salient=None,
        ),
        f"{HALF}; without 40% of the patches: random {FEW}, most salient {FEW}",
    ),
    (
        "over-smoothing",
        made(
            OverSmoothing,
            cos_sim={"0": 0.1, "1": 0.5, "2": 0.9},
            dc_share={"0": 0.2, "2": 0.8},
            longest={},
            attention_std={"0": 0.01, "1": 0.02},
            intervals={"cos_sim": {"2": (0.85, 0.95)}, "dc_share": {}, "longest": {}, "attention_std": {}},
        ),
        "CosSim 0.1 → 0.9 [0.85, 0.95], DC share 0.2 → 0.8, attention std 0.01 → 0.02",
    ),
    (
        "over-smoothing",
        made(
            OverSmoothing,
            cos_sim={},
            dc_share={},
            longest={"0": 1.5, "2": 4.0},
            attention_std={},
            intervals={"longest": {"2": (3.0, 5.0)}},
        ),
        "longest patch 1.5 → 4 [3, 5]",
    ),
    (
        "residual-update",
        made(ResidualUpdate, update={"0": 0.5, "1": 0.1, "2": 0.2}, intervals={"update": {"1": (0.05, 0.15)}}),
        "0.5 → 0.2; least in 1: 0.1 [0.05, 0.15]",
    ),
    (
        "rollout",
        made(Rollout, grid=(3, 4), largest=2.5, intervals={"largest": {"": (2.25, 2.75)}}),
        "the largest share of a patch is 2.5 [2.25, 2.75] times that of an even look over 3 × 4 patches",
    ),
    (
        "temperature",
        made(
            TemperatureScaling,
            temperature=1.5,
            nll=0.75,
            scaled_nll=0.5,
            ece=0.1,
            scaled_ece=0.02,
            intervals={
                "temperature": {"": (1.25, 1.75)},
                "scaled_nll": {"": (0.4, 0.6)},
                "scaled_ece": {"": (0.01, 0.03)},
            },
        ),
        "T = 1.5 [1.25, 1.75]: NLL 0.750 → 0.500 [0.400, 0.600], ECE 10.0 % → 2.0 [1.0, 3.0] %",
    ),
    ("trajectory", made(Trajectory, steps=[1, 2, 3], radius=[1.5, 4.0, 2.25]), "3 checkpoints, radius 1.5 → 2.25"),
    ("trajectory", made(Trajectory, steps=[1], radius=[1.5]), "1 checkpoint, radius 1.5 → 1.5"),
    (
        "variance",
        made(
            Variance,
            variance={"embedding": 0.5, "a": 0.25, "b": 1.0},
            kinds={"embedding": None, "a": "attention", "b": "mlp"},
            step={"a": -0.25, "b": 0.75},
            intervals={"variance": {}, "step": {}},
        ),
        "0.5 → 1; 0 of 1 attention units lower it, 0 raise it; 0 of 1 MLP units lower it, 0 raise it "
        "(too few images to tell)",
    ),
    (
        "variance",
        made(Variance, variance={"a": 0.25}, kinds={"a": "attention"}, step={}, intervals={"variance": {}, "step": {}}),
        "0.25 → 0.25; no two units have maps of one size",
    ),
]


@pytest.mark.parametrize(("metric", "record", "line"), LINES, ids=[name for name, *_ in LINES])
def test_the_line_of_a_metric(metric: str, record: Record, line: str) -> None:
    assert METRICS[metric].line(record) == line
