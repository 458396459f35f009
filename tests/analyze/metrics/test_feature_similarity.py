"""The cosines of a token at two layers, of tokens made by hand."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from reference import seq
from vitx.analyze.activations import EMBEDDING, Activations, stream_activations
from vitx.analyze.metric import NotApplicable
from vitx.analyze.metrics.feature_similarity import FeatureSimilarityMetric
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images

SIZE: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 6, "depth": 2, "num_heads": 1}
BLOCKS = ("blocks.0.mlp", "blocks.1.mlp")


def measured(*batches: dict[str, Tensor]) -> Any:
    metric = FeatureSimilarityMetric(timm.create_model("vit_tiny_patch16_224", num_classes=2, **SIZE))
    for streams in batches:
        metric.add(Activations(2, streams, {}, {}, torch.zeros(2, 2)))
    return metric.result()


def tokens(start: float) -> Tensor:
    """A class token and four patches of two images."""
    return seq(start, 2, 5, 6).float()


def test_the_similarity_of_two_layers_is_the_mean_cosine_of_their_patches() -> None:
    batches = [{name: tokens(start + k) for k, name in enumerate((EMBEDDING, *BLOCKS))} for start in (0.0, 0.3)]
    found = measured(*batches)
    assert found.layers == (EMBEDDING, "blocks.0", "blocks.1")
    cosines = [
        torch.cosine_similarity(each[EMBEDDING][:, 1:], each[BLOCKS[1]][:, 1:], dim=-1).mean(dim=1) for each in batches
    ]
    expected = torch.cat(cosines)
    assert found.matrix[0][2] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert found.matrix[0][0] == pytest.approx(1, rel=1e-6)
    assert found.per_image == {
        "feature similarity, embedding to last block": pytest.approx(expected.tolist(), rel=1e-5)
    }


def test_a_network_whose_first_blocks_have_maps_is_compared_from_its_first_tokens_on() -> None:
    """A ViT behind a ResNet: what is called embedding is the map before the first convolution."""
    size: dict[str, Any] = {"img_size": 64, "embed_dim": 6, "depth": 2, "num_heads": 1}
    model = timm.create_model("vit_small_resnet26d_224", num_classes=2, **size)
    metric = FeatureSimilarityMetric(model)
    for batch in stream_activations(model, open_images("digits", "val").first(2), Preprocessing(image_size=64)):
        metric.add(batch)
    found = metric.result()
    assert found.layers == ("blocks.0", "blocks.1")
    assert [*found.per_image] == ["feature similarity, blocks.0 to last block"]


def test_layers_of_other_widths_are_not_compared() -> None:
    found = measured({BLOCKS[0]: tokens(1)[..., :4], BLOCKS[1]: tokens(2)})
    assert found.matrix[0][1] is None
    assert found.per_image == {}
    with pytest.raises(NotApplicable, match="no patch tokens"):
        measured({EMBEDDING: tokens(0)[:, :2]})  # a class token and one patch
