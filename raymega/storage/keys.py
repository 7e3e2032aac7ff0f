"""Checks object keys against the one rule that every store follows."""

from __future__ import annotations

import re

from raymega.errors import StorageError

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def is_key(text: str) -> bool:
    """Return whether ``text`` is a legal object key: visible names joined by '/', so never ``..``."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return ``key`` when it is a legal object key.

    Raises:
        StorageError: The key is not legal; as a path it could leave the store's root.
    """
    if is_key(key):
        return key
    raise StorageError(
        fact=f"object key {key!r}",
        rule="a key is names of letters, digits, '_', '-' and '.', joined by '/', none of "
        "which begins with '.' or '-'",
        remedy="choose another name",
    )
