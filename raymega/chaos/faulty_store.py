"""FaultyStore simulates a store in trouble: no space, I/O errors or slow writes, while a file says so.

Processes of a run under chaos wrap the stores that they open. Writes go through the real store, so that its own
handling of failures is tested too.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from raymega.chaos.phase_barriers import FOLDER
from raymega.plugins import Plugin, register
from raymega.storage.registry import Folders
from raymega.storage.store import DelegatingStore, Store

TROUBLE_FILE = "trouble"
SLOW_S = 1.0


class FaultyStore(DelegatingStore):
    """Wrapper of a store, whose writes fail or are slow while the trouble file names a fault."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._trouble = Path(store.uri) / FOLDER / TROUBLE_FILE

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object, with the current fault; see `storage/store.py`."""
        super().put(key, self._suffered(chunks), overwrite=overwrite)

    def _suffered(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the chunks, or fail or wait as the current fault demands."""
        kind = self._trouble.read_text() if self._trouble.exists() else ""
        if kind == "store-slow":
            time.sleep(SLOW_S)
        if kind == "store-errors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for chunk in chunks:
            if kind == "disk-full":
                yield memoryview(chunk)[: len(chunk) // 2]
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield chunk


def begin_trouble(folder: Path, kind: str) -> None:
    """Start the fault ``kind`` for all stores of the run whose chaos folder is ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TROUBLE_FILE).write_text(kind)


def end_trouble(folder: Path) -> None:
    """End the fault of the run's stores."""
    (folder / TROUBLE_FILE).unlink(missing_ok=True)


def trouble_folders() -> None:
    """Wrap all stores of scheme ``file`` that this process opens from now on; idempotent."""
    target = f"{__name__}:{_TroubledFolders.__name__}"
    register([Plugin(kind="store", name="file", target=target)])


class _TroubledFolders(Folders):
    def open_store(self, uri: str) -> Store:
        return FaultyStore(super().open_store(uri))
