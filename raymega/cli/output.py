"""Output of commands: JSON values for programs, and tables that are never truncated for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raymega.errors import ConfigError


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON; :func:`_plain` converts dataclasses, job sections and paths.

    NaN and infinity, which JSON lacks, become null.
    """
    plain = json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None)
    print(json.dumps(plain), flush=True)


def json_object(value: Any, **names: str) -> dict[str, Any]:
    """Return a dataclass as a dict of its fields; ``names`` maps field names to other JSON keys."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {names.get(name, name): content for name, content in found.items()}


def _plain(value: object) -> object:
    """Return a dataclass as its fields, a job section as its non-default values, a path as text."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if is_dataclass(value):
        return json_object(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def relay(is_answer: Callable[[str], bool]) -> Callable[[str], None]:
    """Return a function that writes text to stdout where ``is_answer(line)`` holds, else to stderr."""

    def write(text: str) -> None:
        for line in text.splitlines(keepends=True):
            print(line, end="", file=sys.stdout if is_answer(line) else sys.stderr, flush=True)

    return write


def write_drawing(
    path: Path, drawing: str, *, rule: str, remedy: str, option: str = "--draw"
) -> None:
    """Write the file of ``--draw``, or of another option.

    Raises:
        ConfigError: The file cannot be written; ``rule`` and ``remedy`` are its texts.
    """
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        fact = f"{option} {path}: {error.strerror}"
        raise ConfigError(fact=fact, rule=rule, remedy=remedy) from error


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with columns two spaces apart; number columns are right-aligned."""
    # Widths and alignment are those of the formatted cells.
    cells = [list(headers), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    is_number = [
        bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))
    ]
    lines = []
    for row in cells:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: object) -> str:
    return f"{cell:,}" if _is_number(cell) else str(cell)
