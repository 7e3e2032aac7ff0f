"""Reads JSON objects, a line each or one a file, and names the place of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raymega.errors import ConfigError, Fault


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: It is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            Fault(
                fact=f"--data {path} is no UTF-8 text: byte {error.start:,} is {error.object[error.start]:#04x}",
                rule="a task's file is UTF-8 text",
                remedy=f"write it anew: iconv -f latin1 -t utf-8 {path} > {path}.utf8",
            )
        ) from error


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, as ``file:line``, and value of each JSON object of a file.

    Raises:
        ConfigError: A line is no JSON object.
    """
    text = read_text(path)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None  # lines
    if isinstance(whole, dict):
        yield f"{path}:1", whole
        return
    if isinstance(whole, list):
        yield from (
            (f"{path}[{number}]", _object(item, f"{path}[{number}]"))
            for number, item in enumerate(whole)
        )
        return
    # other line ends than this may stand inside a text
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(_fault(place, str(error))) from error
            yield place, _object(value, place)


def read_texts(path: Path) -> list[str]:
    """Return the string ``text`` of each object of a file.

    Raises:
        ConfigError: An object has none.
    """
    texts = []
    for place, found in read_objects(path):
        if not isinstance(found.get("text"), str):
            raise ConfigError(_fault(place, f"its keys are {', '.join(map(str, found)) or 'none'}"))
        texts.append(found["text"])
    return texts


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(_fault(place, f"it is a {type(value).__name__}"))
    return value


def _fault(place: str, fact: str) -> Fault:
    return Fault(
        fact=f"{place}: {fact}",
        rule="each line is a JSON object with a string `text`",
        remedy="correct the line, or give another --data",
    )
