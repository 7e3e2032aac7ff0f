"""The protocols that object stores implement, and a store that delegates to another.

Objects are immutable bytes under '/'-separated keys relative to the store's root. Which store a URI
selects is decided in ``storage/registry.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable


class Store(Protocol):
    """Six methods, all blocking, all safe to call from several threads.

    A key becomes visible only when its object is whole; a reader never sees part of one. Failures
    raise StorageError; a missing key raises KeyError.
    """

    @property
    def uri(self) -> str:
        """Location of the root, for messages and for opening the store elsewhere."""

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return bytes [start, start + num_bytes), fewer at the object's end; -1 reads to the end."""

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with ``prefix``, in sorted order."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""


@runtime_checkable
class ReadsInto(Protocol):
    """Optional method of a store: read an object straight into the caller's memory, without a copy."""

    def read_into(
        self, key: str, place: memoryview, *, start: int, piece_bytes: int
    ) -> Iterator[memoryview]:
        """Fill ``place`` with the object's bytes from ``start`` on; yield each piece after it is read.

        Pieces have at most ``piece_bytes``. If the object ends first, the rest of ``place`` stays as it was.
        """


class DelegatingStore:
    """A store that delegates every method to another; subclasses override some of them.

    It is as thread-safe as the other store. It does not offer ReadsInto, even if the other does.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def uri(self) -> str:
        """See Store."""
        return self._store.uri

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """See Store."""
        self._store.put(key, chunks, overwrite=overwrite)

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """See Store."""
        return self._store.get(key, start=start, num_bytes=num_bytes)

    def size(self, key: str) -> int:
        """See Store."""
        return self._store.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        """See Store."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """See Store."""
        self._store.delete(key)
