"""A store that fails while a file says so: no space, errors, a second more for each write.

The processes of a run under chaos put it around the stores that they open; what they write goes
through the real store, whose own handling of a failure is thus part of what is tried out.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from raymega.chaos.phase_barriers import FOLDER
from raymega.storage.registry import SCHEMES, Backend
from raymega.storage.store import DelegatingStore, Store

TROUBLE_FILE = "trouble"
SLOW_S = 1.0


class FaultyStore(DelegatingStore):
    """Another store, whose writes are in trouble while a file says so."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._trouble = Path(store.uri) / FOLDER / TROUBLE_FILE

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """See Store."""
        super().put(key, self._suffered(chunks), overwrite=overwrite)

    def _suffered(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The chunks, as far as the trouble of now lets them come."""
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
    """Stores of the run whose chaos folder this is are in trouble from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TROUBLE_FILE).write_text(kind)


def end_trouble(folder: Path) -> None:
    """They are well again."""
    (folder / TROUBLE_FILE).unlink(missing_ok=True)


def trouble_folders() -> None:
    """In this process, stores that are folders can be in trouble from now on. Twice is once."""
    make = SCHEMES["file"]
    if not isinstance(make, partial):
        SCHEMES["file"] = partial(_troubled, make)


def _troubled(make: Callable[[], Backend]) -> Backend:
    backend = make()
    return replace(backend, open=lambda uri: FaultyStore(backend.open(uri)))
