"""Plain-text tables: aligned columns that are never cut, so that they can be copied and piped."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of columns two spaces apart; whole numbers get thousands and stand to the right."""
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
