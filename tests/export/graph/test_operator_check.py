"""Which fused operators a network implies, and which of them a traced graph lacks."""

from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper
from timm.layers import GELU as TimmGELU
from timm.layers.attention import Attention
from torch import Tensor, nn

from vitx.core.errors import CheckFailed
from vitx.export.graph.operator_check import expected_operators, module_scopes, require_operators
from vitx.export.rewrite.canonical import ExportAttention
from vitx.models.attention import HeadMixAttention


class Network(nn.Module):
    """Calls the modules that it is given under their names, one after the other, but for the one called `unused`."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.without_grad: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.without_grad = not torch.is_grad_enabled()
        for name, module in self.named_children():
            if name != "unused":
                x = module(x)
        return x


def expected(opset: int = 20, **modules: nn.Module) -> dict[str, set[str]]:
    found = expected_operators(Network(**modules), torch.zeros(1, 3, 8), opset)
    return {name: set(operators) for name, operators in found.items()}


def test_the_modules_that_are_called() -> None:
    norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert expected(stem=norm, unused=nn.LayerNorm(8)) == {"stem.1": {"LayerNormalization"}}


@pytest.mark.parametrize(("opset", "operators"), [(18, {"Erf", "Tanh"}), (19, {"Erf", "Tanh"}), (20, {"Gelu"})])
@pytest.mark.parametrize("gelu", [nn.GELU(), TimmGELU(), nn.GELU(approximate="tanh")])
def test_gelu_is_an_operator_since_opset_20(gelu: nn.Module, opset: int, operators: set[str]) -> None:
    assert expected(opset, act=gelu) == {"act": operators}


def test_attention_of_others_is_either() -> None:
    found = expected(mixed=HeadMixAttention(8, 2), timm=Attention(8, 2))
    assert found == {"mixed": {"Attention", "Softmax"}, "timm": {"Attention", "Softmax"}}


@pytest.mark.parametrize(("fused", "operator"), [(True, "Attention"), (False, "Softmax")])
def test_attention_of_the_export_form_is_one(fused: bool, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention: Any = ExportAttention.__new__(ExportAttention)
    nn.Module.__init__(attention)
    monkeypatch.setattr(ExportAttention, "is_fused", property(lambda self: fused))
    monkeypatch.setattr(ExportAttention, "forward", lambda self, x: x)
    assert expected(block=nn.Sequential(attention)) == {"block.0": {operator}}


def test_the_network_is_left_as_it_was() -> None:
    norm = nn.LayerNorm(8)
    network = Network(norm=norm)
    expected_operators(network, torch.zeros(1, 3, 8), 20)
    assert network.without_grad
    assert not norm._forward_pre_hooks

    with pytest.raises(RuntimeError, match="normalized_shape"):
        expected_operators(network, torch.zeros(1, 3, 7), 20)
    assert not norm._forward_pre_hooks


def graph_of(*nodes: tuple[str, str | None]) -> Any:
    """Nodes of an operator and its scopes, as the exporter says them, if it does."""
    made = []
    for index, (op_type, scopes) in enumerate(nodes):
        made.append(helper.make_node(op_type, ["x"], [f"y{index}"]))
        if scopes is not None:
            made[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    model = helper.make_model(helper.make_graph(made, "g", [value], []), ir_version=10)
    return onnx_ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString())).graph


def test_the_scopes_of_a_node() -> None:
    graph = graph_of(("Relu", "['', 'model', 'model.norm']"), ("Relu", None))
    assert [module_scopes(node) for node in graph] == [["", "model", "model.norm"], []]


def test_an_operator_within_the_module_is_enough() -> None:
    graph = graph_of(("Softmax", "['', 'attn', 'attn.inner']"), ("Tanh", "['', 'attn']"), ("Erf", "['']"))
    there = {"attn": frozenset({"Attention", "Softmax"}), "": frozenset({"Erf"})}
    require_operators(there, graph)
    assert refusal(there | {"head": frozenset({"Gelu"})}, graph).endswith("implies: head (Gelu); try another opset")


def refusal(expected: dict[str, frozenset[str]], graph: Any) -> str:
    with pytest.raises(CheckFailed) as refused:
        require_operators(expected, graph)
    return str(refused.value)


def test_what_is_missing_is_named() -> None:
    norms = {f"norm{index}": frozenset({"LayerNormalization"}) for index in range(7)}
    graph = graph_of(("LayerNormalization", "['', 'norm6']"), ("Mul", "['', 'norm0']"))
    start = "the traced graph lacks {} fused operators that the network implies: "
    six = refusal(norms, graph)
    assert six == start.format("6 of 7") + (
        ", ".join(f"norm{index} (LayerNormalization)" for index in range(5)) + ", …; try another opset"
    )
    del norms["norm5"]
    five = refusal(norms, graph)
    assert five == start.format("5 of 6") + (
        ", ".join(f"norm{index} (LayerNormalization)" for index in range(5)) + "; try another opset"
    )


def test_of_two_operators_both_are_named_in_their_order() -> None:
    expected = {"": frozenset({"Tanh", "Erf"})}
    assert refusal(expected, graph_of(("Relu", "['']"))).endswith(
        "implies: the network (Erf or Tanh); try another opset"
    )
