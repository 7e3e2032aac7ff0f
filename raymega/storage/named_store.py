"""NamedStore calls the store of a plug-in, and names plug-in and line where its code fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from raymega.errors import RaymegaError
from raymega.plugins import Plugin, plugin_error
from raymega.storage.store import DelegatingStore, Store, delete_all, folders_below

T = TypeVar("T")
ANSWERS = (KeyError, FileExistsError, OSError, RaymegaError)
"""Errors that the protocol of a store has, or that are the world's."""


class NamedStore(DelegatingStore):
    """Store of a plug-in; errors that the protocol has pass as they are."""

    def __init__(self, store: Store, row: Plugin) -> None:
        """Delegate to ``store``, made by the code of ``row``."""
        super().__init__(store)
        self._row = row

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """See Store."""
        self._call(lambda: self._store.put(key, chunks, overwrite=overwrite))

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """See Store."""
        return self._call(lambda: self._store.get(key, start=start, num_bytes=num_bytes))

    def size(self, key: str) -> int:
        """See Store."""
        return self._call(lambda: self._store.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        """See Store."""
        keys = iter(self._call(lambda: self._store.list(prefix)))
        while (key := self._call(lambda: next(keys, None))) is not None:
            yield key

    def delete(self, key: str) -> None:
        """See Store."""
        self._call(lambda: self._store.delete(key))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See ListsSizes."""
        yield from self._call(lambda: list(super(NamedStore, self).sizes(prefix)))

    def folders(self, prefix: str) -> Iterator[str]:
        """See ListsFolders."""
        yield from self._call(lambda: list(folders_below(self._store, prefix)))

    def delete_many(self, keys: Sequence[str]) -> None:
        """See DeletesMany."""
        self._call(lambda: delete_all(self._store, keys))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except ANSWERS:
            raise
        except Exception as error:
            raise plugin_error(self._row, error) from error
