"""All folds of a traced graph, in turn, until none of them finds anything more."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from vitx.export.graph.linear_folds import (
    fold_norms_ahead,
    fold_scales,
    join_added_constants,
    linears_as_gemm,
    split_joint_projections,
)
from vitx.export.graph.view_folds import (
    drop_empty_pads,
    drop_expands,
    fix_reshape_targets,
    fold_pads_of_maxima,
    merge_slices,
    merge_transposes,
    merge_views,
    split_constants,
    view_after_elementwise,
    view_transposes,
)

# In this order: a joint projection is taken apart before its layer is a Gemm between views.
FOLDS: tuple[Callable[[ir.Graph], int], ...] = (
    fix_reshape_targets,
    drop_empty_pads,
    fold_pads_of_maxima,
    split_constants,
    drop_expands,
    merge_slices,
    fold_norms_ahead,
    split_joint_projections,
    fold_scales,
    merge_transposes,
    view_transposes,
    join_added_constants,
    linears_as_gemm,
    view_after_elementwise,
    merge_views,
)


def simplify(model: Any) -> dict[str, int]:
    """Apply all folds to an onnx_ir.Model in place; return in how many places each of them applied."""
    places = Counter({fold.__name__: 0 for fold in FOLDS})
    while any((found := {fold.__name__: fold(model.graph) for fold in FOLDS}).values()):
        places.update(found)
    return dict(places)
