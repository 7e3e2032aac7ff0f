"""Planted mistakes as files: every row of this package, the text it plants, and whether that is a program.

A mistake that dies of a name which the package no longer has is no mistake that a test has seen.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

import tests.mutations

PACKAGE = Path(__file__).parents[2] / "raymega"
UNDEFINED = "F821,F822,F823"
"""Rules of ruff: names that nothing defines, and local names that are read before they are set."""
WORDS_OF_DEATH = re.compile(
    r"\b(?:NameError|UnboundLocalError|AttributeError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b"
)
"""What Python says of a text that fits its package no longer."""


class Row(Protocol):
    """A planted mistake of any table."""

    name: str
    file: str
    old: str
    new: str


@cache
def all_rows() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of each module of this package, by its name."""
    found = {}
    for module in pkgutil.iter_modules(tests.mutations.__path__):
        # the table of all is no further one
        if module.name.startswith("test_") or module.name == "table":
            continue
        values = vars(importlib.import_module(f"tests.mutations.{module.name}")).values()
        tables = [value for value in values if isinstance(value, tuple) and value]
        rows = (row for table in tables for row in table if _is_row(row))
        # a table may stand under two names
        once = {id(row): row for row in rows}
        if once:
            found[module.name] = tuple(once.values())
    return found


def _is_row(value: object) -> bool:
    return type(value).__name__.endswith("Mutation")


def planted_text(row: Row) -> str:
    """Return the source of the row's file with the mistake.

    Raises:
        ValueError: The file does not have the text exactly once, or the mistake changes nothing.
    """
    text = (PACKAGE / row.file).read_text()
    if text.count(row.old) != 1 or row.old == row.new:
        raise ValueError(f"{row.file} no longer has the text of {row.name!r} exactly once")
    return text.replace(row.old, row.new)


def undefined_names(texts: Iterable[str], folder: Path) -> dict[int, str]:
    """Return what ruff says of the texts that do not parse or name what nothing defines, by their places."""
    for place, text in enumerate(texts):
        (folder / f"{place}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        UNDEFINED,
    ]
    done = subprocess.run(
        [*command, "--output-format", "concise", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    lines = re.findall(r"(\d+)\.py:\d+:\d+: (.+)", done.stdout)
    return {int(place): said for place, said in reversed(lines)}
