"""Retries requests to a store: the policy, and a store that applies it.

RetryingStore is for the driver's own objects, which are few, small and indispensable: lease, manifest, record.
One request that fails in passing must not end a run, whether it writes, reads, lists or deletes.
CheckpointWriter retries the workers' large files: briefly during a run, patiently at its last save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TypeVar

from raymega.errors import StorageError
from raymega.storage.store import DelegatingStore, RefusedError, Store

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Pauses between the tries of one request.

    Attributes:
        pauses_s: Seconds before the second try, the third, and so on; the last try's error is raised.
        sleep: Function that waits for a number of seconds.
    """

    pauses_s: tuple[float, ...]
    sleep: Callable[[float], None] = time.sleep

    def lasting(self, seconds: float) -> RetryPolicy:
        """Return this policy with as many pauses, the last one repeated, as last ``seconds`` together."""
        pauses_s, left_s = list[float](), seconds
        for pause_s in chain(self.pauses_s, repeat(self.pauses_s[-1])):
            if left_s <= 0:
                break
            pauses_s.append(pause_s)
            left_s -= pause_s
        return replace(self, pauses_s=tuple(pauses_s))

    def read(self, ask: Callable[[], Result]) -> Result:
        """Call ``ask`` until it returns; a refusal is an answer, raised at once.

        Of a write it is none: what was trained waits for whoever corrects the rights.

        Raises:
            StorageError, OSError: The store refuses, or the last try failed.
        """
        return self.run(lambda _: ask(), answers=(RefusedError,))

    def run(
        self,
        ask: Callable[[int], Result],
        *,
        answers: tuple[type[Exception], ...] = (FileExistsError,),
    ) -> Result:
        """Call ``ask`` with the number of the try, from 0, until it returns.

        Args:
            ask: Function that makes the request.
            answers: Errors that another try would not change, such as that of a key that exists.

        Raises:
            FileExistsError: The key exists.
            StorageError, OSError: The last try failed.
        """
        # every try but the last
        for number, pause_s in enumerate(self.pauses_s):
            try:
                return ask(number)
            except answers:
                raise
            except (StorageError, OSError) as error:
                log.warning("request failed, next try in %g s: %s", pause_s, error)
                self.sleep(pause_s)
        return ask(len(self.pauses_s))


RETRY = RetryPolicy(pauses_s=(1.0, 2.0, 4.0, 8.0, 15.0))


class RetryingStore(DelegatingStore):
    """A store whose requests are retried for half a minute before they count as failed.

    That a key is missing is an answer, KeyError, which is given at once; so is a refusal to read or to delete.
    """

    def __init__(self, store: Store, *, retry: RetryPolicy = RETRY) -> None:
        """Retry the requests to ``store`` by the policy ``retry``."""
        super().__init__(store)
        self._retry = retry

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object with retries, as Store's ``put``; the whole object is held in memory.

        A try that reported a failure may still have written the object. If a later try finds the key taken
        and the content equal, the write counts as done.
        """
        whole = [bytes(chunk) for chunk in chunks]  # an iterator could be written once only

        def write(number: int) -> None:
            try:
                self._store.put(key, whole, overwrite=overwrite)
            except FileExistsError:
                if not number or not self._is_mine(key, b"".join(whole)):
                    raise

        self._retry.run(write)

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """See Store."""
        return self._retry.read(lambda: self._store.get(key, start=start, num_bytes=num_bytes))

    def size(self, key: str) -> int:
        """See Store."""
        return self._retry.read(lambda: self._store.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        """See Store; a listing is made whole first, as one that fails midway begins again."""
        yield from self._retry.read(lambda: [*self._store.list(prefix)])

    def delete(self, key: str) -> None:
        """See Store."""
        self._retry.read(lambda: self._store.delete(key))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See ListsSizes."""
        yield from self._retry.read(lambda: [*super(RetryingStore, self).sizes(prefix)])

    def folders(self, prefix: str) -> Iterator[str]:
        """See ListsFolders."""
        yield from self._retry.read(lambda: [*super(RetryingStore, self).folders(prefix)])

    def delete_many(self, keys: Sequence[str]) -> None:
        """See DeletesMany."""
        self._retry.read(lambda: super(RetryingStore, self).delete_many(keys))

    @property
    def itself(self) -> Store:
        """The store itself, each of whose requests is made once."""
        return self._store

    def _is_mine(self, key: str, whole: bytes) -> bool:
        with suppress(KeyError, StorageError):
            return self._store.get(key) == whole
        return False


def at_once(store: Store) -> Store:
    """Return ``store`` without retries, for a question that is asked again anyway."""
    return store.itself if isinstance(store, RetryingStore) else store
