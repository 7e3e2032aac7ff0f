"""Absolute forms of the paths in a job, those in its lists of datasets too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from raymega.config.data import MEGATRON, is_computed

PATH_LISTS = ("data.sources", "data.stages", "data.validation")
"""Lists whose entries have a path, themselves or in a list inside."""


def with_absolute_paths(value: Any) -> Any:
    """Return a field's value with every relative ``path`` in the mappings of its lists made absolute."""
    if isinstance(value, tuple):
        return tuple(map(with_absolute_paths, value))
    if not isinstance(value, dict):
        return value
    found = {key: with_absolute_paths(inner) for key, inner in value.items()}
    make_absolute(found, "path")
    return found


def absolute_path(text: str) -> str:
    """Return a path of a job as an absolute one; URIs and words that name no file stay as they are."""
    # Megatron's files have a prefix, which is a path too.
    scheme = MEGATRON if text.startswith(MEGATRON) else ""
    path = Path(text.removeprefix(scheme))
    if "://" in text or text in ("", "none") or is_computed(text):
        return text
    with suppress(RuntimeError):  # ~name of an unknown user: the store's checks refuse it
        path = path.expanduser()
    return scheme + str(path.absolute())


def make_absolute(section: object, key: str) -> None:
    """Make one path of a section absolute; a section or value of another type is left as it is."""
    if isinstance(section, dict) and isinstance(section.get(key), str):
        section[key] = absolute_path(section[key])
