"""The kernels of Re-Attention in Triton's interpreter, against float64.

test_reattention.py runs this in a process of its own: Triton chooses its interpreter when it is imported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from reference import randomize, randomize_like_trained
from support.triton_interpreter import patch_interpreter
from vitx.export.engines.flash_kernel import KERNELS, TILES, FlashKernel, Operator
from vitx.models.attention import ReAttention, TalkingHeadsAttention
from vitx.models.attention_maps import attention_maps
from vitx.models.flash import kernels
from vitx.models.flash import reattention as module
from vitx.models.flash.reattention import (
    INTERPRETED,
    Mixes,
    Tiles,
    flash_reattention,
    heads_per_program,
    kernel_constants,
    plain_reattention,
    why_not_flash,
)

assert INTERPRETED, "set TRITON_INTERPRET=1"
patch_interpreter()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operands(
    heads: int, tokens: int, width: int, dtype: torch.dtype, *, batch: int = 2, before: bool = False, bias: bool = True
) -> tuple[Tensor, Mixes]:
    """(3, B, H, N, K) as a Linear makes it, and mixes with negative weights."""
    generator = torch.Generator().manual_seed(heads * tokens + width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    qkv = draw(batch, tokens, 3, heads, width).to(dtype).permute(2, 0, 3, 1, 4)
    mixes = Mixes(
        draw(heads, heads),
        draw(heads) / tokens if bias else None,
        draw(heads, heads) / heads**0.5 if before else None,
        draw(heads) if before else None,
    )
    return qkv, mixes


def leaves(mixes: Mixes, dtype: torch.dtype) -> Mixes:
    """The mixes as tensors that collect a gradient."""
    parts: list[Any] = [None if part is None else part.detach().to(dtype).requires_grad_() for part in mixes]
    return Mixes(*parts)


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("before", [False, True], ids=["re-attention", "talking-heads"])
@pytest.mark.parametrize(
    ("heads", "tokens", "width", "tiles"),
    [
        (1, 1, 64, Tiles()),
        (3, 7, 33, Tiles()),
        (16, 20, 35, Tiles()),
        (6, 65, 32, Tiles(64, 16, 4, heads=6)),
        (6, 37, 40, Tiles(32, 16, 2, 1)),
        (2, 130, 64, Tiles(128, 16, 8)),
        (5, 20, 48, Tiles(16, 32, 1)),
    ],
)
def test_output_equals_float64(
    heads: int, tokens: int, width: int, tiles: Tiles, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, forced = module.tiles_of, {"out": tiles, "talking": tiles}
    monkeypatch.setattr(module, "tiles_of", lambda launch, *size: forced.get(launch) or own(launch, *size))
    batch = 2 if heads * tokens < 100 else 1  # the interpreter runs one program after the other
    (q, k, v), mixes = operands(heads, tokens, width, torch.float16, before=before, batch=batch)
    found = flash_reattention(q, k, v, mixes, width**-0.5)
    assert found.dtype == torch.float16
    expected = plain_reattention(q.double(), k.double(), v.double(), mixes, width**-0.5)
    assert relative_error(found, expected) < 2e-3
    assert (found.double() - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("operator", list(KERNELS))
@pytest.mark.parametrize(
    ("heads", "tokens", "width", "tactic"),
    [(3, 7, 33, 0), (6, 37, 32, 1), (4, 21, 64, 2), (1, 1, 16, 0)],
)
def test_kernels_that_an_engine_launches(operator: Operator, heads: int, tokens: int, width: int, tactic: int) -> None:
    """By position, inputs, the number of tokens, the output, on (B, N, H, K), with the grid of the plugin."""
    talking, tiles = operator == "TalkingHeads", TILES[operator][tactic]
    batch = 2 if heads * tokens < 80 else 1  # the interpreter runs one program after the other
    qkv, mixes = operands(heads, tokens, width, torch.float16, before=talking, batch=batch)
    scale = width**-0.5
    inputs = [part.transpose(1, 2).contiguous() for part in ((qkv[0].float() * scale).half(), qkv[1], qkv[2])]
    order = [mixes.before_weight, mixes.before_bias, mixes.weight, mixes.bias] if talking else list(mixes[:2])
    out = torch.empty_like(inputs[0])
    launch = FlashKernel("", "", tiles, 0, 0, heads // heads_per_program(heads, tiles))
    kernel = getattr(kernels, KERNELS[operator])
    constants = kernel_constants(heads, width, tiles, before=talking, bias=True)
    kernel[(launch.grid_x(tokens), len(out))](*inputs, *order, tokens, out, **constants)
    q, k, v = (part.transpose(1, 2).double() for part in inputs)
    expected = plain_reattention(q, k, v, mixes, 1.0).transpose(1, 2)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize(
    ("dtype", "before", "bias"),
    [
        (torch.float16, False, True),
        (torch.float16, True, True),
        (torch.float16, False, False),
        (torch.bfloat16, True, False),
    ],
)
def test_gradients_equal_float64(dtype: torch.dtype, before: bool, bias: bool) -> None:
    heads, tokens, width = 3, 21, 35
    qkv, drawn = operands(heads, tokens, width, dtype, before=before, bias=bias)
    mixes, exact = leaves(drawn, torch.float32), leaves(drawn, torch.float64)
    inputs: Any = [part.clone().requires_grad_() for part in qkv]
    exact_inputs: Any = [part.double().requires_grad_() for part in qkv]
    weight = torch.randn(2, heads, tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    q, k, v = inputs
    torch.autograd.backward(flash_reattention(q, k, v, mixes, width**-0.5), weight)
    q, k, v = exact_inputs
    torch.autograd.backward(plain_reattention(q, k, v, exact, width**-0.5), weight.double())
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    for mine, theirs in zip((*inputs, *mixes[:3]), (*exact_inputs, *exact[:3]), strict=True):
        if mine is not None:
            assert relative_error(mine.grad, theirs.grad) < tolerance
    if mixes.before_bias is not None and exact.before_bias is not None:
        assert mixes.before_bias.grad is not None
        assert not mixes.before_bias.grad.any()
        assert exact.before_bias.grad is not None
        assert exact.before_bias.grad.abs().max() < 1e-12  # constant along a row


def test_the_sums_alone_give_no_gradient() -> None:
    """They are an output of the operator for its backward pass only."""
    (q, k, v), mixes = operands(3, 20, 32, torch.float16)
    leaf = q.detach().clone().requires_grad_()
    torch.ops.vitx.reattention(leaf, k, v, *mixes, 1.0)[1].sum().backward()
    assert leaf.grad is None


def test_large_scores_do_not_overflow() -> None:
    (q, k, v), mixes = operands(3, 20, 32, torch.float16)
    found = flash_reattention(30 * q, 30 * k, v, mixes, 1.0)
    expected = plain_reattention((30 * q).double(), (30 * k).double(), v.double(), mixes, 1.0)
    assert relative_error(found, expected) < 2e-3


def test_any_layout_is_read() -> None:
    (q, k, v), mixes = operands(3, 20, 32, torch.float16)
    first = flash_reattention(q, k, v, mixes, 1.0)
    again = flash_reattention(q.contiguous(), k, v.clone(), mixes, 1.0)
    assert torch.equal(first, again)
    backwards = flash_reattention(q.flip(2), k.flip(2), v.flip(2), mixes, 1.0).flip(2)
    assert relative_error(backwards, first.double()) < 2e-3


@pytest.mark.parametrize("tokens", [slice(0, 1), slice(3, None)], ids=["one", "the-last"])
def test_images_whose_tokens_do_not_lie_side_by_side(tokens: slice) -> None:
    """Of a part of the tokens, as it lies in the whole, and as (B, H, N, K), where one token looks dense to torch."""
    qkv, mixes = operands(3, 20, 32, torch.float16)
    parts = [part[:, :, tokens] for part in qkv]
    for q, k, v in (parts, [part.contiguous() for part in parts]):
        v.requires_grad_()
        found = flash_reattention(q, k, v, mixes, 0.2)
        exact = v.detach().double().requires_grad_()
        expected = plain_reattention(q.double(), k.double(), exact, mixes, 0.2)
        assert relative_error(found.detach(), expected.detach()) < 2e-3
        (v_grad,) = torch.autograd.grad(found.float().sum(), v)
        (wanted,) = torch.autograd.grad(expected.sum(), exact)
        assert relative_error(v_grad, wanted) < 2e-3


@pytest.mark.parametrize("make", [ReAttention, TalkingHeadsAttention])
def test_the_layers_take_the_kernels(make: Callable[..., Any]) -> None:
    layer: Any = randomize_like_trained(make(48, 3)).half().eval()
    x = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        fused = layer(x)
        layer.fused_attn = False
        plain = layer.double()(x.double())
    assert relative_error(fused, plain) < 4e-3  # the Linears are in half too


def test_maps_are_observed_in_spite_of_the_kernels() -> None:
    model: Any = randomize(timm.create_model("deepvit_digits", depth=2, attention="re-attention")).half().eval()
    images = torch.zeros(1, 3, 32, 32).half()
    with torch.no_grad(), attention_maps(model) as maps:
        model(images)
    assert [value.shape[-1] for value in maps.values()] == [model.num_tokens] * 2
    assert all(block.attn.fused_attn for block in model.blocks)


def test_batch_norm_in_training_keeps_the_plain_form() -> None:
    layer = ReAttention(48, 3).half().train()
    assert layer.linear_mixes() is None
    layer.var_norm.eval()
    assert layer.linear_mixes() is not None
    assert ReAttention(48, 3, norm="layer").eval().linear_mixes() is None
    assert ReAttention(48, 3, norm="none").train().linear_mixes() is not None


def test_operator_checks_of_torch() -> None:
    """Schema, fake tensors and autograd registration, as torch.compile will rely on them."""
    (q, k, v), mixes = operands(3, 5, 32, torch.float16, batch=1)
    arguments = (q, k, v, mixes.weight, mixes.bias, None, None, 0.2)
    torch.library.opcheck(torch.ops.vitx.reattention.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("make", [ReAttention, TalkingHeadsAttention])
def test_a_compiled_layer_is_one_graph_with_the_operator_in_it(make: Callable[..., Any]) -> None:
    layer: Any = randomize_like_trained(make(48, 3)).half().eval()
    x = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    (expected,) = torch.autograd.grad(layer(x).float().square().sum(), x)
    compiled: Any = torch.compile(layer, backend=backend, fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x).float().square().sum(), x)
    assert torch.equal(found, expected)
    assert operators.count("vitx.reattention") == 1


@pytest.mark.parametrize(
    ("heads", "tokens", "width", "dtype", "expected"),
    [
        (3, 8, 32, torch.float32, "float32, not float16 or bfloat16"),
        (17, 8, 32, torch.float16, "heads is 17, above 16"),
        (3, 1026, 32, torch.float16, "tokens is 1026, above 1025"),
        (3, 8, 72, torch.bfloat16, "head width is 72, above 64"),
    ],
)
def test_what_the_kernels_cannot_do_is_named(
    heads: int, tokens: int, width: int, dtype: torch.dtype, expected: str
) -> None:
    reason = why_not_flash("cpu", dtype, heads, tokens, width)
    assert reason is not None
    assert expected in reason


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """The operators that compute something, in order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("empty", "new_empty", "_unsafe_view"):
            self.names.append(name)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(("width", "scale"), [(16, 1.0), (33, 33**-0.5)])
def test_a_layer_is_its_projections_and_the_operator(width: int, scale: float) -> None:
    """Which launches two kernels. DeepViT-S has heads of width 33 and scales its maps."""
    layer: Any = randomize_like_trained(ReAttention(3 * width, 3, reatten_scale=scale)).half().eval()
    x = torch.randn(2, 5, 3 * width, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        layer(x)  # folds
        names: list[str] = []
        with Dispatched(names):
            found = layer(x)
        layer.fused_attn = False
        expected = layer.double()(x.double())
    assert names == ["addmm", "reattention", "addmm"]
    assert relative_error(found, expected) < 4e-3
