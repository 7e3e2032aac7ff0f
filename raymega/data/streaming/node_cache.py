"""Folder of a node in which its processes share what they read of datasets.

It owns the folder's locks, and tables that one process computes for all, of a node or of a run. Shards of datasets in object stores
are kept there by `raymega.data.streaming.shard_cache`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from raymega.errors import StorageError
from raymega.storage.store import Store

log = logging.getLogger(__name__)

TABLES = "tables"
LOCK_FILE = ".lock"
SHARED_DOCUMENTS = 1 << 16
"""Documents of a split from which a node's processes share what they know of them."""
Tables = Mapping[str, npt.NDArray[Any]]


def cache_root() -> Path:
    """Return the folder that all runs on a node share."""
    return Path.home() / ".raymega" / "cache"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes; the lock of a killed process is released."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(descriptor: int) -> bool:
    """Lock a file against other processes; return False if one has a lock on it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_lock(descriptor: int) -> None:
    """Lock a file beside others that share it; waits for one that does not."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether the descriptor's file still has the name; it may have been renamed or removed meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def shared_tables(
    key: str, name: str, make: Callable[[], Tables], *, root: Path | None = None
) -> Tables:
    """Return arrays that one process of a node computes; all processes map the same files.

    Where the folder cannot be written they are computed for this process alone.

    Args:
        key: Digest of what the arrays are computed from.
        name: Name of the arrays below the key.
        make: Function that computes them by name.
        root: Folder of the node; None for :func:`cache_root`.
    """
    folder = (root or cache_root()) / TABLES / key
    try:
        with locked(folder):
            if not (folder / name).is_dir():
                _write(folder / name, make())
            # mapped: processes share the pages that they read
            return {
                path.stem: np.load(path, mmap_mode="r") for path in (folder / name).glob("*.npy")
            }
    except OSError as error:
        log.warning("each process computes its own tables, as %s cannot be used: %s", folder, error)
        return make()


def run_tables(run: Store, key: str, make: Callable[[], Tables]) -> Tables:
    """Return arrays that one node of a run computes; the other nodes read them from the run's store.

    Where the store is away, or its copy is damaged, they are computed here.

    Args:
        run: Store of the run.
        key: Key of the copy, with all that the arrays are computed from.
        make: Function that computes them by name.
    """
    try:
        with np.load(BytesIO(run.get(key))) as found:
            return dict(found)
    except KeyError:
        pass
    except (StorageError, OSError, EOFError, ValueError, BadZipFile) as error:
        log.warning("%s/%s is computed, as it cannot be read: %s", run.uri, key, error)
    tables, copy = make(), BytesIO()
    np.savez(copy, **dict[str, Any](tables))
    with suppress(StorageError):
        run.put(key, [copy.getvalue()], overwrite=True)
    return tables


def _write(folder: Path, tables: Tables) -> None:
    # rename last, so that a killed process leaves no folder under its final name
    partial = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        for name, array in tables.items():
            np.save(partial / f"{name}.npy", array)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
