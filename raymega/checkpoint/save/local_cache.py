"""A local tier: copies of the newest data files on the node's own disk, in front of the run's store.

Manifests exist only in the run's store, so it alone decides which checkpoints exist. A restore reads a
file from the local tier when every block matches the manifest, else from the run's store. The local
tier may be lost, full or corrupt at any time without loss of data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.keys import ROOT, checkpoint_of, is_manifest
from raymega.checkpoint.format.manifest import Manifest
from raymega.errors import CheckpointError, RaymegaError, StorageError
from raymega.storage.store import DelegatingStore, Store

log = logging.getLogger(__name__)

KEPT_NEAR = 2
"""Number of checkpoints in the local tier: the one being written, and the one before it."""


class LocalCache:
    """Writer of the local tier; a failure of its store is logged, never raised."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_sound = True
        self._newest = ""
        self._lock = Lock()

    def put(self, key: str, chunks: Iterable[memoryview]) -> None:
        """Write a copy of a data file; after the first failure this process no longer writes any."""
        if not self._is_sound:
            return
        try:
            with self._lock:
                self._make_room(key)
            self._store.put(key, chunks, overwrite=True)
        except RaymegaError as error:
            self._is_sound = False
            log.warning("from now on nothing is kept in checkpoint.local_uri: %s", error)

    def _make_room(self, key: str) -> None:
        """Delete old checkpoints before the first file of a new one is written."""
        folder, mine = key.rpartition("/")[0], checkpoint_of(key)
        if folder == self._newest:
            return
        self._newest = folder
        owners = {each: at for each in self._store.list(ROOT) if (at := checkpoint_of(each))}
        # A manifest means that this is a run's own store: delete nothing there.
        if any(map(is_manifest, owners)):
            raise StorageError(
                fact=f"{self._store.uri!r} holds checkpoints of its own",
                rule="a local tier holds data files only, and removes old ones",
                remedy="give checkpoint.local_uri a folder of its own",
            )
        stay = sorted(set(owners.values()) - {mine}, reverse=True)[: KEPT_NEAR - 1]
        for each, at in owners.items():
            if at != mine and at not in stay:
                self._store.delete(each)


class CachedReader(DelegatingStore):
    """Store of one restore: reads a file from the local tier if it is intact there, else from afar."""

    def __init__(self, local_cache: Store, far: Store, manifest: Manifest) -> None:
        super().__init__(far)
        self._local_cache, self._manifest = local_cache, manifest
        self._is_whole: dict[str, bool] = {}
        self._locks = {key: Lock() for key in manifest.file_sizes()}

    @property
    def num_near(self) -> int:
        """Number of files that were read from the local tier."""
        return sum(self._is_whole.values())

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read an object or a range of it, as ``Store.get``, from whichever tier has it intact."""
        if self._has_near(key):
            try:
                return self._local_cache.get(key, start=start, num_bytes=num_bytes)
            except (KeyError, StorageError) as error:  # lost since it was verified
                log.warning("the local copy of %s is not used: %r", key, error)
                self._is_whole[key] = False
        return super().get(key, start=start, num_bytes=num_bytes)

    def _has_near(self, key: str) -> bool:
        if key not in self._locks:
            return False
        # A lock a file: threads that want one file verify it once, others go ahead.
        with self._locks[key]:
            if key not in self._is_whole:
                self._is_whole[key] = self._is_right(key)
            return self._is_whole[key]

    def _is_right(self, key: str) -> bool:
        """Return whether every block of the local file has the manifest's checksum.

        A file of that name from another run does not.
        """
        try:
            self._local_cache.size(key)
            for box in self._manifest.boxes:
                if self._manifest.file_key(box) == key:
                    read_block(self._local_cache, self._manifest, box)
        except KeyError:
            return False
        except CheckpointError as error:
            log.warning("the local copy is not used: %s", error)
            return False
        except RaymegaError as error:
            log.warning("the local tier cannot be read: %s", error)
            return False
        return True
