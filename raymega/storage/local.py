"""Stores objects as files under a root folder: whole or absent, and on the disk when put returns.

An object is written to a temporary file, synced with fsync, and given its name in one atomic file-system
operation. The file system needs atomic rename and hard links; ext4, xfs, NFS and Lustre have both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote
from uuid import uuid4

from raymega.errors import StorageError
from raymega.storage.keys import check_key, is_key
from raymega.storage.store import RefusedError

PARTIAL_FOLDER = ".partial"
STALE_PARTIAL_S = 24 * 3600
LOOK_EVERY_S = 3600.0
"""Seconds between two looks for what killed writers left: a look at each put of N ranks would be N squared looks."""
MOST_REMOVALS = 16
"""Times that other processes may remove a folder, which they left empty, before an object is in it."""
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def split_file_uri(uri: str) -> tuple[str, Path]:
    """Return host and path of a ``file://`` URI; '#' and '?' are characters of a name, as in a plain path."""
    host, _, path = uri.partition("://")[2].partition("/")
    return host, Path(unquote(f"/{path}"))


class LocalStore:
    """The Store protocol over files, safe from any thread."""

    def __init__(self, root: Path) -> None:
        self._root, self._next_look_s = root, 0.0

    @property
    def uri(self) -> str:
        """The root folder."""
        return str(self._root)

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""
        path = self._path(key)
        partial = self._root / PARTIAL_FOLDER / uuid4().hex
        with _failures("write", path):
            # temporary file first: readers see the object only under its final name
            try:
                _write_synced(partial, chunks)
                self._remove_stale(partial)
                is_published = _publish_below(partial, path, overwrite=overwrite)
            finally:
                partial.unlink(missing_ok=True)
            # the new directory entry must survive a power cut too
            _sync_folder(path.parent)
        if not is_published:
            raise FileExistsError(key)

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return bytes [start, start + num_bytes), fewer at the object's end; -1 reads to the end."""
        path = self._path(key)
        with _failures("read", path), _absence(key), path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def read_into(
        self, key: str, place: memoryview, *, start: int, piece_bytes: int
    ) -> Iterator[memoryview]:
        """See ReadsInto."""
        path = self._path(key)
        with _failures("read", path), _absence(key), path.open("rb", buffering=0) as file:
            while place:
                count = os.preadv(file.fileno(), [place[:piece_bytes]], start)
                if not count:
                    return
                yield place[:count]
                place, start = place[count:], start + count

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        path = self._path(key)
        with _failures("read", path), _absence(key):
            if path.is_dir():
                raise IsADirectoryError(key)
            return path.stat().st_size

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with ``prefix``, in sorted order."""
        above, _, begin = prefix.rpartition("/")
        folder = self._root / above
        with _failures("list", folder):
            keys = sorted(path.relative_to(self._root).as_posix() for path in _files(folder, begin))
        yield from (key for key in keys if key.startswith(prefix) and is_key(key))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the keys that begin with ``prefix``, each with its file's length in bytes."""
        for key in self.list(prefix):
            with suppress(KeyError):  # deleted meanwhile
                yield key, self.size(key)

    def folders(self, prefix: str) -> Iterator[str]:
        """See ListsFolders; a folder may be empty."""
        folder = self._root / prefix
        with _failures("list", folder), suppress(*_ABSENT), os.scandir(folder) as entries:
            names = sorted(each.name for each in entries if each.is_dir())
            yield from (name for name in names if is_key(prefix + name))

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that it leaves empty; a missing key is no error."""
        path = self._path(key)
        with _failures("delete", path), suppress(*_ABSENT):
            path.unlink()
            # innermost folder first; stop at the first one that still holds something
            for folder in path.relative_to(self._root).parents[:-1]:
                if not _remove_if_empty(self._root / folder):
                    break

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _remove_stale(self, partial: Path) -> None:
        """Remove temporary files of killed writers that are STALE_PARTIAL_S older than ``partial``, now and then."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_EVERY_S
        # modification times of one file system: this machine's clock may differ from a file server's
        newest_s = partial.stat().st_mtime
        for other in partial.parent.iterdir():
            with suppress(FileNotFoundError):
                if newest_s - other.stat().st_mtime > STALE_PARTIAL_S:
                    other.unlink()


def _write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    _make_folder(path.parent)
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            _write_all(file.fileno(), memoryview(chunk))
        os.fsync(file.fileno())


def _write_all(handle: int, rest: memoryview) -> None:
    """Write every byte of ``rest``, in several calls: on Linux one write moves at most 2 GiB."""
    while rest:
        rest = rest[os.write(handle, rest) :]


def _publish_below(partial: Path, path: Path, *, overwrite: bool) -> bool:
    """Publish in a folder that is made, again where another process has just removed it as empty."""
    for _ in range(MOST_REMOVALS):
        with suppress(FileNotFoundError):
            _make_folder(path.parent)
            return _publish(partial, path, overwrite=overwrite)
    return _publish(partial, path, overwrite=overwrite)


def _publish(partial: Path, path: Path, *, overwrite: bool) -> bool:
    """Give ``partial`` its final name; return False when the name is taken and ``overwrite`` is false."""
    if overwrite:
        partial.replace(path)
        return True
    # unlike rename, a hard link fails when the name exists, also on NFS
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, and sync each so that it survives a power cut."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _files(folder: Path, begin: str) -> Iterator[Path]:
    """Yield all files below what ``folder`` has whose name begins with ``begin``; nothing else is looked at."""

    # a folder that is deleted during the walk is empty; any other error counts
    def refuse(error: OSError) -> None:
        if not isinstance(error, _ABSENT):
            raise error

    for at, folders, names in os.walk(folder, onerror=refuse):
        if Path(at) == folder:
            folders[:] = [name for name in folders if name.startswith(begin)]
        yield from (Path(at) / name for name in names)


@contextmanager
def _absence(key: str) -> Iterator[None]:
    try:
        yield
    except _ABSENT:
        raise KeyError(key) from None


@contextmanager
def _failures(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = RefusedError if isinstance(error, PermissionError) else StorageError
        raise kind(
            fact=f"could not {verb} {str(path)!r}: {error.strerror or error}",
            rule="a store needs a writable folder with free space, atomic rename and hard links",
            remedy="free space, correct the permissions, or choose another root",
        ) from error
