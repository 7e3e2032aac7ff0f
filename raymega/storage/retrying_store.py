"""RetryingStore: small writes are tried again for half a minute before they count as failed.

For a driver's own objects, which are few, small and needed: a claim, a manifest, a record. What is
large, the workers' files, has its own patience in checkpoint.writer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from raymega.errors import StorageError
from raymega.storage.store import Store

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)


class RetryingStore:
    """The Store protocol around another one; as safe from several threads as that is."""

    def __init__(
        self,
        store: Store,
        *,
        pauses_s: tuple[float, ...] = PAUSES_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Waits ``pauses_s`` between tries, and fails after the last."""
        self._store, self._pauses_s, self._sleep = store, pauses_s, sleep

    @property
    def uri(self) -> str:
        """See Store."""
        return self._store.uri

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """See Store; holds the object in memory.

        A try that failed may have written it all the same: then it is there as it should be.
        """
        whole = [bytes(chunk) for chunk in chunks]
        for number, pause_s in enumerate((*self._pauses_s, None)):
            try:
                self._store.put(key, whole, overwrite=overwrite)
                return
            except FileExistsError:
                if number and self._is_mine(key, b"".join(whole)):
                    return
                raise
            except StorageError as error:
                if pause_s is None:
                    raise
                log.warning("writing again in %g s: %s", pause_s, error)
                self._sleep(pause_s)

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

    def _is_mine(self, key: str, whole: bytes) -> bool:
        with suppress(KeyError, StorageError):
            return self._store.get(key) == whole
        return False
