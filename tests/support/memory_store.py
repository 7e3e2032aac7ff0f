"""Objects in this process's memory, by the Store protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock

from raymega.storage.keys import check_key


class MemoryStore:
    """The Store protocol over a dictionary."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = Lock()

    @property
    def uri(self) -> str:
        """A name for messages; nothing can be opened by it."""
        return "memory:"

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""
        data = b"".join(chunks)
        with self._lock:
            # check and write under one lock: of many writers one gets a key
            if not overwrite and check_key(key) in self._objects:
                raise FileExistsError(key)
            self._objects[check_key(key)] = data

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read bytes [start, start + num_bytes), fewer at the end; -1 is to the end."""
        data = self._objects[check_key(key)]
        return data[start:] if num_bytes < 0 else data[start : start + num_bytes]

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        return len(self._objects[check_key(key)])

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix``, in order."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        # without the lock, as the caller may delete while it iterates
        yield from keys

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        with self._lock:
            self._objects.pop(check_key(key), None)
