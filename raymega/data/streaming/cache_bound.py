"""Bound of a node's cache while runs with different ``data.cache_bytes`` use it: the largest of those that live.

A run with a smaller one would else evict what another run has fetched and not read yet, again and again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from raymega.data.streaming.node_cache import share_lock, try_lock

PREFIX = "limit-"


class CacheBound:
    """Bound of the cache, as one process of a run knows it; every call needs the lock of the folder."""

    def __init__(self, root: Path, limit_bytes: int, *, is_of_run: bool) -> None:
        """Prepare; nothing is accessed.

        Args:
            root: Folder of the node.
            limit_bytes: Most bytes of shards there that this process allows.
            is_of_run: Whether a job says so, and other processes are told; a default counts here alone.
        """
        self._path, self._limit_bytes = root / f"{PREFIX}{limit_bytes}", limit_bytes
        self._is_told = not is_of_run

    def num_bytes(self) -> int:
        """Return the largest bound of the processes that live, and tell them this one's."""
        if not self._is_told:
            # a shared lock that the system releases when the process ends
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            finalize(self, os.close, descriptor)
            share_lock(descriptor)
            self._is_told = True
        others = [path for path in self._path.parent.glob(f"{PREFIX}*") if path != self._path]
        return max([self._limit_bytes, *filter(None, map(_living, others))])


def _living(path: Path) -> int:
    """Return the bound that a file tells; 0, without the file, if no process has it any more."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        if try_lock(descriptor):
            path.unlink()
            return 0
    finally:
        os.close(descriptor)
    with suppress(ValueError):
        return int(path.name.removeprefix(PREFIX))
    return 0
