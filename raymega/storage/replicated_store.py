"""Combines several stores that hold copies of the same objects into one; any of them may be lost.

The caller says which store has which object; nothing is copied from one store to another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from raymega.errors import StorageError
from raymega.storage.keys import check_key
from raymega.storage.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_NAMED = 4
"""Most stores that a message names."""


class Holders(Protocol):
    """Map from keys to the names of the stores that hold them, such as a dict."""

    def get(self, key: str, default: Sequence[str], /) -> Sequence[str]:
        """Return the names of the stores that hold ``key``, or ``default``."""


class ReplicatedStore:
    """The Store protocol over copies: a write goes to all stores, a read to one that has the object.

    A store that fails a write is dropped and not asked again, so one that hangs costs a single timeout.
    The others stay in use.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        holders: Holders | None = None,
        first: int = 0,
    ) -> None:
        """Serve from ``stores``, by name.

        Args:
            stores: Stores of the copies, by name.
            holders: Names of the stores that hold each key; without it, every store may hold every key.
            first: Index of the copy to read first, modulo the number of copies; a caller that found
                wrong bytes takes another index to read another copy.
        """
        self._stores, self._holders, self._first = dict(stores), holders, first

    @property
    def uri(self) -> str:
        """Names of the stores, for messages."""
        names = list(self._stores)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return "memory of " + (", ".join(names[:MOST_NAMED]) + more or "no node")

    @property
    def num_stores(self) -> int:
        """Number of stores that have not been dropped."""
        return len(self._stores)

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object to every store; with ``overwrite`` false an existing key raises FileExistsError.

        Raises:
            StorageError: Every store failed.
        """
        check_key(key)
        pieces = list(chunks)  # an iterator could be written once only
        for name, store in tuple(self._stores.items()):
            try:
                store.put(key, pieces, overwrite=overwrite)
            except StorageError as error:
                log.warning("copies in %s are not used any more: %s", name, error)
                self._stores.pop(name, None)  # another thread may have dropped it already
        if not self._stores:
            raise StorageError(
                fact=f"no copy is left that could hold {key}",
                rule="at least one copy must be written",
                remedy="the next attempt places its copies anew",
            )

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return bytes [start, start + num_bytes), fewer at the object's end; -1 reads to the end."""
        return self._read(key, lambda store: store.get(key, start=start, num_bytes=num_bytes))

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        return self._read(key, lambda store: store.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with ``prefix`` in any store, in sorted order."""
        yield from sorted({key for store in self._stores.values() for key in store.list(prefix)})

    def delete(self, key: str) -> None:
        """Remove an object everywhere; a missing key is no error."""
        for store in self._stores.values():
            store.delete(key)

    def _read(self, key: str, read: Callable[[Store], T]) -> T:
        # order of the copies: those in stores not dropped, rotated by ``first``
        known = self._stores if self._holders is None else self._holders.get(key, ())
        names = [name for name in known if name in self._stores]
        turn = self._first % len(names) if names else 0
        failure: StorageError | None = None
        # first copy that can be read; "absent" is the answer only if no store failed
        for name in (*names[turn:], *names[:turn]):
            try:
                return read(self._stores[name])
            except KeyError:
                continue
            except StorageError as error:
                log.warning("reading another copy of %s: %s", key, error)
                failure = error
        raise failure or KeyError(key)
