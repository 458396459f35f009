"""The metrics of an evaluation against a forward pass done by hand."""

from typing import Any

import numpy as np
import pytest
import timm
import torch

import vitx.models  # noqa: F401  # registers deepvit_digits
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.models import attention_std, image_tensor, token_similarity
from vitx.train.loop.evaluation import evaluate

PREPROCESSING = Preprocessing(image_size=32)


def digits(count: int) -> ImageSet:
    return open_images("digits", "val").first(count)


def test_metrics_equal_a_pass_by_hand_and_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("deepvit_digits", depth=3, attention=["plain", "plain", "re-attention"]).train()
    images = digits(10)
    found = evaluate(model, images, PREPROCESSING, 4, torch.device("cpu"))
    assert model.training
    assert [block.attn.fused_attn for block in model.blocks[:2]] == [True, True]
    assert not any(module._forward_hooks for module in model.modules())

    model.eval()
    pixels = np.concatenate(list(images.batches(PREPROCESSING, 10)))
    inputs = image_tensor(pixels, PREPROCESSING.mean, PREPROCESSING.std)
    with torch.inference_mode():
        probabilities = model(inputs).double().softmax(-1)
        x = model.norm_pre(model._pos_embed(model.patch_embed(inputs)))
        for layer, block in enumerate(model.blocks):
            q, k, _ = block.attn.qkv(block.norm1(x)).reshape(10, 65, 3, 4, 16).permute(2, 0, 3, 1, 4)
            maps = (q @ k.transpose(-2, -1) / 4).softmax(-1)
            x = block(x)
            assert found.attention_std[layer] == pytest.approx(attention_std(maps).item(), rel=1e-3)
            assert found.cos_sim[layer] == pytest.approx(token_similarity(x[:, 1:]).item(), rel=1e-4)
    labels = torch.from_numpy(images.labels)
    assert len(found.cos_sim) == len(found.attention_std) == 3
    assert found.nll == pytest.approx(-probabilities[torch.arange(10), labels].log().mean().item(), rel=1e-6)
    assert found.top1 == (probabilities.argmax(-1) == labels).double().mean().item()


def test_models_of_timm_are_probed_and_those_without_blocks_have_no_layers() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=2)
    resnet = timm.create_model("resnet10t", num_classes=10)
    device = torch.device("cpu")
    assert len(evaluate(vit, digits(6), PREPROCESSING, 4, device).attention_std) == 2
    assert evaluate(resnet, digits(6), PREPROCESSING, 4, device).cos_sim == []
