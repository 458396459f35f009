"""Check that a traced graph has one fused operator for each attention, LayerNorm and GELU of the network.

An exporter that does not know a module decomposes it into its arithmetic. The graph is still right, but runtimes fuse
by pattern, so a LayerNorm in nine pieces may never become one kernel again.
"""

import ast
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import GELU as TimmGELU
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

from vitx.core.errors import CheckFailed
from vitx.export.rewrite.canonical import ExportAttention
from vitx.models.attention import HeadMixAttention

# The metadata in which PyTorch's exporter keeps the names of the modules around a node, outermost first.
_SCOPES = "pkg.torch.onnx.name_scopes"


def module_scopes(node: Any) -> list[str]:
    """The modules whose code made a node of a freshly traced onnx_ir graph, outermost first."""
    scopes: list[str] = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    return scopes


def expected_operators(network: nn.Module, example: Tensor, opset: int) -> dict[str, frozenset[str]]:
    """The modules that one forward pass over `example` calls, each with operators of which the graph must have one.

    Modules are noted when they are called, so a module that the network has and never uses is not expected.
    """
    expected: dict[str, frozenset[str]] = {}
    hooks = []
    for name, module in network.named_modules():
        operators = _operators_of(module, opset)
        if operators:

            def note(_module: nn.Module, _inputs: Any, name: str = name, operators: Any = operators) -> None:
                expected[name] = operators

            hooks.append(module.register_forward_pre_hook(note))
    try:
        with torch.inference_mode():
            network(example)
    finally:
        for hook in hooks:
            hook.remove()
    return expected


def require_operators(expected: Mapping[str, frozenset[str]], graph: Any) -> None:
    """Raise CheckFailed naming the modules whose operator is missing in `graph` (an onnx_ir graph as traced)."""
    found: dict[str, set[str]] = {}
    for node in graph:
        for scope in module_scopes(node):
            found.setdefault(scope, set()).add(node.op_type)
    missing = [
        f"{name or 'the network'} ({' or '.join(sorted(operators))})"
        for name, operators in expected.items()
        if not operators & found.get(name, set())
    ]
    if missing:
        raise CheckFailed(
            f"the traced graph lacks {len(missing)} of {len(expected)} fused operators that the network implies: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}; try another opset"
        )


def _operators_of(module: nn.Module, opset: int) -> frozenset[str]:
    """Operators of which one is enough for `module`; empty for a module without a fused form."""
    if isinstance(module, nn.LayerNorm):
        return frozenset({"LayerNormalization"})
    if isinstance(module, nn.GELU | TimmGELU):
        # Opset 20 introduced Gelu; before, the exact form is written with Erf and the approximation with Tanh.
        return frozenset({"Gelu"}) if opset >= 20 else frozenset({"Erf", "Tanh"})
    if isinstance(module, ExportAttention):
        return frozenset({"Attention"}) if module.is_fused else frozenset({"Softmax"})
    # Attention that was not brought to the export form: its own code decides which of the two is traced.
    if isinstance(module, HeadMixAttention | TimmAttention):
        return frozenset({"Attention", "Softmax"})
    return frozenset()
