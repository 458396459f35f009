"""PyTorch's exporter: a second form of the network where it fails on the first, one message where it fails on both."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import chain
from typing import Any

import torch
from timm.layers.config import set_layer_config
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from vitx.core.errors import InputError, first_line
from vitx.export.rewrite.canonical import ExportAttention

# From this opset on plain attention is one `Attention` node.
ATTENTION_OPSET = 23
# Longer reasons are cut: an exporter's message can hold a whole program.
REASON_CHARACTERS = 300


class PoolingAsMean(TorchFunctionMode):
    """Average pooling to one pixel as the mean that it is: (B, C, H, W) → (B, C, 1, 1).

    PyTorch's own form keeps the strides of channels-last images, which the exporter writes as a gather of every value.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.adaptive_avg_pool2d:
            pixels, size = (*args, *options.values())
            if size in (1, (1, 1), [1, 1]):
                return pixels.mean((-2, -1), keepdim=True)
        return func(*args, **options)


def trace(classifier: nn.Module, example: Tensor, opset: int, names: tuple[str, str]) -> tuple[Any, bool]:
    """The onnx_ir.Model of `classifier` with a dynamic first dimension, and whether its attention is the fused form.

    names: of the input and the output.

    Attention of timm's networks has two forms, PyTorch's fused function and its arithmetic. Below opset 23 the exporter
    takes the function apart into more nodes than the arithmetic has, and fails on some masks; from 23 on it is one
    node. The form that suits the opset is tried first, then the other. Raises InputError when both fail.
    """
    fused_first = opset >= ATTENTION_OPSET
    failures = []
    for fused in (fused_first, not fused_first):
        try:
            with attention_form(classifier, fused=fused), set_layer_config(exportable=True), PoolingAsMean():
                return _export(classifier, example, opset, names).model, fused
        except torch.onnx.OnnxExporterError as error:
            failures.append(error)
    place, reason = failure_of(failures[0], classifier)
    raise InputError(
        f"PyTorch's exporter cannot trace this network in opset {opset}, with fused attention nor without: {place}: "
        f"{reason}; give it other arguments with --model-arg, or take another network of its family"
    )


@contextmanager
def without_logs() -> Iterator[None]:
    """Without what the exporter writes: whole programs of what fails, beside the error that we pass on."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    unread = io.StringIO()
    try:
        with redirect_stdout(unread), redirect_stderr(unread):
            yield
    finally:
        logging.disable(before)


@contextmanager
def attention_form(classifier: nn.Module, *, fused: bool) -> Iterator[None]:
    """Set the form in which attention is traced; the layers are as before afterwards.

    Without `fused` no layer uses PyTorch's fused function. With it timm's layers are as their network made them: of
    some the fused form is experimental.
    """
    switches = [
        (module, "fused" if isinstance(module, ExportAttention) else "fused_attn")
        for module in classifier.modules()
        if isinstance(module, ExportAttention) or isinstance(getattr(module, "fused_attn", None), bool | int)
    ]
    before = [getattr(module, name) for module, name in switches]
    for (module, name), value in zip(switches, before, strict=True):
        setattr(module, name, fused and (name == "fused" or value))
    try:
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def any_tensor(network: nn.Module) -> Tensor:
    """A parameter or buffer, for its device and type; a float32 zero on the CPU where there is none."""
    return next(chain(network.parameters(), network.buffers()), torch.zeros(()))


def failure_of(error: BaseException, network: nn.Module) -> tuple[str, str]:
    """Where in `network` the innermost cause of an error lies, by the module's name, and the first line of that cause.

    The module is the last one whose code ran (a frame with it as `self`), or that of the last traced operation.
    """
    names = {id(module): name for name, module in network.named_modules()}
    place = ""
    cause: BaseException | None = error
    while cause is not None:
        innermost, cause = cause, cause.__cause__
        place = _place_in(innermost, names) or place
    return f"in '{place}'" if place else "in the network itself", first_line(innermost)[:REASON_CHARACTERS]


def _place_in(error: BaseException, names: dict[int, str]) -> str:
    place = ""
    trace = error.__traceback__
    while trace is not None:
        local = trace.tb_frame.f_locals
        place = names.get(id(local.get("self")), "") or place
        for value in local.values():
            if isinstance(value, Node) and value.meta.get("nn_module_stack"):
                # Entries are (path of the module, its class), outermost first.
                place = str(list(value.meta["nn_module_stack"].values())[-1][0])
        trace = trace.tb_next
    return place


def _export(classifier: nn.Module, example: Tensor, opset: int, names: tuple[str, str]) -> Any:
    with warnings.catch_warnings(), without_logs():
        # The exporter's deprecation warnings are about its own internals: the caller can do nothing about them.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return torch.onnx.export(
            classifier,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N")},),
            input_names=[names[0]],
            output_names=[names[1]],
            opset_version=opset,
            verbose=False,
        )
