"""Spectra and variances of a network's units, image by image, against numpy in float64."""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import timm
import torch

from run_fixture import ColourMean, digits_source
from vitx.analyze.activations import stream_activations
from vitx.analyze.intervals import layer_intervals, rounded
from vitx.analyze.metric import NotApplicable
from vitx.analyze.metrics.fourier import Fourier, FourierMetric
from vitx.analyze.metrics.variance import Variance, VarianceMetric
from vitx.data.open import open_images

UNITS = ("embedding", "blocks.0.attn", "blocks.0.mlp")
NO_MAP = r"^no unit has a square feature map as its output$"


@cache
def measured() -> tuple[Fourier, Variance, dict[str, Any]]:
    """Of twelve images in batches of five; and of each unit the maps (N, D, S, S), float64."""
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **size)
    source, images = digits_source("small", model), open_images("digits", "val").first(12)
    fourier, variance = FourierMetric(model), VarianceMetric(model)
    tokens: dict[str, list[Any]] = {}
    for batch in stream_activations(model, images, source.preprocessing, batch_size=5, maps=False):
        fourier.add(batch)
        variance.add(batch)
        for name, stream in batch.streams.items():
            tokens.setdefault(name, []).append(stream[:, 1:].double().numpy())
    maps = {name: np.concatenate(parts).transpose(0, 2, 1).reshape(12, 12, 4, 4) for name, parts in tokens.items()}
    return fourier.result(), variance.result(), maps


def test_a_spectrum_is_the_diagonal_of_numpys_transform_less_its_constant_part() -> None:
    found, _, maps = measured()
    amplitudes = {
        name: np.stack([np.log(np.abs(np.fft.fft2(each))[:, :, k, k] + 1e-6).mean(axis=1) for k in range(3)], axis=1)
        for name, each in maps.items()
    }
    relative = {name: each - each[:, :1] for name, each in amplitudes.items()}
    assert tuple(found.units) == UNITS
    assert [unit.kind for unit in found.units.values()] == [None, "attention", "mlp"]
    for name, unit in found.units.items():
        assert unit.frequencies == (0, 0.5, 1)
        assert unit.log_amplitude == pytest.approx(relative[name].mean(axis=0), abs=1e-4)
    highest = {name: relative[name][:, -1] for name in UNITS}
    steps = {name: highest[name] - highest[before] for before, name in pairwise(UNITS)}
    assert found.step == pytest.approx({name: each.mean() for name, each in steps.items()}, abs=1e-4)
    same_as(found.intervals, {"highest": layer_intervals(highest), "step": layer_intervals(steps)})
    ((name, values),) = found.per_image.items()
    assert name == "log amplitude at the highest frequency, last unit"
    assert values == pytest.approx(rounded(highest[UNITS[-1]]), abs=1e-4)


def test_a_variance_is_numpys_over_space_image_by_image() -> None:
    _, found, maps = measured()
    values = {name: each.var(axis=(2, 3), ddof=1).mean(axis=1) for name, each in maps.items()}
    assert found.variance == pytest.approx({name: values[name].mean() for name in UNITS}, rel=1e-5)
    assert found.kinds == {"embedding": None, "blocks.0.attn": "attention", "blocks.0.mlp": "mlp"}
    steps = {name: values[name] - values[before] for before, name in pairwise(UNITS)}
    assert found.step == pytest.approx({name: each.mean() for name, each in steps.items()}, abs=1e-5)
    same_as(
        found.intervals,
        {"variance": layer_intervals({name: values[name] for name in UNITS}), "step": layer_intervals(steps)},
    )


def same_as(found: Any, expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for field, intervals in expected.items():
        assert list(found[field]) == list(intervals)
        for layer, interval in intervals.items():
            assert found[field][layer] == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("metric", [FourierMetric, VarianceMetric])
def test_a_network_without_maps_has_none(metric: Any) -> None:
    with pytest.raises(NotApplicable, match=NO_MAP):
        metric(ColourMean(10)).result()
