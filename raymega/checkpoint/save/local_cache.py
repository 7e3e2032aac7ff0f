"""A second tier: copies of the newest data files on the node's own disk, the run's store behind it.

The run's store alone decides what exists: manifests lie only there. A restore reads each file near when
every block of it is as the manifest says, and else from the run's store. The near tier may be lost, full
or wrong at any time, and nothing is lost with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.keys import ROOT, checkpoint_of, is_manifest
from raymega.checkpoint.format.manifest import Manifest
from raymega.errors import CheckpointError, Fault, RaymegaError, StorageError
from raymega.storage.store import DelegatingStore, Store

log = logging.getLogger(__name__)

KEPT_NEAR = 2
"""Checkpoints of the near tier: the one under way, and the one before it."""


class LocalCache:
    """Keeps copies of data files as long as its store takes them; it never raises."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_sound = True
        self._newest = ""
        self._lock = Lock()

    def put(self, key: str, chunks: Iterable[memoryview]) -> None:
        """Write a copy. A tier that has failed once is not used again by this process."""
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
        """Before the first file of a checkpoint, all but the newest other ones go."""
        folder, mine = key.rpartition("/")[0], checkpoint_of(key)
        if folder == self._newest:
            return
        self._newest = folder
        owners = {each: at for each in self._store.list(ROOT) if (at := checkpoint_of(each))}
        if any(map(is_manifest, owners)):
            raise StorageError(_holds_checkpoints(self._store.uri))
        stay = sorted(set(owners.values()) - {mine}, reverse=True)[: KEPT_NEAR - 1]
        for each, at in owners.items():
            if at != mine and at not in stay:
                self._store.delete(each)


class CachedReader(DelegatingStore):
    """The run's store, read from the near tier file by file where that is whole; for one restore."""

    def __init__(self, local_cache: Store, far: Store, manifest: Manifest) -> None:
        super().__init__(far)
        self._local_cache, self._manifest = local_cache, manifest
        self._is_whole: dict[str, bool] = {}
        self._locks = {key: Lock() for key in manifest.file_sizes()}

    @property
    def num_near(self) -> int:
        """Files that were read from the near tier."""
        return sum(self._is_whole.values())

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """See Store."""
        if self._has_near(key):
            try:
                return self._local_cache.get(key, start=start, num_bytes=num_bytes)
            except (KeyError, StorageError) as error:  # lost since it was found whole
                log.warning("the near copy of %s is not used: %r", key, error)
                self._is_whole[key] = False
        return super().get(key, start=start, num_bytes=num_bytes)

    def _has_near(self, key: str) -> bool:
        if key not in self._locks:
            return False
        with self._locks[key]:
            if key not in self._is_whole:
                self._is_whole[key] = self._is_right(key)
            return self._is_whole[key]

    def _is_right(self, key: str) -> bool:
        """Every block of the near file is the manifest's: another run's file of that name is not."""
        try:
            self._local_cache.size(key)
            for box in self._manifest.boxes:
                if self._manifest.file_key(box) == key:
                    read_block(self._local_cache, self._manifest, box)
        except KeyError:
            return False
        except CheckpointError as error:
            log.warning("the near copy is not used: %s", error)
            return False
        except RaymegaError as error:
            log.warning("the near tier cannot be read: %s", error)
            return False
        return True


def _holds_checkpoints(uri: str) -> Fault:
    return Fault(
        fact=f"{uri!r} holds checkpoints of its own",
        rule="a near tier holds data files only, and removes old ones",
        remedy="give checkpoint.local_uri a folder of its own",
    )
