"""One store over several that hold copies of the same objects, any of which may be lost.

Which copies there are is told; nothing is moved from one to the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from raymega.errors import Fault, StorageError
from raymega.storage.keys import check_key
from raymega.storage.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicatedStore:
    """The Store protocol over copies: a write goes to all of them, a read to one that has it.

    A store that fails a write is lost: it is not asked again, so that one that hangs costs one
    timeout. The others go on without it.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        holders: Mapping[str, Sequence[str]] | None = None,
        first: int = 0,
    ) -> None:
        """Serve from ``stores``, by name.

        Args:
            stores: Where copies are.
            holders: By key the names of those that hold it, where not all do.
            first: Which of a key's copies is read first, counted round; another number is the way
                around a copy whose bytes turned out to be wrong.
        """
        self._stores, self._holders, self._first = dict(stores), holders, first

    @property
    def uri(self) -> str:
        """For messages."""
        return "memory of " + (", ".join(self._stores) or "nobody")

    @property
    def num_stores(self) -> int:
        """Stores that are not lost."""
        return len(self._stores)

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object to every store; with ``overwrite`` false an existing key raises
        FileExistsError."""
        check_key(key)
        pieces = list(chunks)
        for name, store in tuple(self._stores.items()):
            try:
                store.put(key, pieces, overwrite=overwrite)
            except StorageError as error:
                log.warning("goes on without copies in %s: %s", name, error)
                self._stores.pop(name, None)  # another file's thread may have been first
        if not self._stores:
            raise StorageError(_nobody(key))

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read bytes [start, start + num_bytes), fewer at the end; -1 is to the end."""
        return self._read(key, lambda store: store.get(key, start=start, num_bytes=num_bytes))

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        return self._read(key, lambda store: store.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix`` in any store, in order."""
        yield from sorted({key for store in self._stores.values() for key in store.list(prefix)})

    def delete(self, key: str) -> None:
        """Remove an object everywhere; a missing key is no error."""
        for store in self._stores.values():
            store.delete(key)

    def _read(self, key: str, read: Callable[[Store], T]) -> T:
        known = self._stores if self._holders is None else self._holders.get(key, ())
        names = [name for name in known if name in self._stores]
        turn = self._first % len(names) if names else 0
        failure: StorageError | None = None
        for name in (*names[turn:], *names[:turn]):
            try:
                return read(self._stores[name])
            except KeyError:
                continue
            except StorageError as error:
                log.warning("looks for another copy of %s: %s", key, error)
                failure = error
        raise failure or KeyError(key)


def _nobody(key: str) -> Fault:
    return Fault(
        fact=f"nobody is left who could keep {key}",
        rule="at least one copy must be written",
        remedy="the next attempt places its copies anew",
    )
