"""DeepViT's regulariser: reference numbers, and two attention maps alive at most."""

import weakref
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vitx.models  # noqa: F401  # registers deit_digits
from reference import attention_similarity_loss, seq
from vitx.core.errors import InputError
from vitx.models import attention_maps
from vitx.models.similarity import Over, map_similarity
from vitx.train.losses.attention_similarity import (
    attention_loss,
    check_pairs,
    qkv_similarity_loss,
    record_qkv,
)

MAPS = [seq(k, 2, 2, 3, 3).softmax(-1) for k in range(3)]


def test_reference_numbers() -> None:
    assert map_similarity(MAPS[0], MAPS[1], "rows").item() == pytest.approx(0.955407, abs=1e-6)
    assert map_similarity(MAPS[0], MAPS[1], "heads").item() == pytest.approx(0.999994, abs=1e-6)
    first, second = (seq(k, 2, 3, 4, 4).softmax(-1) for k in (0, 1))
    assert map_similarity(first, second, "rows").item() == pytest.approx(0.929152, abs=1e-6)
    targets = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05]], dtype=torch.float64)
    classification = F.cross_entropy(seq(4, 2, 3), targets)
    assert classification.item() == pytest.approx(1.081803, abs=1e-6)
    total = classification + 0.1 * attention_similarity_loss(MAPS, over="heads", pairs=2)
    assert total.item() == pytest.approx(1.181803, abs=1e-6)


@pytest.mark.parametrize("over", ["rows", "heads"])
def test_value_and_gradient_equal_the_slow_formula(over: Over) -> None:
    def slow(logits: Tensor) -> Tensor:
        first, second = logits.softmax(-1)
        B, H, N, _ = first.shape
        terms = [
            F.cosine_similarity(first[b, h, :, t], second[b, h, :, t], dim=0)
            if over == "rows"
            else F.cosine_similarity(first[b, :, h, t], second[b, :, h, t], dim=0)
            for b in range(B)
            for h in range(H if over == "rows" else N)
            for t in range(N)
        ]
        return torch.stack(terms).mean()

    def fast(logits: Tensor) -> Tensor:
        return attention_similarity_loss(logits.softmax(-1), over=over)

    ours, theirs = seq(2, 2, 2, 3, 4, 4).requires_grad_(), seq(2, 2, 2, 3, 4, 4).requires_grad_()
    loss, reference = fast(ours), slow(theirs)
    loss.backward()  # type: ignore[no-untyped-call]
    reference.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, reference, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(fast, (seq(2, 2, 2, 3, 4, 4).requires_grad_(),))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    attention = ["plain", "talking-heads", "re-attention", "plain", "re-attention"]
    return timm.create_model("deepvit_digits", depth=5, attention=attention).double().train()


@pytest.mark.parametrize("over", ["rows", "heads"])
@pytest.mark.parametrize("pairs", [0, 2])
def test_the_networks_maps_are_compared_and_its_weights_get_their_gradient(model: Any, over: Over, pairs: int) -> None:
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with record_qkv(model) as blocks:
        model(images)
    loss = qkv_similarity_loss(blocks, over=over, pairs=pairs)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not any(module._forward_hooks for module in model.modules())
    model.zero_grad(set_to_none=True)
    with attention_maps(model, of=lambda maps: maps) as maps:
        model(images)
        expected = attention_similarity_loss(maps.values(), over=over, pairs=pairs)
        expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-14, msg=name)


@pytest.mark.parametrize("over", ["rows", "heads"])
@pytest.mark.parametrize("pairs", [0, 2])
def test_mixed_maps_are_compared_after_mix_and_norm(model: Any, over: Over, pairs: int) -> None:
    """By the formula one entry at a time on the maps that meet V, value and gradient; a BatchNorm sees one batch."""
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with attention_loss(model, "mixed", over=over, pairs=pairs) as loss:
        model(images)
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    norms = [block.attn.var_norm for block in (model.blocks[2], model.blocks[4])]
    assert [int(norm.num_batches_tracked) for norm in norms] == [1, 1]
    model.zero_grad(set_to_none=True)
    with attention_maps(model, of=lambda maps: maps, stage="mixed") as maps:
        model(images)
    axis = 2 if over == "rows" else 1
    cosines = [F.cosine_similarity(*pair, dim=axis).mean() for pair in pairwise(maps.values())]
    expected = torch.stack(cosines[: pairs or None]).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss(), expected, rtol=1e-12, atol=0)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    assert "blocks.2.attn.reatten_matrix.weight" in wanted
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12, msg=name)


def test_softmax_maps_hardly_train_the_mix_and_mixed_ones_do(model: Any) -> None:
    """They reach Θ only through the blocks before; over heads softmax maps are alike from the start."""
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def value_and_gradient(maps: Any) -> tuple[float, float]:
        model.zero_grad()
        with attention_loss(model, maps, over="heads") as loss:
            model(images)
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value.item(), model.blocks[2].attn.reatten_matrix.weight.grad.norm().item()

    (softmax, of_softmax), (mixed, of_mixed) = value_and_gradient("softmax"), value_and_gradient("mixed")
    assert softmax > 0.9
    assert abs(mixed) < 0.5
    assert of_mixed > 10 * of_softmax


def test_mixed_maps_are_float32_inside_autocast_and_nothing_stays_watched(model: Any) -> None:
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16), attention_loss(model, "mixed") as loss:
        model(torch.randn(2, 3, 32, 32))
    assert loss().dtype == torch.float32
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all("after_softmax" not in vars(module) for module in model.modules())
    with attention_loss(model, "mixed", pairs=5) as too_many:
        model(torch.randn(2, 3, 32, 32))
    with pytest.raises(InputError, match="5 adjacent pairs of attention maps were asked for, but there are 4"):
        too_many()


class LiveMaps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """The largest number of softmax results of one shape that were alive at one moment."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.shape, self.alive, self.most, self.made = shape, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and tuple(out.shape) == self.shape:
            self.alive += 1
            self.made += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(out.untyped_storage(), self.forget)
        return out

    def forget(self) -> None:
        self.alive -= 1


def test_two_maps_are_alive_at_most() -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("deit_digits", depth=6)
    with record_qkv(model) as blocks:
        model(torch.randn(2, 3, 32, 32))
    with LiveMaps((2, 4, 65, 65)) as maps:
        loss = qkv_similarity_loss(blocks)
        assert (maps.made, maps.most, maps.alive) == (10, 2, 0)
        loss.backward()  # type: ignore[no-untyped-call]
    assert (maps.made, maps.most, maps.alive) == (20, 2, 0)


def test_it_is_float32_inside_autocast(model: Any) -> None:
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        with record_qkv(model) as blocks:
            model(torch.randn(2, 3, 32, 32))
        inside = qkv_similarity_loss(blocks, over="rows")
    assert inside.dtype == torch.float32
    # Of the maps of a fresh network, whose cosine is 1 but for some 1e-4: its sums were products in bfloat16.
    assert inside.item() == pytest.approx(qkv_similarity_loss(blocks, over="rows").item(), rel=1e-6)
    assert all(first.qkv_BN3D.dtype == torch.bfloat16 for first, _ in pairwise(blocks))


def test_what_cannot_be_compared_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="3 adjacent pairs of attention maps were asked for, but there are 2"):
        check_pairs(3, len(MAPS) - 1)
    with pytest.raises(InputError, match="unknown axis of the attention similarity 'columns'"):
        map_similarity(MAPS[0], MAPS[1], "columns")  # type: ignore[arg-type]
    local: Any = timm.create_model("deit_digits", depth=2, attention="local", global_pool="avg")
    with record_qkv(local) as blocks:
        local(torch.zeros(2, 3, 32, 32))
    with pytest.raises(InputError, match=r"^local attention has no map of all tokens: set losses"):
        qkv_similarity_loss(blocks)
    resnet = timm.create_model("resnet10t")
    with (
        pytest.raises(
            InputError, match=r"ResNet has 0 of vitx's attention layers, which .* compares: set losses\.attention=0"
        ),
        record_qkv(resnet),
    ):
        pass
