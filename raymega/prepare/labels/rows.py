"""Rows with labels: what they must have, and their text for all that follows.

A row's text is its content as JSON, so that readers, held-out splits and origins treat it as any document;
`documents.py` tokenizes it.

    classification        {"text": "...", "label": 2}
    regression            {"text": "...", "label": 3.7}
    token_classification  {"tokens": ["...", ...], "tags": [0, 2, -100, ...]}; words, and -100 for one without a class
    multiple_choice       {"context": "...", "question": "...", "choices": ["...", ...], "label": 0}
    embedding             {"anchor": "...", "positive": "..."}; two texts that belong together
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raymega.config.heads.section import MOST_CLASSES
from raymega.data.format import RowFormat

LABELLED: tuple[RowFormat, ...] = (
    "classification", "token_classification", "multiple_choice", "regression", "embedding",
)  # fmt: skip
KEYS = LABEL, TAGS, CONTEXT, QUESTION, POSITIVE = "label", "tags", "context", "question", "positive"
"""Keys that a row may have beside that of its format."""
NO_CLASS = -100
"""Tag of a word without a class, as in transformers."""
MOST_CHOICES = 63
LARGEST = 3.4028234e38
"""Largest number of float32."""


def labelled_text(row: Mapping[str, Any], row_format: RowFormat, key: str) -> tuple[str, str]:
    """Return the text of a row and, if it has no labels, the reason.

    Args:
        row: Row of a file, with the key of its format.
        row_format: Format of the row, one of LABELLED.
        key: Key of the text, of the words, or of the choices.
    """
    try:
        content = {
            "classification": _classified,
            "token_classification": _tagged,
            "multiple_choice": _question,
            "regression": _valued,
            "embedding": _matched,
        }[row_format](row, key)
    except ValueError as error:
        return "", str(error)
    return json.dumps(content, ensure_ascii=False), ""


def _classified(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {"text": _string(row, key), "label": _number(row.get(LABEL), LABEL, MOST_CLASSES)}


def _tagged(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    words, tags = row[key], row.get(TAGS)
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise ValueError(f"its {key!r} is no list of words")
    if not isinstance(tags, list) or len(tags) != len(words):
        raise ValueError(f"its {TAGS!r} is no list of {len(words)} classes, one a word")
    known = [t if t == NO_CLASS else _number(t, f"{TAGS} entry", MOST_CLASSES) for t in tags]
    return {"words": words, "tags": known}


def _question(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    choices = row[key]
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise ValueError(f"its {key!r} is no list of texts")
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise ValueError(f"it has {len(choices)} choices, not 2 to {MOST_CHOICES}")
    begin = [_string(row, name) for name in (CONTEXT, QUESTION) if row.get(name)]
    return {
        "begin": begin,
        "choices": choices,
        "label": _number(row.get(LABEL), LABEL, len(choices)),
    }


def _valued(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value: Any = row.get(LABEL)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and abs(value) <= LARGEST):
        raise ValueError(f"its {LABEL!r} is {value!r}, not a number of float32")
    return {"text": _string(row, key), "label": float(value)}


def _matched(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {"texts": [_string(row, key), _string(row, POSITIVE)]}


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its {name!r} is a {type(value).__name__}, not a string")
    return value


def _number(value: Any, name: str, most: int) -> int:
    # JSON's true and false are classes 1 and 0
    if not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"its {name!r} is {value!r}, not a whole number from 0 to {most - 1}")
    return int(value)
