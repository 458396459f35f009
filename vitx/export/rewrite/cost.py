"""What each rewrite removes from a network: graph nodes, parameters, FLOPs and bytes of activations."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitx.core.preprocess import Preprocessing
from vitx.export.graph.from_model import graph_of
from vitx.export.rewrite.canonical import canonical_blocks
from vitx.export.rewrite.rewrites import ALL, REWRITES, ImageClassifier, require_known
from vitx.models.flops import count_flops

# Operators that only rename a shape: a runtime computes and writes nothing for them.
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
EXPORT_FORM = "export-form"


@dataclass(frozen=True)
class Cost:
    """The cost of one network; FLOPs and bytes are for one image.

    `nodes` counts those of the traced ONNX graph before its own folds (graph/simplify.py), and `activation_bytes` what
    they write. `flops` are of matrix products and convolutions (a multiply-add counts two), as in `count_flops`.
    """

    nodes: int
    parameters: int
    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class ExplainedRewrite:
    """One rewrite: its identity, the number of places it changed, and the cost of the network before and after it."""

    name: str
    identity: str
    places: int
    before: Cost
    after: Cost

    @property
    def removed(self) -> Cost:
        """`before` less `after`; negative where the rewrite adds something."""
        names = Cost.__dataclass_fields__
        return Cost(**{name: getattr(self.before, name) - getattr(self.after, name) for name in names})


def explain(model: nn.Module, preprocessing: Preprocessing, rewrites: Sequence[str] = ALL) -> list[ExplainedRewrite]:
    """Apply the named rewrites one after the other to a copy of `model` and measure what each changed.

    The first row is the canonical form of the blocks, in which queries, keys and values have their own projections. The
    network is traced once for each row that changed something. Raises InputError for an unknown rewrite.
    """
    require_known(rewrites)
    classifier = ImageClassifier(copy.deepcopy(model).eval(), preprocessing).eval()
    steps = {EXPORT_FORM: _export_form, **{name: REWRITES[name] for name in REWRITES if name in rewrites}}
    cost = measured_cost(classifier, preprocessing)
    rows = []
    for name, rewrite in steps.items():
        with torch.no_grad():
            places = rewrite(classifier)
        after = measured_cost(classifier, preprocessing) if places else cost
        # The first line of a rewrite's docstring states its identity.
        identity = (rewrite.__doc__ or "").partition("\n")[0].partition("; return")[0].rstrip(".")
        rows.append(ExplainedRewrite(name, identity, places, cost, after))
        cost = after
    return rows


def _export_form(classifier: nn.Module) -> int:
    """Blocks in the form that rewrites work on; return how many."""
    return len(canonical_blocks(classifier))


def measured_cost(classifier: ImageClassifier, preprocessing: Preprocessing) -> Cost:
    """The cost of `classifier`: of its traced graph, and of one image through its products."""
    size = preprocessing.image_size
    image = torch.empty(1, size, size, 3, dtype=torch.uint8, device="meta")
    # Without the folds of the graph, which would do afterwards what some of the rewrites do.
    graph = graph_of(classifier, preprocessing, folded=False).graph
    return Cost(
        nodes=len(graph),
        parameters=sum(parameter.numel() for parameter in classifier.parameters()),
        flops=count_flops(classifier, image),
        activation_bytes=int(written_bytes(graph)),
    )


def written_bytes(graph: Any) -> int:
    """Bytes that the nodes of an onnx_ir graph write for one image; views write nothing."""
    values = [value for node in graph if node.op_type not in VIEWS for value in node.outputs]
    return sum(_elements(value.shape) * value.dtype.itemsize for value in values if value.shape is not None)


def _elements(shape: Any) -> int:
    """Elements of a shape at a batch of one. A dimension is a number or a product with the batch, as in `197*N`.

    A dimension that shape inference could not express so counts as one: the sum may be too small, never too large.
    """
    factors = (factor for dim in shape for factor in str(dim if isinstance(dim, int) else dim.value).split("*"))
    return math.prod(int(factor) for factor in factors if factor.isdigit())
