"""Graphs drawn at random, of layers, norms, factors, sums, views and splits: all folds together keep every value."""

import copy
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.export.graph.simplify import FOLDS, simplify
from vitx.export.graph.view_folds import ELEMENTWISE

Array = npt.NDArray[Any]
SEEDS, NODES = range(96), 14
# A dimension: a number, or a multiple of the batch, of which a shape has one.
Dim = int | str


def times(dim: Dim) -> int:
    """Of a multiple of the batch, such as "6*N", the number before it."""
    return dim if isinstance(dim, int) else int(dim.partition("*")[0])


def target_of(shape: list[Dim]) -> Array:
    return np.array([dim if isinstance(dim, int) else -1 for dim in shape], np.int64)


class Drawn:
    """A graph of x (N, T, K), which grows by one random step after another; `read` are values with other readers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.shapes: dict[str, list[Dim]] = {"x": ["1*N", *(int(size) for size in self.rng.integers(2, 6, 2))]}
        self.outputs: list[str] = []
        self.value = "x"
        steps = [self.layer, self.layer, self.factor, self.factor, self.shift, self.shift, self.transpose]
        steps += [self.transpose, self.view, self.view, self.function, self.slice, self.pad, self.parts, self.constant]
        steps += [self.norm, self.convolution, self.split, self.expand, self.scores]
        while len(self.nodes) < NODES:
            steps[self.rng.integers(len(steps))]()
            if self.rng.random() < 0.06:
                self.other_reader()
        self.outputs.append(self.value)

    @property
    def shape(self) -> list[Dim]:
        return self.shapes[self.value]

    def new(self, operator: str, inputs: list[str], shape: list[Dim], **attributes: Any) -> None:
        name = f"v{len(self.nodes)}"
        if self.rng.random() < 0.05 and f"blocks.{len(self.nodes)}" not in self.shapes:
            name = f"blocks.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        self.shapes[name], self.value = shape, name

    def constant_of(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def numbers(self, *shape: int) -> str:
        values = self.rng.uniform(0.5, 1.5, shape) * self.rng.choice([-1, 1], shape)
        return self.constant_of(np.float32(values))

    def spread(self, *, wide: bool = False) -> str:
        """A constant that varies along an axis of the value or none, if `wide` along several; without leading ones."""
        axes = [axis for axis, dim in enumerate(self.shape) if isinstance(dim, int)]
        varying = {axis for axis in axes if self.rng.random() < 0.5}
        if axes and not wide:
            varying = {self.rng.choice(axes)} if self.rng.random() < 0.8 else set()
        sizes = [times(dim) if axis in varying else 1 for axis, dim in enumerate(self.shape)]
        while sizes and sizes[0] == 1 and self.rng.random() < 0.7:
            sizes = sizes[1:]
        return self.numbers(*sizes)

    def layer(self) -> None:
        """A product with a matrix; a bias of the channels, of one number, of tokens, or none; a factor behind it."""
        if not isinstance(self.shape[-1], int):
            self.transpose()
            return
        before, channels = self.shape[-1], int(self.rng.integers(1, 7))
        weight = self.rng.normal(0, before**-0.5, (before, channels)).astype(np.float32)
        self.new("MatMul", [self.value, self.constant_of(weight)], [*self.shape[:-1], channels])
        kind = self.rng.integers(6)
        if kind < 4:
            sizes: Any = [(channels,), (1, channels), (), None][kind]
            bias = self.spread(wide=True) if sizes is None else self.numbers(*sizes)
            self.new("Add", self.either_order(bias), [*self.shape])
        for step in (self.transpose, self.view, self.split, self.factor, self.norm):
            if self.rng.random() < 0.5:
                step()

    def convolution(self) -> None:
        """In groups or not, padded at the end or not."""
        channels, *sides = self.shape[1:] if len(self.shape) > 2 else ["1*N"]
        if not isinstance(channels, int) or not all(isinstance(side, int) for side in sides):
            self.view()
            return
        groups = int(self.rng.choice([size for size in range(1, channels + 1) if channels % size == 0]))
        filters, kernel = groups * int(self.rng.integers(1, 4)), int(self.rng.integers(1, 3))
        pad = kernel - 1 if self.rng.random() < 0.5 or 1 in sides else 0
        weight = self.rng.normal(0, 1, (filters, channels // groups, *[kernel] * len(sides))).astype(np.float32)
        inputs = [self.value, self.constant_of(weight), *([self.numbers(filters)] if self.rng.random() < 0.5 else [])]
        shape: list[Dim] = [self.shape[0], filters, *(times(side) + pad - kernel + 1 for side in sides)]
        self.new("Conv", inputs, shape, group=groups, pads=[0] * len(sides) + [pad] * len(sides))

    def norm(self) -> None:
        """Along the second axis, mostly with a layer behind it."""
        if len(self.shape) < 2 or not isinstance(channels := self.shape[1], int):
            return
        inputs = [self.value, *(self.numbers(channels) for _ in range(3))]
        variance = self.constant_of(self.rng.uniform(0.5, 2, channels).astype(np.float32))
        self.new("BatchNormalization", [*inputs, variance], [*self.shape], epsilon=float(self.rng.choice([1e-5, 0.1])))
        if self.rng.random() < 0.6:
            (self.layer if len(self.shape) < 3 else self.convolution)()

    def split(self) -> None:
        """One of two parts goes on; another output may read the other."""
        axes = [axis for axis, dim in enumerate(self.shape) if isinstance(dim, int) and dim > 1]
        if not axes:
            return
        axis, index = int(self.rng.choice(axes)), len(self.nodes)
        first = int(self.rng.integers(1, times(self.shape[axis])))
        sizes, names = [first, times(self.shape[axis]) - first], [f"s{index}", f"t{index}"]
        along = axis if self.rng.random() < 0.5 else axis - len(self.shape)
        given = [self.value, self.constant_of(np.array(sizes))]
        self.nodes.append(helper.make_node("Split", given, names, axis=along))
        self.shapes |= {
            name: [*self.shape[:axis], size, *self.shape[axis + 1 :]] for name, size in zip(names, sizes, strict=True)
        }
        taken = int(self.rng.integers(2))
        self.value = names[taken]
        if self.rng.random() < 0.5:
            self.outputs.append(names[1 - taken])

    def expand(self) -> None:
        """The largest along an axis, expanded and beside the value or beside itself."""
        axes = [axis for axis, dim in enumerate(self.shape) if isinstance(dim, int)]
        if not axes:
            return
        whole, axis = self.value, int(self.rng.choice(axes))
        shape: list[Dim] = [*self.shape[:axis], 1, *self.shape[axis + 1 :]]
        self.new("ReduceMax", [whole, self.constant_of(np.array([axis]))], shape)
        target = [dim if isinstance(dim, int) else 1 for dim in self.shapes[whole]]
        self.new("Expand", [self.value, self.constant_of(np.array(target))], [*self.shapes[whole]])
        beside = whole if self.rng.random() < 0.8 else self.value
        self.new(str(self.rng.choice(["Add", "Mul"])), self.either_order(beside), [*self.shape])

    def scores(self) -> None:
        """The products of queries and keys, with a factor for each matrix or one for all."""
        source, count = self.value, int(self.rng.integers(1, 4))
        if len(self.shape) < 3 or not all(isinstance(dim, int) for dim in self.shape[-2:]):
            self.view()
            return
        *lead, tokens, width = self.shape
        sides = []
        for _ in range(2):
            weight = self.rng.normal(0, times(width) ** -0.5, (times(width), count)).astype(np.float32)
            self.new("MatMul", [source, self.constant_of(weight)], [*lead, tokens, count])
            sides.append(self.value)
        last = len(self.shape)
        self.new("Transpose", [sides[1]], [*lead, count, tokens], perm=[*range(last - 2), last - 1, last - 2])
        self.new("MatMul", [sides[0], self.value], [*lead, tokens, tokens])
        each = [times(dim) if isinstance(dim, int) and self.rng.random() < 0.5 else 1 for dim in lead]
        self.new("Mul", self.either_order(self.numbers(*each, 1, 1)), [*self.shape])

    def either_order(self, constant: str) -> list[str]:
        return [self.value, constant] if self.rng.random() < 0.5 else [constant, self.value]

    def factor(self) -> None:
        self.new("Mul", self.either_order(self.spread()), [*self.shape])

    def shift(self) -> None:
        self.new("Add", self.either_order(self.spread(wide=True)), [*self.shape])

    def transpose(self) -> None:
        perm = [int(axis) for axis in self.rng.permutation(len(self.shape))]
        if self.rng.random() < 0.2:
            self.new("Transpose", [self.value], self.shape[::-1])
        else:
            self.new("Transpose", [self.value], [self.shape[axis] for axis in perm], perm=perm)

    def view(self) -> None:
        """Two axes joined, one split in two, one of length one added or taken away."""
        shape, axis = [*self.shape], int(self.rng.integers(len(self.shape)))
        operator, kind = "Reshape", self.rng.integers(4)
        if kind == 0 and len(shape) > 2 and axis + 1 < len(shape):
            first, second = shape[axis : axis + 2]
            product = times(first) * times(second)
            shape[axis : axis + 2] = [product if isinstance(first, int) and isinstance(second, int) else f"{product}*N"]
        elif kind == 1 and len(shape) < 5:
            count = times(shape[axis])
            inner = int(self.rng.choice([size for size in range(1, count + 1) if count % size == 0]))
            outer: Dim = count // inner if isinstance(shape[axis], int) else f"{count // inner}*N"
            shape[axis : axis + 1] = [outer, inner]
        elif kind == 2 and len(shape) < 5:
            shape.insert(axis, 1)
            operator = "Unsqueeze"
        elif kind == 3 and len(shape) > 2 and shape[axis] == 1:
            del shape[axis]
            operator = "Squeeze"
        target = target_of(shape) if operator == "Reshape" else np.array([axis])
        self.new(operator, [self.value, self.constant_of(target)], shape)

    def function(self) -> None:
        """Of each value alone, mostly between two views, or along an axis."""
        names = ["Relu", "Tanh", "Gelu", "HardSwish", "Neg"]
        between = self.rng.random() < 0.7
        if between:
            self.view()
        if self.rng.random() < 0.2 and isinstance(self.shape[-1], int):
            self.new("Softmax", [self.value], [*self.shape], axis=-1)
        else:
            self.new(str(self.rng.choice(names)), [self.value], [*self.shape])
        if between:
            self.view()

    def slice(self) -> None:
        """One or two, one behind the other."""
        for _ in range(self.rng.integers(1, 3)):
            axes = [axis for axis, dim in enumerate(self.shape) if isinstance(dim, int) and dim > 1]
            if not axes:
                return
            axis, shape = int(self.rng.choice(axes)), [*self.shape]
            size = times(shape[axis])
            start = int(self.rng.integers(size))
            end, step = int(self.rng.integers(start + 1, size + 1)), int(self.rng.integers(1, 3))
            shape[axis] = len(range(start, end, step))
            given = [start, end, axis if self.rng.random() < 0.5 else axis - len(shape)]
            given += [step] if step > 1 or self.rng.random() < 0.5 else []
            self.new("Slice", [self.value, *(self.constant_of(np.array([number])) for number in given)], shape)

    def pad(self) -> None:
        shape, pads = [*self.shape], np.zeros(2 * len(self.shape), np.int64)
        axes = [axis for axis, dim in enumerate(shape) if isinstance(dim, int)]
        if axes and self.rng.random() < 0.4:
            axis = int(self.rng.choice(axes))
            pads[axis + len(shape) * self.rng.integers(2)], shape[axis] = 1, times(shape[axis]) + 1
        self.new("Pad", [self.value, self.constant_of(pads)], shape)

    def parts(self) -> None:
        """A layer whose channels are P parts; two of them are taken, and their sum or product goes on."""
        if not isinstance(self.shape[-1], int) or len(self.shape) > 3:
            self.view()
            return
        lead, count = len(self.shape) - 1, int(self.rng.integers(2, 4))
        inner = [int(size) for size in self.rng.integers(1, 4, self.rng.integers(1, 3))]
        width = count * int(np.prod(inner))
        weight = self.rng.normal(0, 1, (self.shape[-1], width)).astype(np.float32)
        self.new("MatMul", [self.value, self.constant_of(weight)], [*self.shape[:-1], width])
        if self.rng.random() < 0.6:
            self.new("Add", self.either_order(self.numbers(width)), [*self.shape])
        shape = [*self.shape[:-1], count, *inner]
        self.new("Reshape", [self.value, self.constant_of(target_of(shape))], shape)
        others = [int(axis) for axis in self.rng.permutation(len(shape)) if axis != lead]
        order = [lead, *others] if self.rng.random() < 0.9 else [others[0], lead, *others[1:]]
        self.new("Transpose", [self.value], [shape[axis] for axis in order], perm=order)
        joint, first = self.value, self.shape[0]
        if not isinstance(first, int):
            return
        taken = []
        for index in self.rng.choice(first, 2, replace=False) if first > 1 else [0, 0]:
            self.value = joint
            if self.rng.random() < 0.5:
                self.new("Gather", [joint, self.constant_of(np.int64(index))], self.shapes[joint][1:])
            else:
                given = [[index], [index + 1], [0]]
                names = [self.constant_of(np.array(number, np.int64)) for number in given]
                self.new("Slice", [joint, *names], [1, *self.shapes[joint][1:]])
                self.new("Squeeze", [self.value, self.constant_of(np.array([0]))], self.shapes[joint][1:])
            taken.append(self.value)
        self.new(str(self.rng.choice(["Add", "Mul"])), taken, [*self.shape])

    def constant(self) -> None:
        """The two parts of a constant, along the last axis, are a factor and a shift."""
        if not isinstance(self.shape[-1], int):
            return
        size, index = self.shape[-1], len(self.nodes)
        halves = [f"h{index}", f"k{index}"]
        both = self.numbers(1, 2 * size)
        self.nodes.append(helper.make_node("Split", [both], halves, axis=int(self.rng.choice([1, -1])), num_outputs=2))
        self.shapes |= {half: [1, size] for half in halves}
        if len(self.shape) > 1:
            self.new("Mul", [self.value, halves[0]], [*self.shape])
            self.new("Add", [self.value, halves[1]], [*self.shape])

    def other_reader(self) -> None:
        """Another output reads the value, or it is one itself."""
        before = self.value
        if self.rng.random() < 0.5 and before not in [*self.outputs, "x"]:
            self.outputs.append(before)
        else:
            self.new("Neg", [before], [*self.shape])
            self.outputs.append(self.value)
            self.value = before

    def model(self) -> onnx.ModelProto:
        def info(name: str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, self.shapes[name])

        self.outputs = list(dict.fromkeys(self.outputs))
        inner = [name for name in self.shapes if name not in [*self.outputs, "x"]]
        graph = helper.make_graph(
            *(self.nodes, "drawn", [info("x")], [info(name) for name in self.outputs]),
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
            value_info=[info(name) for name in inner],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@cache
def drawn(seed: int) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, int]]:
    """A graph, what the folds make of it, and in how many places each of them applied."""
    model = Drawn(seed).model()
    onnx.checker.check_model(model, full_check=True)
    folded = ir.serde.deserialize_model(model)
    places = simplify(folded)
    return model, ir.serde.serialize_model(folded), places


def values_of(model: onnx.ModelProto, x: Array) -> dict[str, Array]:
    """The outputs, and the tensors that parity looks for by name."""
    model = copy.deepcopy(model)
    made = {name for node in model.graph.node for name in node.output} - {output.name for output in model.graph.output}
    named = sorted(name for name in made if name.startswith("blocks."))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in named)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_folds_keep_the_values_of_a_random_graph(seed: int) -> None:
    model, folded, _ = drawn(seed)
    onnx.checker.check_model(folded)
    sizes = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, *sizes)).astype(np.float32)
        expected, found = values_of(model, x), values_of(folded, x)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name].shape == value.shape, name
            np.testing.assert_allclose(found[name], value, atol=3e-5 * np.abs(value).max(), rtol=0, err_msg=name)


def test_every_fold_has_places_in_these_graphs() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts.update(drawn(seed)[2])
    # The targets of views are constants here, and nothing is pooled: both are in test_folds.py.
    rare = {fold.__name__ for fold in FOLDS if counts[fold.__name__] < 5}
    assert rare == {"fix_reshape_targets", "fold_pads_of_maxima"}
    assert {"Relu", "Tanh", "Gelu", "HardSwish"} < set(ELEMENTWISE)
