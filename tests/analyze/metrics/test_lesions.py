"""A lesion study against the same network with its branches replaced by hand, and what is counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

from reference import randomize_like_trained
from run_fixture import digits_source
from vitx.analyze import AnalysisOptions
from vitx.analyze.metric import MetricContext, NotApplicable
from vitx.analyze.metrics.lesions import Lesions, lesion_study, measure_lesions
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.models import image_tensor

SIZE: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 2}
DIGITS = open_images("digits", "val").first(30)
PREPROCESSING = Preprocessing(image_size=8, mean=(0.3, 0.4, 0.5), std=(0.2, 0.3, 0.4))


def network() -> Any:
    torch.manual_seed(0)
    return randomize_like_trained(timm.create_model("vit_tiny_patch16_224", num_classes=10, **SIZE)).eval()


def answers(model: Any) -> Any:
    (pixels,) = DIGITS.batches(PREPROCESSING, len(DIGITS))
    with torch.inference_mode():
        return model(image_tensor(pixels, PREPROCESSING.mean, PREPROCESSING.std)).argmax(dim=1).numpy()


class Nothing(nn.Module):
    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros_like(tokens)


def test_every_unit_alone_and_every_block_with_all_behind_it() -> None:
    whole, other = answers(network()), network()
    other.blocks[0].mlp = Nothing()
    labels = np.where(np.arange(30) % 3 == 0, answers(other), whole)  # some of them are gained without that unit
    found = lesion_study(network(), replace(DIGITS, labels=labels), PREPROCESSING, batch_size=7, quiet=True)
    assert (found.images, found.accuracy) == (30, (whole == labels).mean())
    removals: dict[str, list[tuple[int, str]]] = {
        f"blocks.{index}.{part}": [(index, part)] for index in range(3) for part in ("attn", "mlp")
    }
    assert {name: unit.kind for name, unit in found.units.items()} == {
        name: "attention" if name.endswith("attn") else "mlp" for name in removals
    }
    assert [*found.depth] == ["blocks.0", "blocks.1", "blocks.2"]
    removals |= {
        f"blocks.{first}": [(index, part) for index in range(first, 3) for part in ("attn", "mlp")]
        for first in range(3)
    }
    for name, removed in removals.items():
        model = network()
        for index, part in removed:
            setattr(model.blocks[index], part, Nothing())
        right, before = answers(model) == labels, whole == labels
        removal = (found.units | found.depth)[name]
        assert removal.accuracy == right.mean(), name
        assert (removal.lost, removal.gained) == ((before & ~right).sum(), (right & ~before).sum()), name
    assert found.units["blocks.0.mlp"].gained
    assert any(unit.lost for unit in found.units.values())


def test_the_network_is_as_before() -> None:
    model = network().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    lesion_study(model, DIGITS.first(4), PREPROCESSING, quiet=True)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def test_the_metric_is_the_study_in_batches_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    model, batches = network(), list[int]()
    source = replace(digits_source("small", model), preprocessing=PREPROCESSING)
    model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    context = MetricContext(source, DIGITS.first(10), AnalysisOptions(batch_size=7), quiet=True)
    found = measure_lesions(context)
    assert isinstance(found, Lesions)
    assert set(batches) == {7, 3}
    assert found == lesion_study(model, DIGITS.first(10), source.preprocessing, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_network_without_units_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"^the network has no residual units that are known$"):
        lesion_study(nn.Linear(3, 2), DIGITS, PREPROCESSING)
