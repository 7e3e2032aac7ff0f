"""Writes small files that are whole under their names, whoever else writes the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

PARTIAL_SUFFIX = ".partial"


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that gets its final name only when complete; make its folder.

    The temporary name is unique: a task of a preparation that was killed may still be writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    with partial.open("wb") as file:
        file.writelines(pieces)
    partial.replace(path)
