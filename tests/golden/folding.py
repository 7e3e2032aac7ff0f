"""Long lines of JSON, broken so that a diff of them can be read; taken together they are the bytes again."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]')


def fold(text: str, *, depth: int) -> str:
    """The JSON ``text`` with a line break after each comma that lies in ``depth`` brackets at most."""
    assert "\n" not in text.removesuffix("\n"), (
        "what is folded is one line, so that it can be undone"
    )
    parts, last, level = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        level += (token in "[{") - (token in "]}")
        if token == "," and level <= depth:
            parts.append(text[last : match.end()])
            last = match.end()
    return "\n".join([*parts, text[last:]])


def ranges(numbers: list[int]) -> str:
    """Such as ``0-7 16-23``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
