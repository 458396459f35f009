"""Class attention, whose maps have one query: what is left out of the metrics of maps and streams, and what is not."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.crossvit import CrossVit
from timm.models.volo import VOLO

from reference import randomize_like_trained
from vitx.analyze.activations import stream_activations
from vitx.analyze.metric import NotApplicable
from vitx.analyze.metrics.attention_collapse import AttentionCollapseMetric
from vitx.analyze.metrics.fourier import FourierMetric
from vitx.analyze.metrics.over_smoothing import OverSmoothingMetric
from vitx.analyze.metrics.residual_update import ResidualUpdateMetric
from vitx.analyze.units import residual_units
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images

DIGITS = open_images("digits", "val").first(3)
VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def network(name: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return randomize_like_trained(timm.create_model(name, num_classes=10, **arguments)).eval()


def test_maps_of_one_query_do_not_collapse() -> None:
    """CaiT's last two layers: each column over their one query has cosine 1 to every other."""
    model = network("cait_xxs24_224", **VIT)
    metric, spread = AttentionCollapseMetric(), OverSmoothingMetric(model)
    for batch in stream_activations(model, DIGITS, Preprocessing(image_size=32)):
        assert {name: value.shape[-2] for name, value in batch.maps.items()} == {
            "blocks.0.attn": 16,
            "blocks.1.attn": 16,
            "blocks_token_only.0.attn": 1,
            "blocks_token_only.1.attn": 1,
        }
        metric.add(batch)
        spread.add(batch)
        last = batch.maps["blocks_token_only.1.attn"].double().numpy()
    found = metric.result()
    assert found.layers == ("blocks.0.attn", "blocks.1.attn")
    assert set(found.repeated) == {"blocks.1.attn"}
    assert set(found.head_diversity) == set(found.layers)
    # The spread over keys is that of each query, and one query has it too.
    expected = np.std(last, axis=-1, ddof=1).mean()
    assert spread.result().attention_std["blocks_token_only.1.attn"] == pytest.approx(expected, rel=1e-5)


def test_a_network_of_class_attention_alone_has_no_collapse() -> None:
    model = network("xcit_nano_12_p8_224", img_size=32, embed_dim=24, depth=2, num_heads=2)
    metric = AttentionCollapseMetric()
    for batch in stream_activations(model, DIGITS, Preprocessing(image_size=32)):
        assert {value.shape[-2] for value in batch.maps.values()} == {1}
        metric.add(batch)
    with pytest.raises(NotApplicable, match="its attention has one query, the class token: there are no columns"):
        metric.result()


def volo() -> Any:
    """One outlooker on a map of 8 × 8, three attentions of 24 channels on 4 × 4, then two class blocks."""
    model = VOLO([1, 1, 1, 1], 64, num_classes=10, embed_dims=[24] * 4, num_heads=[2] * 4, post_layers=("ca", "ca"))
    return randomize_like_trained(model).eval()


def test_blocks_that_change_the_class_token_alone_are_not_dead() -> None:
    """VOLO's last two: the median token is a patch, which they leave as it is."""
    model = volo()
    metric = ResidualUpdateMetric(model)
    last = [unit for unit in residual_units(model) if unit.name.startswith("post_network")]
    assert [unit.kind for unit in last] == ["attention", "mlp"] * 2, "lesions remove them all the same"
    for batch in stream_activations(model, DIGITS, Preprocessing(image_size=64)):
        metric.add(batch)
        assert not [name for name in batch.streams if name.startswith("post_network")]
    found = metric.result()
    assert found.update
    assert set(found.unchanged.values()) == {0}


def test_the_class_token_of_crossvit_is_no_patch() -> None:
    """CosSim of a branch by its cosines pair by pair: the branches have 16 patches and 4."""
    torch.manual_seed(0)
    widths: dict[str, Any] = {"embed_dim": (12, 24), "num_heads": (2, 2), "depth": ((1, 2, 0),)}
    model: Any = CrossVit(32, (1.0, 1.0), (8, 16), num_classes=10, **widths)
    randomize_like_trained(model).eval()
    metric, fourier = OverSmoothingMetric(model), FourierMetric(model)
    for batch in stream_activations(model, DIGITS, Preprocessing(image_size=32)):
        metric.add(batch)
        fourier.add(batch)
        tokens = batch.streams["blocks.0.blocks.1.1.mlp"].double().numpy()
    assert tokens.shape == (3, 1 + 4, 24)
    pairs = [(i, j) for i in range(1, 5) for j in range(1, 5) if i != j]
    cosines = [a[i] @ a[j] / np.linalg.norm(a[i]) / np.linalg.norm(a[j]) for a in tokens for i, j in pairs]
    assert metric.result().cos_sim["blocks.0.blocks.1.1"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert "blocks.0.blocks.1.1.mlp" in fourier.result().units, "its patches form a square"
