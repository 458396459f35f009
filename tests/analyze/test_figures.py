"""What the figures of all metrics draw of records with known numbers: golden/figures.json has lines, bars and labels.

Where a figure is meant to change: `python tests/analyze/test_figures.py --write`, and look at the difference.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from vitx.analyze import METRICS
from vitx.analyze.lanczos import Density, Eigenvalues
from vitx.analyze.metrics.adversarial import AdversarialRobustness
from vitx.analyze.metrics.attention_collapse import AttentionCollapse
from vitx.analyze.metrics.confidence import Confidence, ReliabilityBin
from vitx.analyze.metrics.corruptions import CorruptionRobustness
from vitx.analyze.metrics.fourier import Fourier, Spectrum
from vitx.analyze.metrics.frequency_noise import FrequencyRobustness
from vitx.analyze.metrics.hessian import HessianSpectrum
from vitx.analyze.metrics.hessian_density import HessianDensity
from vitx.analyze.metrics.landscape import LossLandscape
from vitx.analyze.metrics.lesions import Lesion, Lesions, Removal
from vitx.analyze.metrics.occlusion import Occlusion
from vitx.analyze.metrics.over_smoothing import OverSmoothing
from vitx.analyze.metrics.residual_update import ResidualUpdate
from vitx.analyze.metrics.trajectory import Trajectory
from vitx.analyze.metrics.variance import Variance
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.files import Record

GOLDEN = Path(__file__).parent / "golden" / "figures.json"
LONGEST = 24  # numbers; of more the digest is kept


def matrix(off: float | None) -> dict[str, Any]:
    values = ((1.0, off, 0.25), (off, 1.0, 0.75), (0.25, 0.75, 1.0))
    return {"layers": ("a", "b", "c"), "columns": ("a", "b", "c"), "matrix": values}


def spectrum(kind: Any, highest: float) -> Spectrum:
    return Spectrum(kind=kind, frequencies=(0.0, 0.5, 1.0), log_amplitude=(0.0, highest / 2, highest))


def reliability(*counts: int) -> tuple[ReliabilityBin, ...]:
    return tuple(
        ReliabilityBin(
            lower=index / 4,
            upper=(index + 1) / 4,
            count=count,
            confidence=(index + 0.5) / 4 if count else None,
            accuracy=1 / 2 if count else None,
        )
        for index, count in enumerate(counts)
    )


Fields = dict[str, tuple[type[Record], dict[str, Any]]]
LOST = {"lost": 40, "gained": 2}


def up_to_corruptions(of: float, half: float, few: float) -> Fields:
    return {
        "adversarial": (
            AdversarialRobustness,
            {"images": 80, "epsilons": (1 / 255, 4 / 255), "clean": half, "fgsm": (half, few), "pgd": (few, 0.0)},
        ),
        "attention-collapse": (
            AttentionCollapse,
            {
                **matrix(half),
                "threshold": 0.8,
                "head_diversity": {"a": half, "c": few},
                "intervals": {"neighbours": {"b": (few, of)}, "head_diversity": {"c": (0.0, half)}},
            },
        ),
        "cka": (SimilarityMatrix, matrix(half if of == 1 else None)),
        "confidence": (Confidence, {"images": 80, "ece": 0.0712 * of, "bins": reliability(0, 30, int(10 * of), 40)}),
        "corruptions": (
            CorruptionRobustness,
            {
                "severities": (1, 3),
                "clean": 0.9 if of == 1 else None,
                "accuracy": {"fog": (half, few), "snow": (few, 0.0)},
            },
        ),
    }


def up_to_the_density(of: float, half: float, few: float) -> Fields:
    return {
        "fourier": (
            Fourier,
            {
                "units": {
                    "embedding": spectrum(None, -half),
                    "a": spectrum("attention", -2 * of),
                    "b": spectrum("mlp", -few),
                },
                "intervals": {"highest": {"a": (-3.0, -1.0)}},
            },
        ),
        "frequency-noise": (
            FrequencyRobustness,
            {"images": 80, "clean": half, "edges": (0.0, 0.5, 1.0), "accuracy": (few, half)},
        ),
        "hessian": (
            HessianSpectrum,
            {
                "batches": [
                    Eigenvalues(values=[4 * of, -1.0], residuals=[0.0, 0.0], products=2, converged=True),
                    Eigenvalues(values=[2.0, 3 * of], residuals=[0.0, 0.0], products=2, converged=True),
                ]
            },
        ),
        "hessian-density": (
            HessianDensity,
            {"smoothed": Density(grid=[-1.0, 0.0, 2 * of], density=[0.0, half, few], sigma=0.1)},
        ),
    }


def up_to_occlusion(of: float, half: float, few: float) -> Fields:
    return {
        "landscape": (
            LossLandscape,
            {
                "axis": [-1.0, 0.0, 1.0],
                "nll": [[40 * of, 3.0, None], [4.0, half, 5.0], [6.0, 7.0, 9.0]],
                "path": [(0.5, 0.25), (0.0, 0.0)] if of == 1 else [],
            },
        ),
        "lesions": (
            Lesions,
            {
                "images": 80,
                "accuracy": half,
                "units": {
                    "a": Lesion(accuracy=few, kind="attention", **LOST),
                    "b": Lesion(accuracy=half, kind="mlp", **LOST),
                    "c": Lesion(accuracy=0.0, kind="convolution", **LOST),
                },
                "depth": {"0": Removal(accuracy=0.0, **LOST), "1": Removal(accuracy=few, **LOST)},
            },
        ),
        "occlusion": (
            Occlusion,
            {
                "images": 80,
                "ratios": (0.25, 0.75),
                "clean": half,
                "random": (half, few),
                "most_salient": (few, 0.0) if of == 1 else None,
                "least_salient": (half, half) if of == 1 else None,
            },
        ),
    }


def up_to_variance(of: float, half: float, few: float) -> Fields:
    both = {"0": (half, of), "1": (few, of)}
    return {
        "over-smoothing": (
            OverSmoothing,
            {
                "cos_sim": {"0": few, "1": half},
                "dc_share": {"0": half, "1": few},
                "longest": {"0": 2 * of, "1": 3 * of},
                "attention_std": {"0": 0.1 * of, "1": 0.2},
                "intervals": {
                    "cos_sim": both,
                    "dc_share": {},
                    "longest": {"1": (1.0, 4.0)},
                    "attention_std": {},
                },
            },
        ),
        "residual-update": (
            ResidualUpdate,
            {"update": {"0": half, "1": few}, "intervals": {"update": both}},
        ),
        "trajectory": (Trajectory, {"steps": [0, 4, 8], "radius": [0.0, half, 1.0], "angle": [None, few, 0.0]}),
        "variance": (
            Variance,
            {
                "variance": {"embedding": half, "a": few, "b": 10 * of},
                "kinds": {"embedding": None, "a": "attention", "b": "mlp"},
                "intervals": {"variance": {"a": (0.0, half)}},
            },
        ),
    }


PARTS = (up_to_corruptions, up_to_the_density, up_to_occlusion, up_to_variance)


def records(of: float) -> dict[str, Record]:
    """By metric, those of a network; `of` tells two networks apart."""
    made = {name: record for part in PARTS for name, record in part(of, of / 2, of / 4).items()}
    return {name: kind.model_construct(**{"intervals": {}, **fields}) for name, (kind, fields) in made.items()}


def drawn(metric: str) -> dict[str, Any]:
    """Of one network, and of two beside each other: each panel."""
    first, second = records(1.0)[metric], records(0.5)[metric]
    found = {}
    draw = METRICS[metric].figure
    assert draw is not None
    for count, networks in (("one", {"net": first}), ("two", {"net": first, "other": second})):
        figure: Figure = draw(networks)
        figure.draw_without_rendering()
        found[f"{metric}, {count}"] = numbers(figure.get_size_inches())
        found |= {f"{metric}, {count}, panel {index}": panel(axes) for index, axes in enumerate(figure.axes)}
    return found


def numbers(values: Any) -> Any:
    """Of so many that they would fill pages the digest."""
    flat = [
        None if not np.isfinite(value) else float(f"{value:.4g}") + 0.0
        for value in np.ma.asarray(values, dtype=np.float64).filled(np.nan).ravel().tolist()
    ]
    return flat if len(flat) <= LONGEST else hashlib.sha256(repr(flat).encode()).hexdigest()[:16]


def panel(axes: Any) -> dict[str, Any]:
    legend = axes.get_legend()
    ticks = axes.get_xticklabels()[:1] + axes.get_yticklabels()[:1]
    found = {
        "titles": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), getattr(axes, "get_zlabel", str)()],
        "title_size": axes.title.get_fontsize(),
        "scales": [axes.get_xscale(), axes.get_yscale(), str(axes.get_aspect())],
        "limits": numbers([*axes.get_xlim(), *axes.get_ylim()]),
        "ticks": [each.get_rotation() for each in ticks] + [numbers(axes.get_xticks()), numbers(axes.get_yticks())],
        "lines": [line(each) for each in axes.lines],
        "bars": [bar(each) for each in axes.patches],
        "labels": [str(each.get_label()) for each in axes.containers if isinstance(each, BarContainer)],
        "texts": [[each.get_text(), each.get_fontsize(), to_hex(each.get_color())] for each in axes.texts],
        "images": [[numbers(each.get_array()), each.get_cmap().name, numbers(each.get_clim())] for each in axes.images],
        "surfaces": [surface(each) for each in axes.collections],
        "legend": None
        if legend is None
        else [[each.get_text(), each.get_fontsize()] for each in legend.get_texts()]
        + [legend._loc, legend._ncols, numbers(legend.get_bbox_to_anchor().transformed(axes.transAxes.inverted()))],
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def line(each: Any) -> list[Any]:
    look = [to_hex(each.get_color()), each.get_linestyle(), str(each.get_marker()), to_hex(each.get_markerfacecolor())]
    sizes = [each.get_linewidth(), each.get_markersize(), each.get_markeredgewidth()]
    x, y = (np.asarray(each.get_data(orig=True)[axis]) for axis in (0, 1))
    return [str(each.get_label()), x.tolist() if x.dtype.kind == "U" else numbers(x), numbers(y), *look, *sizes]


def bar(each: Any) -> list[Any]:
    look = [to_hex(each.get_facecolor(), keep_alpha=True), to_hex(each.get_edgecolor()), each.get_hatch()]
    return [str(each.get_label()), numbers(each.get_path().transformed(each.get_patch_transform()).vertices), *look]


def surface(each: Any) -> list[Any]:
    vertices = np.concatenate([path.vertices for path in each.get_paths()] or [np.empty((0, 2))])
    return [type(each).__name__, numbers(vertices), numbers(each.get_linewidths()), numbers(each.get_facecolor())]


@pytest.mark.parametrize("metric", sorted(records(1.0)))
def test_figures_draw_what_was_measured(metric: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    expected = {name: value for name, value in golden.items() if name.partition(",")[0] == metric}
    assert json.loads(json.dumps(drawn(metric))) == expected


def test_every_figure_is_here() -> None:
    shared = {"feature-similarity": "cka", "attention-collapse-mixed": "attention-collapse"}
    drawing = {name: metric.figure for name, metric in METRICS.items() if metric.figure is not None}
    assert {*drawing} == {*records(1.0), *shared}
    assert all(drawing[name] is drawing[other] for name, other in shared.items())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    found = [item for metric in sorted(records(1.0)) for item in drawn(metric).items()]
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in found)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
