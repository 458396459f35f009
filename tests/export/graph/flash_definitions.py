"""What the operators of the flash plugin compute, as ONNX functions: with them every runtime runs a fused graph."""

import onnx

from vitx.export.engines.flash_kernel import Operator
from vitx.export.engines.flash_nodes import DOMAIN
from vitx.export.graph.dataflow import opset_of

_MIX = """
    {to}_weight = CastLike({weight}, {of})
    {to}_shape = Shape({of})
    {to}_rows = Reshape({of}, rows)
    {to}_mixed = MatMul({to}_weight, {to}_rows)
"""
_DEFINITION = """
<domain: "{domain}", opset_import: ["": {opset}]>
{operator} ({inputs}) => (out) {{
    rows = Constant <value_ints = [0, 0, -1]> ()
    q = Transpose <perm = [0, 2, 1, 3]> (query)
    k = Transpose <perm = [0, 2, 3, 1]> (key)
    v = Transpose <perm = [0, 2, 1, 3]> (value)
    raw = MatMul(q, k)
    {before}
    maps = Softmax <axis = -1> ({scores})
    {after}
    mixed = Reshape(after_mixed, after_shape)
    attended = MatMul(mixed, v)
    tokens = Constant <value_ints = [2]> ()
    sums = ReduceSum <keepdims = 1> (v, tokens)
    ends = Constant <value_ints = [1, 2]> ()
    bias_like = CastLike(bias, v)
    bias_H11 = Unsqueeze(bias_like, ends)
    constant = Mul(bias_H11, sums)
    heads = Add(attended, constant)
    out = Transpose <perm = [0, 2, 1, 3]> (heads)
}}
"""
_BIAS_BEFORE = """
    column = Constant <value_ints = [1]> ()
    scores_bias_like = CastLike(scores_bias, raw)
    scores_bias_H1 = Unsqueeze(scores_bias_like, column)
    scores_rows = Add(before_mixed, scores_bias_H1)
    scores = Reshape(scores_rows, before_shape)
"""


def definition(operator: Operator, opset: int) -> onnx.FunctionProto:
    """An operator's definition in standard operators, the bias after softmax as rank one (docs/maths.md §4)."""
    talking = operator == "TalkingHeads"
    before = _MIX.format(of="raw", to="before", weight="scores_weight") + _BIAS_BEFORE
    text = _DEFINITION.format(
        domain=DOMAIN,
        opset=opset,
        operator=operator,
        inputs=f"query, key, value, {'scores_weight, scores_bias, ' if talking else ''}weight, bias",
        before=before if talking else "",
        scores="scores" if talking else "raw",
        after=_MIX.format(of="maps", to="after", weight="weight"),
    )
    function: onnx.FunctionProto = onnx.parser.parse_function(text)
    return function


def with_definitions(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a fused graph with the definition of each of our operators in it."""
    operators = sorted({node.op_type for node in model.graph.node if node.domain == DOMAIN})
    defined = onnx.ModelProto()
    defined.CopyFrom(model)
    defined.functions.extend(definition(operator, opset_of(model)) for operator in operators)
    return defined
