"""Networks of timm that PyTorch's exporter cannot trace as they are: a second form, or one message."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reference import randomize_like_trained
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model
from vitx.export.graph import tracing
from vitx.export.graph.from_model import graph_of
from vitx.export.graph.tracing import attention_form, trace
from vitx.export.rewrite.canonical import ExportAttention, canonical_blocks
from vitx.export.rewrite.rewrites import ImageClassifier, rewrite_checked

PREPROCESSING = Preprocessing(image_size=32)
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 5}


def classifier_of(name: str, **options: Any) -> Any:
    model = randomize_like_trained(timm.create_model(name, **{**SMALL, **options}))
    return ImageClassifier(model, PREPROCESSING).eval()


@pytest.mark.parametrize("opset", [20, 23])
def test_a_mask_that_the_fused_form_cannot_have(opset: int, tmp_path: Path) -> None:
    """BEiT's position biases: where the fused form is the first, the other takes its place."""
    classifier = classifier_of("beit_base_patch16_224")
    with attention_form(classifier, fused=True), tracing.without_logs(), pytest.raises(torch.onnx.OnnxExporterError):
        tracing._export(classifier, torch.zeros(2, 32, 32, 3, dtype=torch.uint8), opset, ("images", "logits"))
    graph = onnx_from_model(classifier, PREPROCESSING, (), tmp_path / "model.onnx", opset=opset)
    operators = Counter(node.op_type for node in graph.graph.node)
    assert (operators["Softmax"], operators["Attention"]) == (1, 0)


def test_the_form_that_suits_the_opset_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = classifier_of("vit_tiny_patch16_224", qk_norm=True)
    tried: list[bool] = []

    def export(traced: Any, *_: Any) -> Any:
        tried.append(traced.model.blocks[0].attn.fused_attn)
        raise torch.onnx.OnnxExporterError("no")

    monkeypatch.setattr(tracing, "_export", export)
    example = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    for opset, expected in ((20, [False, True]), (23, [True, False])):
        tried.clear()
        with pytest.raises(InputError, match=f"in opset {opset}, with fused attention nor without"):
            trace(classifier, example, opset, ("images", "logits"))
        assert tried == expected
    assert classifier.model.blocks[0].attn.fused_attn


def test_layers_are_traced_in_the_form_that_is_asked_for_and_left_as_they_were() -> None:
    """A layer whose network turned the fused form off does not get it."""
    classifier = classifier_of("vit_tiny_patch16_224", qk_norm=True, depth=2)
    first, second = (block.attn for block in classifier.model.blocks)
    second.fused_attn = False
    ours = classifier_of("vit_tiny_patch16_224")
    (block,) = canonical_blocks(ours)
    assert isinstance(block.attn, ExportAttention)
    for fused in (True, False):
        with attention_form(classifier, fused=fused), attention_form(ours, fused=fused):
            assert (first.fused_attn, second.fused_attn, block.attn.fused) == (fused, False, fused)
        assert (first.fused_attn, second.fused_attn, block.attn.fused) == (True, False, False)


def test_the_embedding_is_what_the_first_block_reads() -> None:
    """EVA02's MLP splits its input in a node that the exporter assigns to no block."""
    graph = graph_of(classifier_of("eva02_tiny_patch14_224"), PREPROCESSING).graph
    (embedding,) = (value for node in graph for value in node.outputs if value.name == "embedding")
    assert [usage.node.op_type for usage in embedding.uses()] == ["LayerNormalization", "Add"]


class Branch(nn.Module):
    """Decides by a value, which a graph cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Eigenvalues(nn.Module):
    """An operation that the exporter has no operator for."""

    def forward(self, x: Tensor) -> Tensor:
        shift: Tensor = torch.linalg.eigvals(x[:, :3, :3]).real.sum()
        return x + shift


@pytest.mark.parametrize(
    ("module", "reason"), [(Branch(), "data-dependent expression"), (Eigenvalues(), "No ONNX function found for")]
)
def test_what_cannot_be_traced_is_one_message(
    module: nn.Module, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    classifier = classifier_of("vit_tiny_patch16_224")
    classifier.model.blocks[0].mlp.norm = module
    with pytest.raises(InputError) as error:
        graph_of(classifier, PREPROCESSING)
    text = str(error.value)
    beginning = "PyTorch's exporter cannot trace this network in opset 20, with fused attention nor without: in "
    assert text.startswith(f"{beginning}'model.blocks.0.mlp.norm': ")
    assert reason in text
    assert text.endswith("; give it other arguments with --model-arg, or take another network of its family")
    assert "\n" not in text
    assert error.value.exit_code == 2
    assert capfd.readouterr() == ("", "")


def test_a_reason_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any) -> Any:
        raise torch.onnx.OnnxExporterError("x" * 1000 + "\nsecond line")

    monkeypatch.setattr(tracing, "_export", export)
    with pytest.raises(InputError, match=r"without: in the network itself: x{300}; give it"):
        graph_of(classifier_of("vit_tiny_patch16_224"), PREPROCESSING)


def test_a_network_that_cannot_take_the_images_is_one_message() -> None:
    classifier = classifier_of("vit_tiny_patch16_224")
    with pytest.raises(InputError) as error:
        rewrite_checked(classifier, (), 48, rebuild=lambda: classifier)
    assert str(error.value) == (
        "this network cannot classify images of 48 × 48 pixels, in 'model.patch_embed': Input height (48) doesn't "
        "match model (32).; give it other arguments with --model-arg, or take another network of its family"
    )


def test_pooling_behind_channels_last_strides_is_a_mean() -> None:
    """ConvNeXt's last norm permutes; PyTorch's own pooling would then gather every value."""
    model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), num_classes=5).eval()
    classifier = ImageClassifier(model, PREPROCESSING).eval()
    operators = Counter(node.op_type for node in graph_of(classifier, PREPROCESSING).graph)
    assert (operators["ReduceMean"], operators["Gather"], operators["Range"]) == (1, 0, 0)


class Means(TorchFunctionMode):
    """Counts means."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is Tensor.mean
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("size", "mean"), [(1, 1), ((1, 1), 1), ([1, 1], 1), (2, 0), ((1, 2), 0), ((2, 1), 0)])
def test_only_pooling_to_one_pixel_is_a_mean(size: Any, mean: int) -> None:
    images = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    expected = nn.functional.adaptive_avg_pool2d(images, size)
    with Means() as means, tracing.PoolingAsMean():
        found = nn.AdaptiveAvgPool2d(size)(images)
        by_name = nn.functional.adaptive_avg_pool2d(input=images, output_size=size)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_name, expected)
    assert means.count == 2 * mean


def test_warnings_about_the_exporters_own_internals_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any, **__: Any) -> str:
        warnings.warn("old", DeprecationWarning, stacklevel=2)
        warnings.warn("new", FutureWarning, stacklevel=2)
        return "program"

    monkeypatch.setattr(torch.onnx, "export", export)
    with warnings.catch_warnings(record=True) as shown:
        assert tracing._export(nn.Identity(), torch.zeros(1), 20, ("images", "logits")) == "program"
    assert shown == []
