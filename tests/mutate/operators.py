"""Operators that draw a mistake: each finds places in a module's syntax tree, and changes one of them.

A place is given by its number, so that an operator's name, a file and a number say a mistake for ever, as long as the
file does not change. Left alone is what changes no number of a run: docstrings, messages of errors and of logs, functions
that return text or faults, conditions that only raise or log, questions for a type, and limits of waits.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[], None]
NARROWER = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}
OTHER_AXIS = {0: 1, 1: 0, -1: 0, 2: 1}
ALIKE = {
    "tp": "cp", "cp": "tp", "dp": "cp", "pp": "dp", "ep": "etp", "etp": "ep", "edp": "dp", "replicas": "dp",
    "sharers": "copies", "copies": "sharers", "micro": "tp", "inner": "outer", "outer": "inner",
}  # fmt: skip
"""Groups and axes that are easily mistaken for one another."""
SUMS = ("all_reduce", "start_all_reduce", "reduce_scatter")
SPOKEN = ("fact", "rule", "remedy", "description", "log")
"""Arguments that are for people."""
LOGGED = ("warning", "info", "debug", "exception")
"""Functions that log; not those named log, which are logarithms."""
REFUSALS = ("raise_faults", "raise_if_aborted")
"""Functions that return nothing and may raise."""
WAITS = ("timeout", "stacklevel", "maxsize", "max_workers", "indent")
"""Arguments that decide how long something waits or how it looks; names that end in _s are of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place where an operator can change a tree: its line, the change, and what it says."""

    line: int
    change: Change
    text: str


Operator = Callable[[ast.AST], Iterator[Place]]


def drop_a_factor(tree: ast.AST) -> Iterator[Place]:
    """Change a * b or a / b to a; a minus b to a; drop a call such as .mul_(x)."""
    for node in _nodes(tree):
        is_sum = isinstance(node, ast.BinOp) and not _has_text(node)
        if is_sum and isinstance(node.op, ast.Mult | ast.Div | ast.Sub | ast.Add):
            yield _replaced(tree, node, node.left)
        is_scaling = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_scaling and node.func.attr in (
            "mul_",
            "mul",
            "div_",
            "div",
            "add_",
            "sub_",
            "clamp",
            "square",
        ):
            yield _replaced(tree, node, node.func.value)


def swap_axes(tree: ast.AST) -> Iterator[Place]:
    """Take another dim, another index, or a group that is easily mistaken for the right one."""
    for node in _nodes(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "dim"
            and _number(node.value) in OTHER_AXIS
        ):
            yield _set(node, "value", ast.Constant(OTHER_AXIS[_number(node.value)]))
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ALIKE
            and isinstance(node.ctx, ast.Load)
        ):
            yield _set(node, "attr", ALIKE[node.attr])
        if isinstance(node, ast.Subscript) and _number(node.slice) in (0, 1, -1):
            yield _set(node, "slice", ast.Constant({0: 1, 1: 0, -1: 0}[_number(node.slice)]))


def skip_a_group(tree: ast.AST) -> Iterator[Place]:
    """Leave out a sum over ranks, one branch of a condition, or the last turn of a loop."""
    for node in _nodes(tree):
        if isinstance(node, ast.Call) and _called(node) in SUMS and node.args:
            yield _replaced(tree, node, node.args[0])
        asks = isinstance(node, ast.If | ast.IfExp) and not _is_of_type(node.test)
        if asks and isinstance(node, ast.If):
            yield _set(node, "test", ast.Constant(False))
            yield _set(node, "test", ast.Constant(True))
        if asks and isinstance(node, ast.IfExp):
            yield _set(node, "test", ast.UnaryOp(ast.Not(), node.test))
        if isinstance(node, ast.For) and not isinstance(node.iter, ast.Constant):
            last = ast.Subscript(
                ast.Call(ast.Name("list", ast.Load()), [node.iter], []),
                ast.Slice(None, ast.Constant(-1), None), ast.Load(),
            )  # fmt: skip
            yield _set(node, "iter", last)


def off_by_one(tree: ast.AST) -> Iterator[Place]:
    """Take a number one more, or a comparison that also holds or no longer holds at its limit."""
    other = {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    }
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10:
            yield _set(node, "value", node.value + 1)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in other:
            yield _set(node, "ops", [other[type(node.ops[0])](), *node.ops[1:]])


def stale_value(tree: ast.AST) -> Iterator[Place]:
    """Leave out an assignment to a name that has a value already, or a call that is made for its effect."""
    for function in (node for node in _nodes(tree) if isinstance(node, ast.FunctionDef)):
        known = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for block in (
            body
            for node in ast.walk(function)
            if isinstance(body := getattr(node, "body", None), list)
        ):
            for statement in block:
                if isinstance(statement, ast.AugAssign):
                    yield _left_out(block, statement)
                elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                    if _called(statement.value) not in LOGGED + REFUSALS:
                        yield _left_out(block, statement)
                elif isinstance(statement, ast.Assign):
                    names = {
                        n.id
                        for t in statement.targets
                        for n in ast.walk(t)
                        if isinstance(n, ast.Name)
                    }
                    is_attribute = any(
                        isinstance(t, ast.Attribute | ast.Subscript) for t in statement.targets
                    )
                    if (names and names <= known) or (is_attribute and function.name != "__init__"):
                        yield _left_out(block, statement)
                    known |= names


def wrong_dtype(tree: ast.AST) -> Iterator[Place]:
    """Take a narrower dtype, or leave out a cast."""
    compared = {
        id(part)
        for node in _nodes(tree)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
    }
    for node in _nodes(tree):
        if (
            isinstance(node, ast.Attribute)
            and id(node) not in compared
            and node.attr in NARROWER
            and getattr(node.value, "id", "") == "torch"
        ):
            yield _set(node, "attr", NARROWER[node.attr])
        is_cast = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (
            is_cast
            and node.func.attr in ("to", "float", "double")
            and len(node.args) <= 1
            and not node.keywords
        ):
            yield _replaced(tree, node, node.func.value)


OPERATORS: dict[str, Operator] = {
    "drop a factor": drop_a_factor, "swap axes": swap_axes, "skip a group": skip_a_group, "off by one": off_by_one,
    "stale value": stale_value, "wrong dtype": wrong_dtype,
}  # fmt: skip


def places(source: str) -> list[tuple[str, int, int]]:
    """Return (operator, number, line) of every mistake that can be planted in a module."""
    tree = ast.parse(source)
    return [
        (name, number, place.line)
        for name, operator in OPERATORS.items()
        for number, place in enumerate(operator(tree))
    ]


def plant(source: str, operator: str, number: int) -> tuple[str, str]:
    """Return the module with one mistake, and the statement before and after, in a line each."""
    tree = ast.parse(source)
    place = list(OPERATORS[operator](tree))[number]
    before = ast.unparse(tree).splitlines()
    place.change()
    changed = ast.unparse(ast.fix_missing_locations(tree))
    after = changed.splitlines()
    gone = next(
        (line for line, other in zip(before, [*after, ""], strict=False) if line != other), ""
    )
    come = next((line for line, other in zip(after, before, strict=False) if line != other), "")
    return changed + "\n", f"{gone.strip()} -> {come.strip()}"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in their order that a run's numbers may depend on."""
    for child in ast.iter_child_nodes(tree):
        if _is_spoken(child):
            continue
        yield child
        yield from _nodes(child)


TYPE_QUESTIONS = ("isinstance", "issubclass", "hasattr")
NO_NUMBERS = (
    ast.AnnAssign, ast.arg, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert, ast.Raise, ast.Global,
)  # fmt: skip
"""Kinds of nodes that hold types, names and texts."""


def _is_spoken(node: ast.AST) -> bool:
    """Return whether a node is for people, types or refusals alone."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Call():
            return _called(node) in LOGGED + REFUSALS
        case ast.keyword(arg=str(name)):
            return name in SPOKEN or name in WAITS or name.endswith("_s")
        case ast.FunctionDef(returns=ast.AST() as returns):
            return ast.unparse(returns) in ("str", "NoReturn") or "Fault" in ast.unparse(returns)
        case ast.If(body=body, orelse=[]):
            return all(isinstance(each, ast.Raise) or _is_said(each) for each in body)
    return isinstance(node, NO_NUMBERS)


def _is_said(statement: ast.stmt) -> bool:
    """Return whether a statement logs or refuses, and does nothing else."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call and _called(statement.value) in LOGGED + REFUSALS


def _is_of_type(test: ast.expr) -> bool:
    """Return whether a condition asks for a type alone: what follows does not work for another."""
    while isinstance(test, ast.UnaryOp):
        test = test.operand
    is_call = isinstance(test, ast.Call) and _called(test) in TYPE_QUESTIONS
    return is_call or getattr(test, "id", "") == "TYPE_CHECKING"


def _has_text(node: ast.BinOp) -> bool:
    """Return whether strings are joined, not numbers added."""
    sides = (node.left, node.right)
    texts = (s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str))
    return any(texts) or any(isinstance(side, ast.JoinedStr) for side in sides)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _number(node: ast.AST | None) -> object:
    """Return an integer literal's value, negative ones included; None otherwise."""
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    is_integer = isinstance(node, ast.Constant) and type(node.value) is int
    return node.value if is_integer else None


def _set(node: ast.AST, field: str, value: object) -> Place:
    return Place(
        line=getattr(node, "lineno", 0), change=lambda: setattr(node, field, value), text=field
    )


def _replaced(tree: ast.AST, node: ast.AST, other: ast.AST) -> Place:
    def change() -> None:
        for parent in ast.walk(tree):
            for name, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, name, copy.deepcopy(other))
                    return
                if isinstance(value, list) and any(each is node for each in value):
                    value[[each is node for each in value].index(True)] = copy.deepcopy(other)
                    return

    return Place(line=node.lineno, change=change, text="")


def _left_out(block: list[ast.stmt], statement: ast.stmt) -> Place:
    def change() -> None:
        place = [each is statement for each in block].index(True)
        block[place] = ast.copy_location(ast.Pass(), statement)

    return Place(line=statement.lineno, change=change, text="")
