"""Checks datasets in an object store, and opens them.

Shards are memory-mapped, so they are brought to this node's disk, to a folder named by a hash of
dataset.json. Local folders are read by `raymega.data.format`.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from isal import isal_zlib

from raymega.config.data import CACHE_BYTES
from raymega.data.arrow import Files, FolderFiles
from raymega.data.format import (
    META_FILE,
    DatasetMeta,
    ShardMeta,
    local_folder,
    no_dataset,
    parse_meta,
    read_meta,
    shard_fault,
)
from raymega.data.streaming.fetcher import PIECE_BYTES, Fetcher
from raymega.data.streaming.shard_cache import ShardCache
from raymega.errors import ConfigError, DataError, Fault
from raymega.storage.registry import open_store
from raymega.storage.retry import RETRY
from raymega.storage.store import Store


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


def open_files(uri: str, fetcher: Fetcher | None = None) -> tuple[DatasetMeta, Files]:
    """Return the description of a dataset and its files; those of an object store come when they are read.

    Args:
        uri: Folder of a dataset or its URI in an object store.
        fetcher: Threads that bring the files to this node; None for threads of their own.

    Raises:
        ConfigError: There is no dataset at ``uri``.
        DataError: The description is not a valid one.
        StorageError: The store cannot be reached.
    """
    if not is_remote(uri):
        folder = local_folder(uri)
        return read_meta(folder), FolderFiles(folder)
    store, fetcher = open_store(uri), fetcher or Fetcher(limit_bytes=CACHE_BYTES, is_of_run=False)
    description = RETRY.read(lambda: _read_description(store))
    # named by content: another dataset under the same URI has other files
    folder = fetcher.root / sha256(description).hexdigest()[:16]
    return parse_meta(description, f"{uri}/{META_FILE}"), ShardCache(store, folder, fetcher)


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


def _pieces(store: Store, shard: ShardMeta) -> Iterator[bytes]:
    # ranged reads bound the memory of a copy
    for start in range(0, shard.num_bytes, PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, shard.num_bytes - start)
        try:
            yield store.get(shard.file, start=start, num_bytes=num_bytes)
        except KeyError:
            fact = f"{store.uri}/{shard.file} does not exist"
            raise DataError(shard_fault(fact, f"{META_FILE} names it")) from None
