"""Another number of tokens: position embeddings, and the statistics of Re-Attention's BatchNorm."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import ReAttention, VisionTransformer, attention_maps, recalibrate
from vitx.models.recalibration import measure_batch_norm, normalized_re_attentions, set_closed_form_means

SIZE: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def network() -> Any:
    model = VisionTransformer(**SIZE, attention="re-attention").double()
    randomize(model)
    return model.eval()


def row_sums(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Mean row sum of every layer's mixed maps, by head."""
    with torch.no_grad(), attention_maps(model, stage="mixed", of=lambda maps: maps.sum(-1).mean(dim=(0, 2))) as sums:
        model(images)
    return sums


def expected_sums(model: nn.Module, num_tokens: int) -> list[Tensor]:
    """N·β_h: what rows sum to when the mean is right."""
    return [num_tokens * norm.bias.detach() for _, norm in normalized_re_attentions(model)]


def test_the_closed_form_is_what_training_measures() -> None:
    model = network()
    measured = copy.deepcopy(model).train()
    for _, norm in normalized_re_attentions(measured):
        norm.momentum = 1.0
    measured(torch.randn(3, 3, 16, 16, dtype=torch.float64))
    set_closed_form_means(model, 17)
    pairs = list(zip(normalized_re_attentions(model), normalized_re_attentions(measured), strict=True))
    assert pairs
    for (_, ours), (_, theirs) in pairs:
        assert ours.running_mean is not None
        assert theirs.running_mean is not None
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, atol=1e-10, rtol=0)


def test_changing_the_image_size_keeps_the_row_sums() -> None:
    model = network()
    model.set_input_size(img_size=(32, 32))
    assert model.pos_embed.shape == (1, 65, 24)
    sums = row_sums(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    for found, expected in zip(sums.values(), expected_sums(model, 65), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_the_old_mean_breaks_the_row_sums() -> None:
    """The test above can fail: with the mean of 17 tokens, rows over 65 sum to something else."""
    model = network()
    model.set_input_size(img_size=(32, 32))
    set_closed_form_means(model, 17)
    sums = row_sums(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert any(
        (found - expected).abs().max() > 1e-3
        for found, expected in zip(sums.values(), expected_sums(model, 65), strict=True)
    )


def test_recalibrate_measures_the_variance() -> None:
    model, ema = network(), network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randn(4, 3, 16, 16, dtype=torch.float64)]
    assert recalibrate(model, [(batch, None) for batch in batches], ema=ema) == 2
    first_attention, first_norm = normalized_re_attentions(model)[0]
    maps: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            with attention_maps(model) as collected:
                model(batch)
            maps.append(collected["blocks.0.attn"])
    variances = []
    for m in maps:
        mixed = torch.einsum("hg,bgij->bhij", first_attention.reatten_matrix.weight.flatten(1), m)
        variances.append(mixed.transpose(0, 1).flatten(1).var(dim=1))
    assert first_norm.running_var is not None
    torch.testing.assert_close(first_norm.running_var, torch.stack(variances).mean(0), atol=1e-10, rtol=1e-8)
    for key, value in model.state_dict().items():
        if "var_norm.running" not in key and "num_batches" not in key:
            assert torch.equal(value, before[key])
    for one in (model, ema):
        for attention, norm in normalized_re_attentions(one):
            assert norm.momentum == 0.1
            assert not norm.training
            assert not attention.training
    for key, value in ema.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key])


def test_recalibrate_restores_training_mode_and_statistics_on_failure() -> None:
    model = network().train()
    norm = normalized_re_attentions(model)[0][1]
    assert norm.running_var is not None
    before = norm.running_var.clone()
    with pytest.raises(InputError, match="no batch to measure"):
        recalibrate(model, [])
    assert norm.running_var is not None
    assert torch.equal(norm.running_var, before)
    assert norm.momentum == 0.1
    assert all(module.training for module in model.modules())


class WithStem(nn.Module):
    """Another BatchNorm before the network, and the position embeddings that tell its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.stem, self.model, self.pos_embed = nn.BatchNorm2d(3).double(), model, model.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(self.stem(images))
        return out


@pytest.mark.parametrize("num_tokens", [None, 40])
def test_recalibration_measures_the_norms_over_heads_alone(num_tokens: int | None) -> None:
    one = WithStem(network())
    before = {key: value.clone() for key, value in one.stem.state_dict().items()}
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert recalibrate(one, [images, [images]], num_tokens=num_tokens) == 2
    for key, value in one.stem.state_dict().items():
        assert torch.equal(value, before[key])
    for attention, norm in normalized_re_attentions(one):
        matrix = attention.reatten_matrix
        assert matrix.bias is not None
        mean = matrix.weight[:, :, 0, 0].sum(dim=1) / (num_tokens or 17) + matrix.bias
        assert norm.running_mean is not None
        torch.testing.assert_close(norm.running_mean, mean, atol=1e-12, rtol=0)
        assert norm.num_batches_tracked == 2
    assert measure_batch_norm([one], [images]) == 1
    assert one.stem.running_mean is not None
    torch.testing.assert_close(one.stem.running_mean, images.mean(dim=(0, 2, 3)), atol=1e-12, rtol=0)


def test_the_mean_over_batches_is_that_of_all_models_and_nothing_else_trains() -> None:
    images = [torch.randn(4, 3, 16, 16, dtype=torch.float64) + shift for shift in (0.0, 5.0, -2.0)]
    first, second = nn.BatchNorm2d(3, momentum=0.7).double(), nn.BatchNorm2d(3, momentum=None).double().eval()
    models = [nn.Sequential(first, nn.Dropout(0.9)), nn.Sequential(second)]
    for norm in (first, second):
        norm.bias.data.fill_(1.0)
    assert measure_batch_norm(models, images) == 3
    for norm, momentum, training in ((first, 0.7, True), (second, None, False)):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        expected = torch.stack([batch.transpose(0, 1).flatten(1).var(dim=1) for batch in images]).mean(dim=0)
        torch.testing.assert_close(norm.running_var, expected, atol=1e-12, rtol=0)
        mean = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in images]).mean(dim=0)
        torch.testing.assert_close(norm.running_mean, mean, atol=1e-12, rtol=0)
        assert (norm.momentum, norm.training) == (momentum, training)
        assert norm.weight.grad is None
    assert models[0][1].training
    assert models[1].training, "its norm alone was in evaluation mode"


def test_what_went_wrong_leaves_the_statistics_and_says_so() -> None:
    model = WithStem(network()).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(InputError) as refused:
        measure_batch_norm([model], [])
    assert str(refused.value) == "no batch to measure the statistics of BatchNorm on: the loader is empty"
    with pytest.raises(RuntimeError):
        measure_batch_norm([model], [images, torch.zeros(1, 7, 16, 16, dtype=torch.float64)])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(module.training for module in model.modules())
    assert model.stem.momentum == 0.1
    with pytest.raises(InputError) as refused:
        recalibrate(nn.Sequential(network()), [images])
    assert str(refused.value) == ("Sequential has no position embeddings to count tokens by: pass num_tokens")


def test_closed_form_means_are_counted_and_take_no_gradient() -> None:
    model = network()
    assert set_closed_form_means(model, 9) == 2
    assert set_closed_form_means(VisionTransformer(**SIZE, attention="plain"), 9) == 0
    norm = normalized_re_attentions(model)[1][1]
    assert norm.running_mean is not None
    assert not norm.running_mean.requires_grad


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"img_size 30 is not divisible by patch_size \(4, 4\)"):
        network().set_input_size(img_size=30)


def test_layer_norm_over_heads_has_no_statistics() -> None:
    assert normalized_re_attentions(ReAttention(6, 2, norm="layer")) == []
