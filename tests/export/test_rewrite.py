"""Each rewrite is an identity: proved in float64 on random weights and random normalisation statistics."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, rewrite_for_export
from vitx.export.rewrite import FoldedReAttention, ImageClassifier, applied_rewrites
from vitx.models import ReAttention, VisionTransformer

IMAGENET = Preprocessing(image_size=16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 5,
    "patch_head": True,
    "drop_path_rate": 0.2,
    "attn_drop_rate": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "deit": {},
    "deepvit": {"attention": "re-attention"},
    "deepvit-s": {
        "attention": ["plain", "re-attention", "re-attention"],
        "patch_embedding": "cnn",
        "residual_scale": 0.5,
        "reatten_scale": 8**-0.5,
    },
    "talking-heads": {"attention": "talking-heads"},
    "gap": {"attention": "re-attention", "global_pool": "avg"},
    "layer-norm": {"attention": "re-attention", "reatten_norm": "layer"},
}


def network(name: str) -> Any:
    if name == "timm":
        model: Any = timm.create_model(
            "deit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5
        )
    else:
        model = VisionTransformer(**{**SMALL, **MODELS[name]})
        model.pretrained_cfg = {
            "first_conv": "patch_embed.conv1" if MODELS[name].get("patch_embedding") == "cnn" else "patch_embed.proj"
        }
    return randomize(model.double()).eval()


def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def reference_logits(model: nn.Module) -> Tensor:
    images = pixels().permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (IMAGENET.mean, IMAGENET.std))
    logits: Tensor = model((images - mean) / std)
    return logits


SUBSETS = [(), *[(name,) for name in ALL], ALL]


@pytest.mark.parametrize("rewrites", SUBSETS, ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize("name", [*MODELS, "timm"])
def test_each_rewrite_is_an_identity(name: str, rewrites: tuple[str, ...]) -> None:
    model = network(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = reference_logits(model)
    rewritten = rewrite_for_export(model, IMAGENET, rewrites=rewrites)
    logits = rewritten(pixels())
    assert logits.dtype == torch.float64
    assert not rewritten.training
    torch.testing.assert_close(logits, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original was changed"


def test_the_reference_depends_on_what_is_folded() -> None:
    """The proof can fail: without its statistics a Re-Attention computes something else."""
    model = network("deepvit")
    expected = reference_logits(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    assert (reference_logits(model) - expected).abs().max() > 1e-3


def test_no_batch_norm_is_left_in_re_attention() -> None:
    rewritten = rewrite_for_export(network("deepvit"), IMAGENET)
    assert not any(isinstance(module, nn.BatchNorm2d | ReAttention) for module in rewritten.modules())
    assert sum(isinstance(module, FoldedReAttention) for module in rewritten.modules()) == 3


def test_layer_norm_over_heads_keeps_its_path() -> None:
    rewritten = rewrite_for_export(network("layer-norm"), IMAGENET)
    assert sum(isinstance(module, ReAttention) for module in rewritten.modules()) == 3


def test_a_padded_stem_keeps_the_normalisation() -> None:
    counts = {
        name: applied_rewrites(ImageClassifier(network(name), IMAGENET), ["fold-normalization"])
        for name in ("deit", "deepvit-s")
    }
    assert counts == {"deit": {"fold-normalization": 1}, "deepvit-s": {"fold-normalization": 0}}


def test_dead_outputs_are_gone() -> None:
    rewritten = rewrite_for_export(network("deit"), IMAGENET)
    assert not any(isinstance(module, nn.Dropout) for module in rewritten.modules())
    assert not any("patch_head" in name for name, _ in rewritten.named_parameters())


def test_float_input_keeps_the_models_own_input() -> None:
    model = network("deepvit")
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    rewritten = rewrite_for_export(model, images="float")
    expected = model(images)
    torch.testing.assert_close(rewritten(images), expected, atol=1e-10 * expected.abs().max().item(), rtol=0)


def test_unknown_rewrite() -> None:
    with pytest.raises(InputError, match="unknown rewrite 'fold-head-norms': did you mean fold-head-norm"):
        rewrite_for_export(network("deit"), IMAGENET, rewrites=["fold-head-norms"])
