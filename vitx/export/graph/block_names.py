"""Names for the tensors between blocks, so that a graph of any precision can be compared with the network.

`embedding` is the input of the first block and `blocks.i` the output of block i: the residual stream, which no rewrite
changes. Its shape is (N, tokens, D), or (N·tokens, D) where the tokens of all images share one axis; the output of a
last block that computes the class token only has one token.

`blocks.i.softmax` is what the only Softmax of block i makes but for ContraNorm's, its attention maps (N, H, queries,
tokens) before a head mix: further outputs of a bundle are computed of them (outputs.py). Folds may remove what makes
such a tensor, but none removes a Softmax.
"""

import re
from typing import Any

from vitx.export.graph.operator_check import module_scopes

EMBEDDING = "embedding"
# In the exporter's scopes the blocks of a wrapped classifier are `model.blocks.i`.
_BLOCK = re.compile(r"(?:model\.)?blocks\.(\d+)")
_CONTRANORM = re.compile(r".*\.contrast[12]?")


def block_name(index: int) -> str:
    return f"blocks.{index}"


def softmax_name(index: int) -> str:
    return f"{block_name(index)}.softmax"


def name_block_outputs(model: Any) -> None:
    """Rename the tensors between blocks, and the maps in them, of an onnx_ir.Model that was just traced, in place.

    Blocks are the children of a list called `blocks`, as in timm's transformers; a network without such a list, or with
    a nested one, keeps its names. Call it before the exporter's metadata, which says which block a node is of, is
    cleared.
    """
    block_of = {id(node): _block_index(node) for node in model.graph}
    place_of = {id(node): place for place, node in enumerate(model.graph)}
    outputs: dict[int, Any] = {}  # of each block
    embedding = None
    for node in model.graph:
        reader = block_of[id(node)]
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is None or not _is_float(value):
                continue
            block = block_of.get(id(producer))
            # A float tensor that leaves its block is the residual stream, the last of them where NeuTRENO's values
            # leave it too; integers that leave one are shapes.
            if block is not None and block != reader:
                found = outputs.get(block, value), value
                outputs[block] = max(found, key=lambda each: place_of[id(each.producer())])
            # The first that block 0 reads: the exporter leaves some nodes within a block without their module.
            elif block is None and reader == 0 and embedding is None:
                embedding = value
    # A gap means that the scopes are not what they are taken for: then no name is better than a wrong one.
    if sorted(outputs) != list(range(len(outputs))):
        return
    for index, value in outputs.items():
        if not value.is_graph_output():
            value.name = block_name(index)
    if outputs and embedding is not None:
        embedding.name = EMBEDDING
    softmaxes = [node for node in model.graph if node.op_type == "Softmax" and not _in_contranorm(node)]
    maps = [(block_of[id(node)], node.outputs[0]) for node in softmaxes]
    blocks = [block for block, _ in maps]
    for block, value in maps:
        if block is not None and blocks.count(block) == 1:
            value.name = softmax_name(block)


def _block_index(node: Any) -> int | None:
    """The block whose code made this node; None outside of the blocks."""
    found = [match for scope in module_scopes(node) if (match := _BLOCK.fullmatch(scope))]
    return int(found[0].group(1)) if len(found) == 1 else None


def _in_contranorm(node: Any) -> bool:
    return any(map(_CONTRANORM.fullmatch, module_scopes(node)))


def _is_float(value: Any) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
