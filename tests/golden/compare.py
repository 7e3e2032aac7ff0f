"""Goldens beside what is made now, and what is said where they differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import isclose
from pathlib import Path

from tests.golden.produce import MADE_ON, made_on
from tests.golden.tolerances import FOREIGN_FLOAT64, FOREIGN_ZERO

FILES = Path(__file__).parent / "files"
MAX_LINES = 60
MAX_WIDTH = 300
"""Of a line of a difference that is shown."""
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]?\d+")
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
HINT = "if this change is meant: make golden, and read the diff"


def stored(name: str) -> str | None:
    """A golden's text; None when there is none."""
    path = FILES / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


def stored_names() -> set[str]:
    """Every file that lies among the goldens."""
    return {str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file()}


def difference(texts: Mapping[str, str]) -> str:
    """What is not as its golden is; empty when all is."""
    is_foreign = stored(MADE_ON) != made_on()
    parts = [
        part
        for name, text in texts.items()
        if not (is_foreign and (name == MADE_ON or _is_near(text, stored(name))))
        for part in _diff(name, stored(name), text)
    ]
    return "\n".join([*parts, HINT]) if parts else ""


def _is_near(text: str, wanted: str | None) -> bool:
    """The same but for the last digits of numbers with a point, and for digests of these."""
    if wanted is None:
        return False
    mine, theirs = (DIGEST.sub("*", each) for each in (text, wanted))
    if NUMBER.split(mine) != NUMBER.split(theirs):
        return False
    pairs = zip(NUMBER.findall(mine), NUMBER.findall(theirs), strict=True)
    return all(
        isclose(float(one), float(other), rel_tol=FOREIGN_FLOAT64, abs_tol=FOREIGN_ZERO)
        for one, other in pairs
    )


def _diff(name: str, wanted: str | None, text: str) -> Iterator[str]:
    if wanted == text:
        return
    if wanted is None:
        yield f"{name}: there is no such golden"
        return
    lines = difflib.unified_diff(
        wanted.splitlines(), text.splitlines(), f"golden {name}", "now", n=1, lineterm=""
    )
    shown = list(_shortened(islice(lines, MAX_LINES + 1)))
    yield "\n".join(shown[:MAX_LINES] + ["..."] * (len(shown) > MAX_LINES))
    if not shown:
        yield f"{name}: only the ends of lines differ"


def _shortened(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a width that can be read; of a long one that was changed, from where that begins."""
    held = ""
    for line in [*lines, ""]:
        is_change = held[:1] == "-" and line[:1] == "+"
        pairs = enumerate(zip(held[1:], line[1:], strict=False), start=1)
        first = next((at for at, (one, other) in pairs if one != other), 1) if is_change else 1
        begin = max(1, first - MAX_WIDTH // 3)
        if held:
            yield held[:1] + held[begin : begin + MAX_WIDTH]
        if is_change:
            yield line[:1] + line[begin : begin + MAX_WIDTH]
        held = "" if is_change else line
