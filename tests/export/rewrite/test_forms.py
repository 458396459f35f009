"""The form of blocks that rewrites work on, the rewrites' names and check, and what is said of their cost."""

import copy
import math
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite import cost, rewrites
from vitx.export.rewrite.canonical import (
    ExportBlock,
    HeadMix,
    _is_supported,
    canonical_blocks,
    linear_of,
    scale_outputs,
    set_bias,
    vision_transformer,
)
from vitx.export.rewrite.rewrites import (
    ALL,
    REWRITES,
    ImageClassifier,
    applied_rewrites,
    rewrite_checked,
    rewrite_for_export,
    select_rewrites,
)
from vitx.models import VisionTransformer

PREPROCESSING = Preprocessing(image_size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SMALL: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 4,
    "mlp_ratio": 1.0,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"residual_scale": 0.5, "init_values": 0.1},
    "no-norm": {"attention": "re-attention", "reatten_norm": "none"},
    "talking": {"attention": "talking-heads", "talking_heads_bias": True},
    "two-kinds": {"attention": ["re-attention", "plain"]},
}


def network(name: str) -> Any:
    model: Any = VisionTransformer(**{**SMALL, **NETWORKS[name]})
    model.pretrained_cfg = {"first_conv": "patch_embed.proj"}
    return randomize(model.double()).eval()


def pixels() -> Tensor:
    return torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def require_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10 * expected.abs().max().item(), rtol=0)


class MeanOfTokens(nn.Module):
    """A norm that mixes tokens, as none of timm's does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-2, keepdim=True)


def test_which_blocks_are_supported() -> None:
    block = network("scaled").blocks[0]
    assert _is_supported(block)
    for part, other in (("ls1", nn.Linear(1, 1)), ("ls2", nn.Linear(1, 1)), ("mlp", nn.Identity())):
        changed_block = copy.deepcopy(block)
        setattr(changed_block, part, other)
        assert not _is_supported(changed_block), part
    for part, module in (("fc1", nn.Conv2d(1, 1, 1)), ("norm", nn.LayerNorm(12))):
        changed_block = copy.deepcopy(block)
        setattr(changed_block.mlp, part, module)
        assert not _is_supported(changed_block), part
    for norm, known in ((nn.RMSNorm(12), True), (nn.Identity(), True), (MeanOfTokens(), False)):
        for part in ("norm1", "norm2"):
            changed_block = copy.deepcopy(block)
            setattr(changed_block, part, norm)
            assert _is_supported(changed_block) is known, (part, norm)
    other_attention = copy.deepcopy(block)
    other_attention.attn = nn.MultiheadAttention(12, 3)
    assert not _is_supported(other_attention)
    assert not _is_supported(block.attn)
    options = {key: value for key, value in SMALL.items() if key != "mlp_ratio"}
    of_timm: Any = timm.create_model("vit_tiny_patch16_224", **options)
    assert _is_supported(of_timm.blocks[0])
    for part in ("q_norm", "k_norm", "norm"):
        normed = copy.deepcopy(of_timm.blocks[0])
        setattr(normed.attn, part, nn.LayerNorm(4))
        assert not _is_supported(normed), part
    scaled: Any = VisionTransformer(**SMALL, feat_scale=True, attention="attn-scale").blocks[0]
    assert _is_supported(scaled, tokens=5)
    assert not _is_supported(scaled), "how many keys AttnScale's mean is of, is not known"
    nn.init.constant_(scaled.lamb2, -0.5)
    assert _is_supported(scaled, tokens=5), "FeatScale's factor is not divided by"
    nn.init.constant_(scaled.attn.lamb, -1.0)
    assert not _is_supported(scaled, tokens=5), "AttnScale's is"
    gated = copy.deepcopy(of_timm.blocks[0])
    gated.attn.gate = nn.Linear(1, 1)
    assert not _is_supported(gated)
    subclass = copy.deepcopy(of_timm.blocks[0])
    subclass.attn.__class__ = type("Other", (type(subclass.attn),), {})
    assert not _is_supported(subclass)


def test_blocks_are_replaced_in_place_and_in_order() -> None:
    for training in (True, False):
        model = network("two-kinds").train(training)
        found = canonical_blocks(model)
        assert found == list(model.blocks)
        assert all(isinstance(block, ExportBlock) and block.training is training for block in found)
        assert canonical_blocks(model) == found
        assert [isinstance(block.attn.after, nn.Sequential) for block in found] == [True, False]
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    with pytest.raises(AssertionError):
        found[0](x, attn_mask=x)
    with pytest.raises(AssertionError):
        found[0](x, is_causal=True)
    assert found[1].attn.extra_repr() == "num_heads=3, head_dim=4, queries=all"


def test_what_can_be_one_node() -> None:
    attentions = {name: canonical_blocks(network(name))[0].attn for name in ("plain", "no-norm", "talking")}
    for name, attention in attentions.items():
        assert not attention.is_fused
        attention.fused = True
        assert attention.is_fused is (name == "plain")
    attentions["plain"].queries = 1
    assert not attentions["plain"].is_fused
    talking = attentions["talking"]
    talking.after = None
    assert not talking.is_fused, "a mix before the softmax"


def test_the_transformer_whose_forward_pass_is_timms() -> None:
    model: Any = network("plain")
    found: Any = vision_transformer(ImageClassifier(model, Preprocessing(image_size=16)))
    assert found is model
    assert vision_transformer(model) is found
    assert vision_transformer(nn.Linear(1, 1)) is None
    assert vision_transformer(nn.Sequential(nn.Linear(1, 1), model)) is None, "what is around it may read its tokens"
    for name in ("forward", "forward_features", "pool", "forward_head"):
        other = copy.deepcopy(model)
        other.__class__ = type("Other", (type(model),), {name: lambda self, x: x})
        assert vision_transformer(other) is None, name
    patched = copy.deepcopy(model)
    patched.forward_head = lambda x: x
    assert vision_transformer(patched) is None
    pooled = copy.deepcopy(model)
    pooled.attn_pool = nn.Identity()
    assert vision_transformer(pooled) is None


def test_layers_are_made_of_tensors() -> None:
    weight, bias = torch.ones(3, 2, dtype=torch.float64), torch.zeros(3)
    linear: Any = linear_of(weight, None)
    assert (linear.in_features, linear.out_features, linear.bias) == (2, 3, None)
    assert linear.weight.data_ptr() == weight.data_ptr()
    set_bias(linear, bias)
    assert linear.bias.dtype == torch.float64
    assert torch.equal(linear_of(weight, bias).bias, bias)
    assert isinstance(linear.bias, nn.Parameter)
    mix = HeadMix(weight, None)
    assert mix.weight_HH.data_ptr() != weight.data_ptr()
    assert "weight_HH" in dict(mix.named_buffers())
    scale_outputs(linear, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert linear.weight.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert isinstance(LayerScale(2), nn.Module)


ORDER = [
    *("remove-dead-outputs", "fold-normalization", "reparameterize", "fold-head-norm", "split-rank-one-bias"),
    *("fold-attention-scale", "fold-residual-scale", "fold-layer-norm-affine", "drop-row-constants", "fold-value-bias"),
    *("compute-class-token-only", "join-tokens", "pad-head-dim"),
]


def test_the_names_of_the_rewrites_and_their_order() -> None:
    assert list(REWRITES) == ORDER
    assert list(ALL) == ORDER[:-1]
    assert select_rewrites() == ALL
    assert select_rewrites(added=["pad-head-dim"]) == tuple(ORDER)
    assert select_rewrites(added=["join-tokens"]) == ALL
    assert select_rewrites(without=["join-tokens", "remove-dead-outputs"]) == tuple(ORDER[1:-2])
    with pytest.raises(InputError) as refused:
        select_rewrites(["pad-head-dim", "join-tokens"], ["join-tokens", "fold-head-norm"])
    assert str(refused.value) == "--with join-tokens --without join-tokens: choose one"
    for given in ({"added": ["fold"]}, {"without": ["fold"]}):
        with pytest.raises(InputError, match=r"^unknown rewrite 'fold': known: .*, join-tokens, "):
            select_rewrites(**given)
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrites, "REWRITES", {name: lambda _, name=name: asked.append(name) for name in ORDER})
        applied_rewrites(ImageClassifier(nn.Linear(1, 1), PREPROCESSING), ["join-tokens", "fold-head-norm"])
    assert asked == ["fold-head-norm", "join-tokens"], "in their own order"


def test_what_is_exported_takes_bytes_or_floats() -> None:
    model = network("plain").train()
    with pytest.raises(ValueError, match=r"^images='uint8' needs the preprocessing whose normalisation goes into"):
        rewrite_for_export(model)
    floats = rewrite_for_export(model, images="float")
    assert isinstance(floats, VisionTransformer)
    assert not floats.training
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    require_equal(floats(images).detach(), model.eval()(images).detach())
    whole: Any = rewrite_for_export(model, PREPROCESSING)
    assert isinstance(whole, ImageClassifier)
    assert not whole.divide_by_std
    kept: Any = rewrite_for_export(model, PREPROCESSING, rewrites=["join-tokens"])
    assert kept.divide_by_std
    assert not any(isinstance(module, ExportBlock) for module in model.modules()), "a copy is rewritten"


def classifier_of(weight: float) -> ImageClassifier:
    """Logits are `weight` times the sum of the pixels of each channel."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

        def forward(self, images: Tensor) -> Tensor:
            return self.weight * images.sum((2, 3))

    return ImageClassifier(Sum(), Preprocessing(image_size=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))


def times(factor: float) -> Any:
    def rewrite(classifier: Any) -> int:
        classifier.model.weight.mul_(factor)
        return 7

    return rewrite


@pytest.mark.parametrize(
    ("factor", "named"), [(1.00009, None), (0.99991, None), (1.5, "b"), (0.9998, "b"), (math.nan, "b")]
)
def test_a_rewrite_that_changes_the_logits_is_named(
    monkeypatch: pytest.MonkeyPatch, factor: float, named: str | None
) -> None:
    monkeypatch.setattr(rewrites, "REWRITES", {"a": times(1.0), "d": times(9.0), "b": times(factor), "c": times(1.0)})

    def checked(names: tuple[str, ...]) -> dict[str, int]:
        return rewrite_checked(classifier_of(1000.0), names, 4, rebuild=lambda: classifier_of(1000.0))

    assert checked(("a", "c")) == {"a": 7, "c": 7}
    if named is None:
        assert checked(("a", "b", "c")) == {"a": 7, "b": 7, "c": 7}
        return
    with pytest.raises(CheckFailed) as refused:
        checked(("a", "b", "c"))
    change = f"{abs(factor - 1):.2g}"
    assert str(refused.value) == (
        f"the rewrite 'b' changes this network, by {change} of its largest logit: it uses a layer in two places, or a "
        "weight on its own; leave it out with --without b"
    )


def test_rewrites_that_change_a_network_together_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "REWRITES", {"a": times(1.0), "b": times(2.0)})
    fresh = classifier_of(1.0)
    halved = copy.deepcopy(fresh)
    halved.model.weight.data.mul_(0.5)  # type: ignore[operator]
    monkeypatch.setattr(rewrites, "_change", lambda expected, found, calls=[1.0, 0.0, 0.0, 0.0]: calls.pop(0))
    with pytest.raises(CheckFailed) as refused:
        rewrite_checked(fresh, ("a", "b"), 4, rebuild=lambda: halved)
    assert str(refused.value) == ("the rewrites together change this network, none of them alone: please report it")


class Chaos(nn.Module):
    """The sine of a number that float32 holds to 16, and a rewrite of it by so much as rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 5), 3e8))

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.mean((2, 3)).sum(1, keepdim=True) * self.weight).sin()


def test_logits_that_rounding_changes_are_not_the_fault_of_a_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "REWRITES", {"a": times(1 + 1e-7)})

    def chaos() -> ImageClassifier:
        return ImageClassifier(Chaos(), PREPROCESSING).eval()

    with pytest.raises(CheckFailed, match=r"logits in float32 are [\d.]+ of the largest away from those in float64"):
        rewrite_checked(chaos(), ("a",), 4, rebuild=chaos)


def test_a_change_is_relative_to_the_largest_logit() -> None:
    expected = torch.tensor([[2.0, -8.0]])
    assert rewrites._change(expected, torch.tensor([[2.0, -7.0]])) == pytest.approx(0.125)
    assert rewrites._change(expected, torch.tensor([[6.0, -8.0]])) == pytest.approx(0.5)
    assert rewrites._change(torch.zeros(1, 2), torch.tensor([[0.0, 1e-6]])) == pytest.approx(1.0)
    assert rewrites._change(torch.tensor([[float("nan"), 1.0]]), expected) == 0.0
    assert rewrites.TOLERANCE == 1e-4
    first, second = (torch.randint(9, (5,), generator=rewrites._seeded()) for _ in range(2))
    assert torch.equal(first, second)


def test_the_bytes_that_a_graph_writes() -> None:
    """197*N is the product with a batch of one; a view writes nothing."""

    def value(*shape: Any, itemsize: int = 4) -> Any:
        dims = [dim if isinstance(dim, int) else SimpleNamespace(value=dim) for dim in shape]
        return SimpleNamespace(shape=None if shape == (None,) else dims, dtype=SimpleNamespace(itemsize=itemsize))

    def writes(op_type: str, *outputs: Any) -> Any:
        return SimpleNamespace(op_type=op_type, outputs=outputs)

    assert cost.VIEWS == ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
    graph = [
        writes("MatMul", value("N", 5, 3)),
        writes("Split", value("197*N", 2), value("N", itemsize=2)),
        writes("Unknown", value("sequence", 7), value(None)),
        *(writes(view, value("N", 1000)) for view in cost.VIEWS),
    ]
    assert cost.written_bytes(graph) == 4 * 15 + 4 * 394 + 2 * 1 + 4 * 7
    assert cost._elements([]) == 1


def test_each_rewrite_is_explained_by_what_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def cost_of(classifier: ImageClassifier, preprocessing: Any) -> cost.Cost:
        assert not classifier.training
        measured.append(preprocessing)
        return cost.Cost(100 - len(measured), 50, 1000 - 10 * len(measured), 5)

    monkeypatch.setattr(cost, "measured_cost", cost_of)
    names = ["join-tokens", "fold-head-norm", "fold-attention-scale"]
    model = network("plain").train()
    rows = cost.explain(model, PREPROCESSING, names)
    assert measured == [PREPROCESSING] * 4
    assert [(row.name, row.places) for row in rows] == [
        *(("export-form", 2), ("fold-head-norm", 0), ("fold-attention-scale", 2), ("join-tokens", 2))
    ]
    assert rows[0].identity == "Blocks in the form that rewrites work on"
    assert rows[2].identity == "3. `1/√d` into W_q and b_q, a factor of the maps into W_v and b_v"
    assert rows[0].before == cost.Cost(99, 50, 990, 5)
    for one, field in ((rows[0], "places"), (rows[0].before, "nodes")):
        with pytest.raises(FrozenInstanceError):
            setattr(one, field, 0)
    assert [row.removed for row in rows] == [
        cost.Cost(1, 0, 10, 0),
        cost.Cost(0, 0, 0, 0),
        *[cost.Cost(1, 0, 10, 0)] * 2,
    ]
    assert model.training
    assert not any(isinstance(module, ExportBlock) for module in model.modules())
    with pytest.raises(InputError, match="unknown rewrite 'fold'"):
        cost.explain(model, PREPROCESSING, ["fold"])


def test_the_cost_is_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = ImageClassifier(network("plain"), PREPROCESSING)
    asked: list[Any] = []
    value = SimpleNamespace(shape=[SimpleNamespace(value="N"), 3], dtype=SimpleNamespace(itemsize=4))
    graph = [SimpleNamespace(op_type="Add", outputs=[value])] * 3

    def graph_of(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return SimpleNamespace(graph=graph)

    def flops(model: nn.Module, image: Tensor) -> int:
        asked.append((model, image.shape, image.dtype, image.device.type))
        return 17

    monkeypatch.setattr(cost, "graph_of", graph_of)
    monkeypatch.setattr(cost, "count_flops", flops)
    parameters = sum(parameter.numel() for parameter in classifier.parameters())
    assert cost.measured_cost(classifier, PREPROCESSING) == cost.Cost(3, parameters, 17, 36)
    assert asked == [
        ((classifier, PREPROCESSING), {"folded": False}),
        (classifier, (1, 8, 8, 3), torch.uint8, "meta"),
    ]
