"""RetryingStore: small writes are tried again for half a minute before they count as failed.

For a driver's own objects, which are few, small and needed: a claim, a manifest, a record. What is
large, the workers' files, CheckpointWriter tries again by a shorter policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from raymega.errors import StorageError
from raymega.storage.retry import RetryPolicy
from raymega.storage.store import DelegatingStore, Store

RETRY = RetryPolicy(pauses_s=(1.0, 2.0, 4.0, 8.0, 15.0))


class RetryingStore(DelegatingStore):
    """Another store, whose writes are tried again."""

    def __init__(self, store: Store, *, retry: RetryPolicy = RETRY) -> None:
        """Tries writes again by ``retry``."""
        super().__init__(store)
        self._retry = retry

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """See Store; holds the object in memory.

        A try that failed may have written it all the same: then it is there as it should be.
        """
        whole = [bytes(chunk) for chunk in chunks]

        def write(number: int) -> None:
            try:
                self._store.put(key, whole, overwrite=overwrite)
            except FileExistsError:
                if not number or not self._is_mine(key, b"".join(whole)):
                    raise

        self._retry.run(write)

    def _is_mine(self, key: str, whole: bytes) -> bool:
        with suppress(KeyError, StorageError):
            return self._store.get(key) == whole
        return False
