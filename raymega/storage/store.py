"""The protocols that object stores implement, and a store that delegates to another.

Objects are immutable bytes under '/'-separated keys relative to the store's root. Which store a URI
selects is decided in ``storage/registry.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from raymega.errors import StorageError


class RefusedError(StorageError):
    """A store refused a request for want of a right or a bucket, and so would the next one."""


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


@runtime_checkable
class ListsSizes(Protocol):
    """Optional method of a store: the sizes of many objects by one listing."""

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the keys that begin with ``prefix``, each with its object's length in bytes."""


def sizes_below(store: Store, prefix: str, keys: Iterable[str]) -> Mapping[str, int]:
    """Return the sizes in bytes of those of ``keys`` that exist; all begin with ``prefix``."""
    if isinstance(store, ListsSizes):
        return dict(store.sizes(prefix))
    found = {}
    for key in keys:
        with suppress(KeyError):
            found[key] = store.size(key)
    return found


@runtime_checkable
class ListsFolders(Protocol):
    """Optional method of a store: the names below a prefix, without the objects below those."""

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield in order each name below ``prefix`` that has keys below it; ``prefix`` is "" or ends with a slash."""


def folders_below(store: Store, prefix: str) -> Iterator[str]:
    """Yield what ``ListsFolders.folders`` yields, of any store."""
    if isinstance(store, ListsFolders):
        yield from store.folders(prefix)
        return
    segments = (key.removeprefix(prefix).partition("/") for key in store.list(prefix))
    yield from sorted({name for name, slash, _ in segments if slash})


@runtime_checkable
class DeletesMany(Protocol):
    """Optional method of a store: many objects are removed by one request."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are no error."""


def is_there(store: Store, key: str) -> bool:
    """Return whether ``store`` has an object ``key``."""
    try:
        store.size(key)
    except KeyError:
        return False
    return True


def delete_all(store: Store, keys: Sequence[str]) -> None:
    """Remove the objects in order, many at a time where the store can."""
    if isinstance(store, DeletesMany):
        store.delete_many(keys)
        return
    for key in keys:
        store.delete(key)


class DelegatingStore:
    """A store that delegates every method to another; subclasses override some of them.

    It is as thread-safe as the other store. It lists and deletes many objects in as few requests as the
    other does. It does not offer ReadsInto, even if the other does.
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

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See ListsSizes."""
        if isinstance(self._store, ListsSizes):
            yield from self._store.sizes(prefix)
            return
        for key in self._store.list(prefix):
            with suppress(KeyError):  # deleted meanwhile
                yield key, self._store.size(key)

    def folders(self, prefix: str) -> Iterator[str]:
        """See ListsFolders."""
        return folders_below(self._store, prefix)

    def delete_many(self, keys: Sequence[str]) -> None:
        """See DeletesMany."""
        delete_all(self._store, keys)
