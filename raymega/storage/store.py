"""The protocol every object store implements, and the values it speaks in.

Objects are immutable bytes under '/'-separated keys relative to the store's root. No store is
chosen here: that is storage.registry's.
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
        """Where the root is, for people and for passing on."""

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read bytes [start, start + num_bytes); -1 is to the end."""

    def size(self, key: str) -> int:
        """Length of an object in bytes."""

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix``, in order."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""


@runtime_checkable
class ReadsInto(Protocol):
    """What a store may do beside that: bring bytes to where they are wanted, without others' memory."""

    def read_into(
        self, key: str, place: memoryview, *, start: int, piece_bytes: int
    ) -> Iterator[memoryview]:
        """Fill ``place`` with the bytes from ``start`` on, in pieces, each yielded as it is there.

        It ends before ``place`` is full where the object does.
        """


class DelegatingStore:
    """The Store protocol around another one, to be changed in part; as safe from threads as that is.

    It has no ReadsInto, whatever the other has.
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
