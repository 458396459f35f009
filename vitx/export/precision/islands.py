"""Which nodes of a half-precision graph stay in float32: those that overflow, and those that round too much."""

import numpy as np
import onnx

from vitx.core.console import counted
from vitx.core.preprocess import UInt8Array
from vitx.data.image_set import evenly_spaced
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import run_with_outputs
from vitx.export.precision.acceptance import Judge, minimal_subset
from vitx.export.precision.calibration import observe, require_finite
from vitx.export.precision.half import LARGEST, HalfGraph, cpu_twin

# Overflow is looked for on at most so many images, for every tensor is read there; on the first of them alone if the
# largest value is so many times smaller than the type's.
OBSERVED_IMAGES, FIRST_OBSERVED, HEADROOM = 128, 16, 8
# Images on which the error that each node adds is measured: few, because it only orders the candidates for islands.
SENSITIVITY_IMAGES = 8


class Overflow:
    """The largest values of a graph on real images, and the nodes that cannot be of a half type because of them.

    Raises CheckFailed, naming the tensor, for values that are not finite in float32.
    """

    def __init__(self, graph: onnx.ModelProto, half: HalfGraph, images: UInt8Array) -> None:
        self.half, self.flow = half, half.flow
        limit = LARGEST[half.element_type]
        for count in (FIRST_OBSERVED, OBSERVED_IMAGES):
            self.images = images[evenly_spaced(len(images), count)]
            self.largest = _largest(graph, self.flow, self.images)
            if max(self.largest.values(), default=0.0) * HEADROOM <= limit:
                break
        self.tensors = {name: value for name, value in self.largest.items() if value > limit}
        constants = {
            name
            for name in self.flow.constants
            if self.flow.is_float(name) and np.abs(self.flow.array(name)).max(initial=0) > limit
        }
        beyond = set(self.tensors) | constants
        self.nodes = [
            node.name
            for node in self.flow.nodes
            if node.name in half.floating and beyond.intersection((*node.input, *node.output))
        ]


def _largest(graph: onnx.ModelProto, flow: Dataflow, images: UInt8Array) -> dict[str, float]:
    tensors = sorted({name for node in flow.nodes for name in node.output if flow.is_float(name)})
    activations = observe(graph, tensors, images, histograms=False)
    require_finite(activations, flow.producers())
    return {name: seen.largest for name, seen in activations.items()}


def find_islands(overflow: Overflow, judge: Judge) -> tuple[tuple[str, ...], dict[str, float]]:
    """The fewest nodes in float32, and the error that each node adds (measured only if islands are needed)."""
    half = overflow.half
    if judge.passes(half.build(()), "no island"):
        return (), {}
    added = added_error_by_node(half, overflow.nodes, overflow.images[:SENSITIVITY_IMAGES])
    # Overflow first: one infinite value ruins the logits, which no number of rounding errors does.
    rest = sorted((name for name in added if name not in overflow.nodes), key=lambda name: -added[name])
    ordered = [*overflow.nodes, *rest]
    count = len(overflow.nodes)
    if count and judge.passes(half.build(overflow.nodes), f"{counted(count, 'island')}, where it overflows"):
        # No other island is needed, and perhaps not all of these: a large value may be harmless (before a Softmax).
        ordered = list(overflow.nodes)
    islands = minimal_subset(ordered, lambda names: judge.passes(half.build(names), counted(len(names), "island")))
    return islands, {name: added.get(name, 0.0) for name in ordered[: max(20, len(islands))]}


def added_error_by_node(half: HalfGraph, islands: list[str], images: UInt8Array) -> dict[str, float]:
    """The relative error ‖exact - rounded‖ / ‖exact‖ of each node's result less that of its inputs, in half precision.

    The float32 graph and the twin of the half graph run side by side. `islands`, the nodes that overflow, stay in
    float32, or everything after them would be NaN.
    """
    flow = half.flow
    twin = cpu_twin(half.build(islands))
    made = {name for node in twin.graph.node for name in node.output}.difference(flow.outputs)
    tensors = [name for node in flow.nodes for name in node.output if flow.is_float(name) and name in made]
    # Sums of squares over all images, from which each tensor's norms are taken at the end.
    error, size = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0.0)
    exact_graph = flow.assemble(flow.nodes)
    for exact, rounded in zip(
        run_with_outputs(exact_graph, tensors, images), run_with_outputs(twin, tensors, images), strict=True
    ):
        for name in tensors:
            error[name] += float(np.square(exact[name].astype(np.float64) - rounded[name]).sum())
            size[name] += float(np.square(exact[name], dtype=np.float64).sum())
    relative = {name: float(np.sqrt(error[name] / size[name])) if size[name] else 0.0 for name in tensors}
    return {
        node.name: max((relative.get(name, 0.0) for name in node.output), default=0.0)
        - max((relative.get(name, 0.0) for name in node.input), default=0.0)
        for node in flow.nodes
        if node.name in half.floating
    }
