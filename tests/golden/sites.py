"""Every place of the package that makes a fault, found in its source, and which of them a body reaches.

A place is a call of ``Fault``, a call with the fields of one, such as an error's, or that of a function that returns
one, or those of a table, so that a helper with ten callers counts as eleven places. Nothing here knows a module's name: what moves is found where it lies.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType

import yaml

import raymega
from raymega.errors import Fault

PACKAGE = Path(raymega.__file__).parent
UNREACHED = Path(__file__).parent / "cases" / "unreached.yaml"
FAULT = Fault.__name__
HOLE = "{}"
"""In the words of a site: what only running it tells."""
FAULT_ROW = "FaultRow"
"""What a function is given that makes faults of its caller's words."""
MAX_DEPTH = 6
"""Frames between a fault and the outermost helper that made it."""
LEAST_WORDS = 4
"""Of a text in a function that makes faults, from which on it is a part of what is told."""

Position = tuple[str, int, int]
"""File below the package, line and column of a call's first character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One call that makes a fault.

    Attributes:
        at: Where it stands.
        function: The function around it; empty at module level.
        callee: What is called: ``Fault``, or a function that makes one.
        words: Its literal arguments, with a hole for each value.
        texts: Every longer text of the function around it.
    """

    at: Position
    function: str
    callee: str
    words: str
    texts: tuple[str, ...]

    @property
    def key(self) -> str:
        """What the site is called in unreached.yaml: its words, or where it has none the function."""
        return self.words if re.search(r"\w", self.words) else f"in {self.function}"

    def __str__(self) -> str:
        file, line, _ = self.at
        return f"{file}:{line} in {self.function or 'the module'}: {self.words}"


@cache
def all_sites() -> tuple[Site, ...]:
    """Every site of the package, by file and line."""
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {
        path: ast.parse(text)
        for path, text in sources.items()
        if f"{FAULT}(" in text or "remedy=" in text
    }
    makers = {path: {FAULT, *_makers(tree)} for path, tree in trees.items()}
    public = {name for names in makers.values() for name in names if not name.startswith("_")}
    callers = re.compile(rf"\b({'|'.join(public)})\(")
    trees |= {
        path: ast.parse(text)
        for path, text in sources.items()
        if path not in trees and callers.search(text)
    }
    return tuple(
        site
        for path, tree in sorted(trees.items())
        for site in _sites(tree, str(path.relative_to(PACKAGE)), makers.get(path, set()) | public)
    )


@contextmanager
def reached_sites() -> Iterator[set[Position]]:
    """The positions of all calls that lie on the way to a fault made in the body."""
    reached: set[Position] = set()
    plain = Fault.__init__

    def watched(self: Fault, *args: str, **kwargs: str) -> None:
        plain(self, *args, **kwargs)
        reached.update(_callers(sys._getframe(1)))

    Fault.__init__ = watched
    try:
        yield reached
    finally:
        Fault.__init__ = plain


def problems(reached: Set[Position], told: str) -> list[str]:
    """What the cases leave out: sites, texts, and entries of unreached.yaml that nothing needs.

    Args:
        reached: Positions at which faults were made.
        told: Everything that was told, in lines that end.
    """
    listed = _listed()
    left = [site for site in all_sites() if site.at not in reached]
    untold = _untold(reached, told)
    needed = Counter(site.key for site in left) + Counter(untold)
    return [
        *(f"no case reaches {site}" for site in _open_sites(left, reached, told)),
        *(f"no case tells {text!r}" for text in sorted(untold - set(listed))),
        *(f"unreached.yaml lists without need {entry!r}" for entry in (listed - needed).elements()),
    ]


def _open_sites(left: Iterable[Site], reached: Set[Position], told: str) -> Iterator[Site]:
    """Those of ``left`` that are not listed as out of reach.

    The callers of a helper that is out of reach are so with it. A fault of a module's own is made
    before any case is, so it is looked for in what was ``told``.
    """
    helpers = {(site.at[0], site.function) for site in all_sites() if site.at in reached}
    public = {name for _, name in helpers if not name.startswith("_")}
    listed = _listed()
    for site in left:
        is_helped = (site.at[0], site.callee) in helpers or site.callee in public
        if not (site.callee == FAULT or is_helped):
            continue
        if not site.function and _is_told(site.words, told):
            continue
        if not listed[site.key]:
            yield site
        listed[site.key] -= 1


def _untold(reached: Set[Position], told: str) -> set[str]:
    """Longer texts of functions that make faults which stand nowhere in what was ``told``.

    So the rows of a table that share one call are each asked for.
    """
    texts = {text for site in all_sites() if site.at in reached for text in site.texts}
    return {text for text in texts if not _is_told(text, told)}


@cache
def out_of_reach() -> dict[str, list[str]]:
    """Reason to the words of what no case can reach for it."""
    table: dict[str, list[str]] = yaml.safe_load(UNREACHED.read_text())
    return table


def _listed() -> Counter[str]:
    return Counter(words for reasons in out_of_reach().values() for words in reasons)


def _is_told(words: str, told: str) -> bool:
    """Whether a line has the parts of ``words`` between its holes, in order."""
    parts = words.split(HOLE)
    longest = max(parts, key=len)
    at = told.find(longest)
    while at >= 0:
        end = told.index("\n", at)
        if _has_parts(told[told.rfind("\n", 0, at) + 1 : end], parts):
            return True
        at = told.find(longest, end)
    return False


def _has_parts(line: str, parts: Iterable[str]) -> bool:
    at = 0
    for part in parts:
        at = line.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _callers(frame: FrameType | None) -> Iterator[Position]:
    """Positions at which the innermost frames of the package stand."""
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
            line, _, column, _ = next(positions)
            yield str(path.relative_to(PACKAGE)), line or 0, column or 0
        frame = frame.f_back


def _makers(tree: ast.Module) -> Iterator[str]:
    """Functions that return a fault, or those of the rows that they are given."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        returned = ast.unparse(function.returns).split(" | ") if function.returns else ()
        if FAULT in returned or FAULT_ROW in ast.unparse(function.args):
            yield function.name


def _sites(tree: ast.Module, file: str, makers: set[str]) -> Iterator[Site]:
    around: dict[ast.AST, ast.FunctionDef | None] = {}
    for node in ast.walk(tree):
        inner = node if isinstance(node, ast.FunctionDef) else around.get(node)
        around |= dict.fromkeys(ast.iter_child_nodes(node), inner)
    for node, function in around.items():
        if isinstance(node, ast.Call) and (_called(node) in makers or _has_fields(node)):
            yield Site(
                at=(file, node.lineno, node.col_offset),
                function=function.name if function else "",
                callee=FAULT if _has_fields(node) else _called(node),
                words=_words(node),
                texts=_texts(function) if function else (),
            )


def _has_fields(call: ast.Call) -> bool:
    """Whether the call has a fact, a rule and a remedy."""
    return {field.name for field in fields(Fault)} <= {keyword.arg for keyword in call.keywords}


def _called(call: ast.Call) -> str:
    """The name that is called, whatever it is an attribute of."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _words(call: ast.Call) -> str:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if _has_fields(call):
        told = {keyword.arg: keyword.value for keyword in call.keywords}
        given = [told[field.name] for field in fields(Fault)]
    return "; ".join(map(_literal, given))


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return HOLE


@cache
def _texts(function: ast.FunctionDef) -> tuple[str, ...]:
    """Texts of a function's body; not its docstring, nor the parts of a text."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return tuple(text for statement in body for text in _texts_below(statement))


def _texts_below(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
        text = _literal(node)
        if len(text.split()) >= LEAST_WORDS:
            yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts_below(child)
