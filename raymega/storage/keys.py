"""The names that objects may have: the same rule for every store."""

from __future__ import annotations

import re

from raymega.errors import Fault, StorageError

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def is_key(text: str) -> bool:
    """Whether ``text`` may name an object: visible names joined by '/', so never ``..``."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return ``key``.

    Raises:
        StorageError: It is not a legal name; it could leave the store's root.
    """
    if is_key(key):
        return key
    raise StorageError(
        Fault(
            fact=f"object key {key!r}",
            rule="a key is names of letters, digits, '_', '-' and '.', joined by '/', none of "
            "which begins with '.' or '-'",
            remedy="choose another name",
        )
    )
