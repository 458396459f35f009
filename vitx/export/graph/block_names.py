"""Names for the tensors between blocks, so that a graph of any precision can be compared with the network.

`embedding` is what the first block reads and `blocks.i` what block i hands on: the residual stream, which no rewrite
changes. Its shape is (N, tokens, D), or (N·tokens, D) where the tokens of all images stand in one axis; a last block
that computes the class token only hands on one token.
"""

import ast
import re
from typing import Any

EMBEDDING = "embedding"
_SCOPES = "pkg.torch.onnx.name_scopes"
_BLOCK = re.compile(r"(?:model\.)?blocks\.(\d+)")


def block_name(index: int) -> str:
    return f"blocks.{index}"


def name_block_outputs(model: Any) -> None:
    """Rename the tensors between blocks of an onnx_ir.Model that the exporter has just traced, in place.

    Blocks are the children of a list called `blocks`, as timm's transformers have it; a network without one, or one
    whose list is nested, keeps its names. Call it before the exporter's metadata is cleared.
    """
    block_of = {id(node): _block_index(node) for node in model.graph}
    handed_on: dict[int, Any] = {}
    embedding = None
    for node in model.graph:
        here = block_of[id(node)]
        for value in node.inputs:
            made_by = None if value is None else value.producer()
            if made_by is None or not _is_float(value):
                continue
            before = block_of.get(id(made_by))
            if before is not None and before != here:
                handed_on[before] = value
            elif before is None and here == 0:
                embedding = value
    if sorted(handed_on) != list(range(len(handed_on))):
        return
    for index, value in handed_on.items():
        if not value.is_graph_output():
            value.name = block_name(index)
    if handed_on and embedding is not None:
        embedding.name = EMBEDDING


def _block_index(node: Any) -> int | None:
    """The block whose code made this node; None outside of them."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    found = [match for scope in scopes if (match := _BLOCK.fullmatch(scope))]
    return int(found[0].group(1)) if len(found) == 1 else None


def _is_float(value: Any) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
