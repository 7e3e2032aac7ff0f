"""Checks datasets in an object store, and copies them to a node.

Shards are memory-mapped, so a node downloads a dataset once, to a folder named by a hash of its
dataset.json; all workers of the node share it. Local folders are read by `raymega.data.format`.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from isal import isal_zlib

from raymega.data.format import (
    META_FILE,
    DatasetMeta,
    ShardMeta,
    local_folder,
    no_dataset,
    parse_meta,
    read_meta,
    shard_fault,
    size_faults,
)
from raymega.errors import ConfigError, DataError, Fault, StorageError, raise_faults
from raymega.storage.registry import open_store
from raymega.storage.store import Store

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
SHARDS_IN_FLIGHT = 4
_LOCK_FILE = ".lock"


def is_remote(uri: str) -> bool:
    """Return True if ``uri`` names a dataset in an object store."""
    return "://" in uri and not uri.startswith("file://")


def meta_at(uri: str) -> DatasetMeta:
    """Return the description of the dataset at ``uri``, in a local folder or an object store.

    Raises:
        ConfigError: There is no dataset at ``uri``.
        DataError: The description is not a valid one of version 1 or 2.
        StorageError: The store cannot be reached.
    """
    if not is_remote(uri):
        return read_meta(local_folder(uri))
    return parse_meta(_read_description(open_store(uri)), f"{uri}/{META_FILE}")


def missing_shards(uri: str, meta: DatasetMeta) -> list[Fault]:
    """Return a fault for each shard that the store lacks.

    Sizes and content are checked when the shards are copied.
    """
    present = set(open_store(uri).list(""))
    return [
        shard_fault(f"{uri}/{shard.file} does not exist", f"{META_FILE} names it")
        for shard in _shards(meta)
        if shard.file not in present
    ]


def local_copy(uri: str, *, cache: Path | None = None) -> Path:
    """Return the dataset's folder on this node; copies what is missing from an object store.

    One process of a node copies while the others wait. The copy takes the dataset's size on disk,
    and 2 * SHARDS_IN_FLIGHT * PIECE_BYTES of memory.

    Args:
        uri: Folder of a dataset or its URI in an object store.
        cache: Parent folder of all copies; None for ``~/.raymega/cache``.

    Raises:
        ConfigError: There is no dataset at ``uri``.
        DataError: A shard is missing in the store or has a wrong checksum.
        StorageError: The store cannot be reached, or the copy cannot be written.
    """
    if not is_remote(uri):
        return local_folder(uri)
    # A finished copy is used as it is.
    store = open_store(uri)
    description = _read_description(store)
    meta = parse_meta(description, f"{uri}/{META_FILE}")
    folder = (cache or Path.home() / ".raymega" / "cache") / sha256(description).hexdigest()[:16]
    if (folder / META_FILE).is_file() and not size_faults(folder, meta):
        return folder
    # dataset.json is written last: a copy without it is unfinished.
    try:
        with _locked(folder):
            _bring_shards(store, meta, folder)
            _write_whole(folder / META_FILE, [description])
    except OSError as error:
        raise StorageError(_unwritable(folder, meta, error)) from error
    return folder


def shard_crc32(store: Store, shard: ShardMeta) -> int:
    """Return the ``zlib.crc32`` of a shard in a store."""
    crc = 0
    for piece in _pieces(store, shard):
        crc = isal_zlib.crc32(piece, crc)
    return crc


def _read_description(store: Store) -> bytes:
    try:
        return store.get(META_FILE)
    except KeyError:
        raise ConfigError(no_dataset(f"{store.uri}/{META_FILE} does not exist")) from None


def _shards(meta: DatasetMeta) -> list[ShardMeta]:
    return [shard for split in meta.splits.values() for shard in split.shards]


def _bring_shards(store: Store, meta: DatasetMeta, folder: Path) -> None:
    # Shards of an interrupted copy that have their full size are kept.
    lacking = [shard for shard in _shards(meta) if _size(folder / shard.file) != shard.num_bytes]
    num_bytes = sum(shard.num_bytes for shard in lacking)
    if lacking:
        log.info("bringing %d bytes of %s to %s", num_bytes, store.uri, folder)
    with ThreadPoolExecutor(SHARDS_IN_FLIGHT, thread_name_prefix="shard") as pool:
        # all shards are tried, so that the error names every damaged one
        found = list(pool.map(lambda shard: _bring(store, shard, folder), lacking))
    raise_faults(DataError, [fault for faults in found for fault in faults])


def _bring(store: Store, shard: ShardMeta, folder: Path) -> list[Fault]:
    """Copy one shard; it gets its final name only if its checksum is right."""
    crc = 0

    def checked() -> Iterator[bytes]:
        nonlocal crc
        for piece in _pieces(store, shard):
            crc = isal_zlib.crc32(piece, crc)
            yield piece
        if crc != shard.crc32:
            raise DataError(_torn(store, shard, crc))

    try:
        _write_whole(folder / shard.file, checked())
    except DataError as error:
        return [fault for fault in error.faults if isinstance(fault, Fault)]
    return []


def _pieces(store: Store, shard: ShardMeta) -> Iterator[bytes]:
    # ranged reads bound the memory of a copy
    for start in range(0, shard.num_bytes, PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, shard.num_bytes - start)
        try:
            yield store.get(shard.file, start=start, num_bytes=num_bytes)
        except KeyError:
            fact = f"{store.uri}/{shard.file} does not exist"
            raise DataError(shard_fault(fact, f"{META_FILE} names it")) from None


def _write_whole(path: Path, pieces: Iterator[bytes] | list[bytes]) -> None:
    """Write a file under its final name only when complete; the lock excludes other writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # rename last, so that a killed copy leaves no file under its final name
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for piece in pieces:
            file.write(piece)
    partial.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes; the lock of a killed process is released."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _torn(store: Store, shard: ShardMeta, crc: int) -> Fault:
    fact = f"{store.uri}/{shard.file} has crc32 {crc:08x}"
    return shard_fault(fact, f"{META_FILE} says {shard.crc32:08x}")


def _unwritable(folder: Path, meta: DatasetMeta, error: OSError) -> Fault:
    num_bytes = sum(shard.num_bytes for shard in _shards(meta))
    return Fault(
        fact=f"the dataset cannot be copied to {folder}: {error.strerror or error}",
        rule=f"each node keeps a copy of a dataset in an object store: {num_bytes} bytes",
        remedy="free space there, or make ~/.raymega/cache a link to a larger disk",
    )
