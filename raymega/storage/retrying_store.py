"""RetryingStore: small writes are tried again for half a minute before they count as failed.

For a driver's own objects, which are few, small and needed: a claim, a manifest, a record. What is
large, the workers' files, CheckpointWriter tries again by a shorter policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from raymega.errors import StorageError
from raymega.storage.retry import RetryPolicy
from raymega.storage.store import Store

RETRY = RetryPolicy(pauses_s=(1.0, 2.0, 4.0, 8.0, 15.0))


class RetryingStore:
    """The Store protocol around another one; as safe from several threads as that is."""

    def __init__(self, store: Store, *, retry: RetryPolicy = RETRY) -> None:
        """Tries writes again by ``retry``."""
        self._store, self._retry = store, retry

    @property
    def uri(self) -> str:
        """See Store."""
        return self._store.uri

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
