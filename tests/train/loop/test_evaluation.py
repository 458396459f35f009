"""The metrics of an evaluation against a forward pass done by hand."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import vitx.models  # noqa: F401  # registers deepvit_digits
from training_jobs import TINY, metrics_of
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.models import attention_std, image_tensor, token_similarity
from vitx.train import resolve_recipe, train
from vitx.train.loop import evaluation, trainer
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


def test_the_images_are_counted_while_they_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = MagicMock()
    monkeypatch.setattr(evaluation, "progress", bar)
    resnet = timm.create_model("resnet10t", num_classes=10)
    evaluate(resnet, digits(6), PREPROCESSING, 4, torch.device("cpu"), quiet=False)
    bar.assert_called_once_with("evaluation", 6, quiet=False)
    assert bar.return_value.__enter__.return_value.update.call_args_list == [call(0), call(4)]


@pytest.mark.parametrize(
    ("attention", "decay", "passes"), [("plain", 0, 1), ("plain", 0.9, 2), ('["plain","re-attention"]', 0, 2)]
)
def test_weights_that_are_their_own_average_are_evaluated_once(
    attention: str, decay: float, passes: int, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BatchNorm twice: its statistics are measured for the average, and running ones in the trained weights."""
    counted = Mock(side_effect=evaluate)
    monkeypatch.setattr(trainer, "evaluate", counted)
    settings = (*TINY, "epochs=1", "batch_size=6", "workers=0", f"ema_decay={decay}")
    overrides = [*settings, f"model.kwargs.attention={attention}"]
    chosen = resolve_recipe("digits-deit", data=str(image_folder), overrides=overrides)
    train(chosen, tmp_path / "run", device="cpu", quiet=True)
    assert counted.call_count == passes
    [row] = metrics_of(tmp_path / "run")
    if passes == 1:
        assert row["raw"] == {name: row[name] for name in row["raw"]}
        folder, _ = RunFolder.open(tmp_path / "run").checkpoint("last")
        weights, average = (load_file(folder / f"{name}.safetensors") for name in ("model", "ema"))
        assert all(torch.equal(weights[key], average[key]) for key in weights)
