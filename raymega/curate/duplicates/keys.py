"""Rows of the tables by which copies in other groups are found.

A document is named by its id, as two numbers, and its place: the group, and its row in the group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.curate.document import CuratedDocument

# Key of 128 bits, the document's id and place; ``line`` is the number of the line, or 0.
KEY = np.dtype(
    [("key", "<u8"), ("key2", "<u8"), ("high", "<u8"), ("low", "<u8"), ("group", "<u4"), ("row", "<u4"), ("line", "<u4")]
)  # fmt: skip
# What is removed from a group: a document, or a line of it; for which one, and how similar it is.
REMOVAL = np.dtype(
    [("row", "<u4"), ("line", "<u4"), ("high", "<u8"), ("low", "<u8"), ("score", "<f8")]
)


def id_numbers(document: CuratedDocument) -> tuple[int, int]:
    """Return the two halves of a document's id."""
    return int(document.id[:16], 16), int(document.id[16:], 16)


def id_of(high: int, low: int) -> str:
    """Return the id of two halves."""
    return f"{high:016x}{low:016x}"


def part_of(keys: npt.NDArray[np.uint64], num_parts: int) -> npt.NDArray[np.int64]:
    """Return the part of each key; equal keys are in one part."""
    return (keys % np.uint64(num_parts)).astype(np.int64)


def order_of(rows: npt.NDArray[Any], *names: str) -> npt.NDArray[np.int64]:
    """Return the order by the columns, the first of which counts most."""
    return np.lexsort([rows[name] for name in reversed(names)])
