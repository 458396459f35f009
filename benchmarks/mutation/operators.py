"""What a wrong line may look like: mutmut's operators, and those that mutmut lacks, in mutmut's own form.

An operator takes a node of libcst and yields the nodes that may stand in its place.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import libcst as cst
from mutmut.mutation import mutators

Operator = tuple[type[cst.CSTNode], Callable[[Any], Iterable[cst.CSTNode]]]

_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_OTHER_NAME |= {"argmin": "argmax", "argmax": "argmin", "append": "appendleft", "popleft": "pop"}
_ANY_ORDER = {"min", "max", "maximum", "minimum", "transpose", "swapaxes", "promote_types"}
_NOT_COMMUTATIVE = cst.Subtract | cst.Divide | cst.FloorDivide | cst.Modulo | cst.Power | cst.MatrixMultiply


def argument_left_out(node: cst.Call) -> Iterator[cst.CSTNode]:
    """mutmut's also replaces each argument by None, which fails at once whatever a test asserts: not taken."""
    for mutated in mutators.operator_arg_removal(node):
        shorter = isinstance(mutated, cst.Call) and len(mutated.args) < len(node.args)
        # What a dataclass weighs is nothing that a test asks.
        if shorter and _with_slots(mutated) == _with_slots(node):
            yield mutated


def _with_slots(node: cst.Call) -> bool:
    return any(argument.keyword is not None and argument.keyword.value == "slots" for argument in node.args)


def other_string(node: cst.SimpleString) -> Iterator[cst.CSTNode]:
    """The first of mutmut's three: the others change the case of the same string."""
    yield from list(mutators.operator_string(node))[:1]


def statement_removed(node: cst.BaseSmallStatement) -> Iterator[cst.CSTNode]:
    """A call whose result nobody takes, `x.y = …`, `x[y] = …`, `x += …`, `del` or `raise`: without it."""
    call = isinstance(node, cst.Expr) and isinstance(node.value, cst.Call | cst.Await)
    stored = isinstance(node, cst.Assign) and all(
        isinstance(target.target, cst.Attribute | cst.Subscript) for target in node.targets
    )
    if call or stored or isinstance(node, cst.AugAssign | cst.Del | cst.Raise):
        yield cst.Pass()


def condition_fixed(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
    """The guard dropped, and the guard that always holds."""
    if isinstance(node.test, cst.Name) and node.test.value in {"True", "False", "TYPE_CHECKING"}:
        return
    yield node.with_changes(test=cst.Name("False"))
    if isinstance(node, cst.If):
        yield node.with_changes(test=cst.Name("True"))


def operands_swapped(node: cst.BinaryOperation) -> Iterator[cst.CSTNode]:
    if isinstance(node.operator, _NOT_COMMUTATIVE):
        yield node.with_changes(left=node.right, right=node.left)


def arguments_swapped(node: cst.Call) -> Iterator[cst.CSTNode]:
    """The first two, where both are given by position and their order says something."""
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in _ANY_ORDER and len(node.args) == 2:
        return
    if len(node.args) > 1 and not any(argument.keyword or argument.star for argument in node.args[:2]):
        first, second, *rest = node.args
        swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value), *rest]
        yield node.with_changes(args=swapped)


def other_function(node: cst.Call) -> Iterator[cst.CSTNode]:
    """min for max, any for all, floor for ceil."""
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in _OTHER_NAME:
        yield node.with_deep_changes(name, value=_OTHER_NAME[name.value])


def other_exception(node: cst.Raise) -> Iterator[cst.CSTNode]:
    if isinstance(node.exc, cst.Call) and isinstance(node.exc.func, cst.Name):
        yield node.with_changes(exc=node.exc.with_changes(func=cst.Name("ArithmeticError")))


def decorator_removed(node: cst.FunctionDef) -> Iterator[cst.CSTNode]:
    """But not those without which nothing works, whatever a test asserts."""
    for index, decorator in enumerate(node.decorators):
        if cst.Module([]).code_for_node(decorator.decorator) not in {"property", "staticmethod", "classmethod"}:
            yield node.with_changes(decorators=[*node.decorators[:index], *node.decorators[index + 1 :]])


_REPLACED = {mutators.operator_string, mutators.operator_arg_removal}
# `a = None` for `a = b`, and for a lambda's body, fails at once whatever a test asserts: it would flatter every score.
_CRUDE = {mutators.operator_assignment, mutators.operator_lambda}

OPERATORS: tuple[Operator, ...] = (
    *((kind, operator) for kind, operator in mutators.mutation_operators if operator not in _REPLACED | _CRUDE),
    (cst.Call, argument_left_out),
    (cst.SimpleString, other_string),
    *((kind, statement_removed) for kind in (cst.Expr, cst.Assign, cst.AugAssign, cst.Del, cst.Raise)),
    (cst.If, condition_fixed),
    (cst.While, condition_fixed),
    (cst.BinaryOperation, operands_swapped),
    (cst.Call, arguments_swapped),
    (cst.Call, other_function),
    (cst.Raise, other_exception),
    (cst.FunctionDef, decorator_removed),
)
