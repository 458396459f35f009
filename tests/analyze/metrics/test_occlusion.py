"""Patches painted over, of linear networks that look at patches we chose."""

import json

import numpy as np
import pytest
import timm
import torch
from torch import nn

from vitx.analyze.metrics.occlusion import RATIOS, default_patch_size, drop_patches, gradient_saliency, occlusion
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array

PREPROCESSING = Preprocessing(image_size=16, mean=(0.4, 0.4, 0.3), std=(0.2, 0.3, 0.4))
MEAN_COLOUR = [102, 102, 76]


class PatchWeights(nn.Module):
    """Class 1's logit is a weighted sum over 4 × 4 patches of the normalised red channel, class 0's is 0."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__()
        pattern = torch.as_tensor(weights.reshape(4, 4)).repeat_interleave(4, 0).repeat_interleave(4, 1)
        self.pattern = nn.Parameter(pattern)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score = (images[:, 0] * self.pattern).sum(dim=(1, 2))
        return torch.stack([torch.zeros_like(score), score], dim=1)


def images_of(reds: np.ndarray) -> UInt8Array:
    """Images (B, 16, 16, 3) whose patches have these reds (B, 16), green and blue at the mean."""
    red = reds.reshape(-1, 4, 4).repeat(4, axis=1).repeat(4, axis=2)
    return np.stack([red, np.full_like(red, MEAN_COLOUR[1]), np.full_like(red, MEAN_COLOUR[2])], axis=-1).astype(
        np.uint8
    )


def test_dropped_patches_have_the_mean_colour_and_the_others_are_untouched() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    dropped = drop_patches(images, np.array([[0, 7], [15, 15]]), 4, np.array(MEAN_COLOUR, np.uint8))
    assert (dropped[0, :4, :4] == MEAN_COLOUR).all()
    assert (dropped[0, 4:8, 12:] == MEAN_COLOUR).all()
    assert (dropped[1, 12:, 12:] == MEAN_COLOUR).all()
    assert (dropped != images).any(axis=-1).sum(axis=(1, 2)).tolist() == [32, 16]


def test_saliency_is_the_effect_of_painting_a_patch_over() -> None:
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.5, 2, 16)
    images = images_of(rng.integers(140, 256, (3, 16)))
    model = PatchWeights(weights).double()
    saliency = gradient_saliency(model, PREPROCESSING)(images, 4)
    logits = predictor(model, PREPROCESSING)(images)[:, 1]
    for patch in range(16):
        painted = drop_patches(images, np.full((3, 1), patch), 4, np.array(MEAN_COLOUR, np.uint8))
        effect = logits - predictor(model, PREPROCESSING)(painted)[:, 1]
        # A patch is flat here: its 16 pixels' effects are equal, so their norm is their sum over √16.
        np.testing.assert_allclose(saliency[:, patch] * 4, effect, rtol=1e-4)
    np.testing.assert_allclose(
        saliency, 4 * weights * (images[:, ::4, ::4, 0].reshape(3, 16) / 255 - 0.4) / 0.2, rtol=1e-6
    )


def test_saliency_of_half_precision_ranks_small_effects() -> None:
    """Of up to 1/4096 for a value, as those of images of many pixels are."""
    weights = np.linspace(1e-6, 1e-4, 16)
    model = PatchWeights(weights).half()
    saliency = gradient_saliency(model, PREPROCESSING)(images_of(np.full((1, 16), 200)), 4)[0]
    np.testing.assert_allclose(saliency, 4 * weights * (200 / 255 - 0.4) / 0.2, rtol=0.05)


def test_dropping_follows_the_ranking() -> None:
    """One patch decides: gone at once when the most salient go first, kept until everything goes last."""
    rng = np.random.default_rng(2)
    weights = np.full(16, 1e-3)
    weights[5] = 1
    images = images_of(np.where(np.arange(16) == 5, 255, rng.integers(0, 90, (40, 16))))
    model = PatchWeights(weights).double()
    ratios = (0, 1 / 16, 0.5, 15 / 16, 1)
    measured = occlusion(
        predictor(model, PREPROCESSING),
        [images[:25], images[25:]],
        np.ones(40, int),
        patch_size=4,
        mean=PREPROCESSING.mean,
        saliency=gradient_saliency(model, PREPROCESSING),
        ratios=ratios,
        seed=9,
    )
    assert measured.clean == 1
    assert measured.most_salient is not None
    assert measured.least_salient is not None
    assert measured.most_salient[:3] == (1, 0, 0)
    assert measured.least_salient[:4] == (1, 1, 1, 1)
    kept = [np.flatnonzero(np.random.default_rng((9, i)).permutation(16) == 5)[0] >= 8 for i in range(40)]
    assert measured.random[2] == np.mean(kept)
    assert measured.images == 40
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)


def test_without_saliency_any_function_will_do() -> None:
    images = np.zeros((3, 16, 16, 3), np.uint8)
    measured = occlusion(
        lambda batch: np.eye(2)[np.zeros(len(batch), int)], [images], np.array([0, 0, 1]), patch_size=8, mean=(0, 0, 0)
    )
    assert measured.ratios == RATIOS == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert measured.random == (2 / 3,) * 9
    assert measured.most_salient is None


def test_patches_are_painted_in_the_mean_colour() -> None:
    seen: list[UInt8Array] = []

    def predict(batch: UInt8Array) -> np.ndarray:
        seen.append(batch)
        return np.eye(2)[np.zeros(len(batch), int)]

    images = np.zeros((1, 3, 3, 3), np.uint8)
    occlusion(predict, [images], np.array([0]), patch_size=1, mean=PREPROCESSING.mean, ratios=(0, 2 / 9, 1))
    painted = [(batch == MEAN_COLOUR).all(axis=-1).sum() for batch in seen]
    assert painted == [0, 0, 2, 9]


def test_default_patches_tile_the_image() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=12, depth=1, num_heads=1)
    assert default_patch_size(vit, 32) == 4
    for side, own, expected in ((32, 8, 8), (32, (8, 8), 8), (32, 2, 2), (34, 2, 34), (32, 5, 4), (32, (1, 1), 4)):
        network = nn.Module()
        network.patch_embed = nn.Module()
        network.patch_embed.patch_size = own  # type: ignore[assignment]
        assert default_patch_size(network, side) == expected
    for side, expected in ((224, 16), (32, 4), (21, 3), (20, 5), (30, 30), (23, 23)):
        assert default_patch_size(nn.Conv2d(3, 3, 1), side) == expected


def test_bad_input_is_refused() -> None:
    images = np.zeros((1, 16, 16, 3), np.uint8)
    model = PatchWeights(np.ones(16)).double()
    predict = predictor(model, PREPROCESSING)
    with pytest.raises(InputError, match="patches of 5 pixels do not tile an image of 16"):
        occlusion(predict, [images], np.array([0]), patch_size=5, mean=(0, 0, 0))
    with pytest.raises(InputError, match="patches of 5 pixels do not tile an image of 16"):
        gradient_saliency(model, PREPROCESSING)(images, 5)
    with pytest.raises(InputError, match="patches of 0 pixels do not tile an image of 16"):
        occlusion(predict, [images], np.array([0]), patch_size=0, mean=(0, 0, 0))
    for ratio in (1.5, -0.1):
        with pytest.raises(InputError, match=rf"ratios \({ratio},\)"):
            occlusion(predict, [images], np.array([0]), patch_size=4, mean=(0, 0, 0), ratios=[ratio])
