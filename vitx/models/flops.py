"""FLOPs of a forward pass, by formula from the shapes of its products: no weight is read and nothing is multiplied.

The network runs on the meta device, where a tensor is a shape and a type, and every matrix product and convolution adds
its formula. So the count follows the code: padded windows, mixes over heads, the one token that a rewrite leaves. A
formula for each network would repeat its forward pass and fall behind it; those formulas are in
tests/models/test_flops.py, as a check. torch's FlopCounterMode is another check there. It is not used here, because the
attention kernels it knows depend on the device and on torch's version, and operators it does not know count as zero.
"""

import copy
import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitx.core.errors import InputError

aten = torch.ops.aten
# Each product's argument that is its left factor: the first, or the second where something is added to the product.
LEFT_FACTOR: dict[Any, int] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), 0),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmv), 1),
}
# Names of products without a formula here, rare or fused: they must be an error, not a zero.
OTHER_PRODUCTS = re.compile(r"mm(_|$)|mv$|dot|conv|attention|matmul|fft|euclidean_dist|cdist|^_trilinear|lstm|gru|rnn")


def count_flops(model: nn.Module, images: Tensor) -> int:
    """FLOPs of one forward pass of `model` in evaluation mode; of `images` only shape and type matter.

    Only matrix products and convolutions count, two for a multiply-add; norms, softmax and other elementwise operators
    do not. Attention counts as written out, whatever kernel would run: QKᵀ, mixes over heads, product with V.
    Raises InputError for an operator whose FLOPs are not known.
    """
    counter = _ProductCounter()
    # On the meta device torch breaks fused attention up into products; if it did not, the counter would refuse its
    # name. Outside inference mode, in which torch dispatches whole layers to the counter.
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"), counter:
        _without_memory(model).eval()(torch.empty_like(images, device="meta"))
    return counter.flops


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters and buffers on the meta device."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors})


class _ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Adds up the FLOPs of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_is_known(func)
        out = func(*args, **(kwargs or {}))
        self.flops += _flops_of(func.overloadpacket, args, out)
        return out


def _check_is_known(func: Any) -> None:
    operator = func.overloadpacket
    if operator in LEFT_FACTOR or operator is aten.convolution:
        return
    if func.namespace not in ("aten", "prim", "prims") or OTHER_PRODUCTS.search(operator.__name__):
        raise InputError(
            f"cannot count FLOPs: no formula for the operator '{operator}'; add it to vitx/models/flops.py"
        )


def _flops_of(operator: Any, args: Any, out: Any) -> int:
    if operator in LEFT_FACTOR:  # (…, m, k) @ (k, n): each of the m·n values takes k multiply-adds
        inner: int = args[LEFT_FACTOR[operator]].shape[-1]
        return 2 * int(out.numel()) * inner
    if operator is aten.convolution:
        images, weight, transposed = args[0], args[1], args[6]
        # Each value of the output (of the input, if transposed) takes one filter: weight[0], the channels of one group.
        return 2 * int((images if transposed else out).numel()) * int(weight[0].numel())
    return 0
