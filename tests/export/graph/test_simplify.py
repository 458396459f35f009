"""How often the folds of a graph are applied."""

from collections.abc import Callable

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from vitx.export.graph.simplify import simplify


def test_folds_are_applied_until_none_finds_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"first": [2, 0, 0, 0], "second": [1, 1, 1, 0]}

    def fold(name: str) -> Callable[[ir.Graph], int]:
        def apply(graph: ir.Graph) -> int:
            return found[name].pop(0)

        apply.__name__ = name
        return apply

    monkeypatch.setattr("vitx.export.graph.simplify.FOLDS", (fold("first"), fold("second")))
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "small", sides[:1], sides[1:])
    model = ir.serde.deserialize_model(helper.make_model(graph))
    assert simplify(model) == {"first": 2, "second": 3}
    assert found == {"first": [], "second": []}
