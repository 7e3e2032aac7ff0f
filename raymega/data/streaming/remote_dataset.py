"""Checks datasets in an object store, and opens them.

Shards are memory-mapped, so they are brought to this node's disk, to a folder named by a digest of
dataset.json, which has a copy there too. The driver of a run tells its ranks the digest: they read the node's
copy, and the store only where there is none. Local folders are read by `raymega.data.format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from isal import isal_zlib

from raymega.config.data import CACHE_BYTES, MEGATRON
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
from raymega.errors import ConfigError, DataError, Fault, StorageError
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from raymega.storage.retry import RETRY
from raymega.storage.store import Store

MOST_KEPT = 256
"""Most descriptions of datasets that a process keeps parsed; one of 60,000 shards takes 30 MB."""


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
    """Return a fault for each shard or file of lengths that the store lacks.

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
    fetcher = fetcher or Fetcher(limit_bytes=CACHE_BYTES, is_of_run=False)
    known = fetcher.known.get(uri)
    if known:
        with suppress(KeyError, StorageError):
            meta, store = _kept(uri, fetcher.root / known)
            return meta, ShardCache(store, fetcher.root / known, fetcher)
    store = open_store(uri)
    description = RETRY.read(lambda: _read_description(store))
    # named by content: another dataset under the same URI has other files
    folder = fetcher.root / _digest(description)
    if known and folder.name != known:
        raise DataError(_changed(uri, folder.name, known))
    if known:
        with suppress(StorageError):  # without a copy each process asks the store
            LocalStore(folder).put(META_FILE, [description], overwrite=True)
    return parse_meta(description, f"{uri}/{META_FILE}"), ShardCache(store, folder, fetcher)


def read_descriptions(known: Mapping[str, str], *, root: Path | None = None) -> None:
    """Read the descriptions of a run's datasets ahead, for this process and for its node.

    Args:
        known: Digests of the descriptions in object stores, by path of the dataset; Megatron's files have none.
        root: Folder of the node for the copies; None for that which all runs share.

    Raises:
        RaymegaError: One cannot be read, or is another one by now.
    """
    fetcher = Fetcher(limit_bytes=CACHE_BYTES, root=root, is_of_run=False, known=known)
    for path in known:
        if not path.startswith(MEGATRON):
            open_files(path, fetcher)


def description_digest(uri: str) -> str:
    """Return the digest of the dataset.json in an object store.

    Raises:
        ConfigError: There is no dataset at ``uri``.
        StorageError: The store cannot be reached.
    """
    store = open_store(uri)
    return _digest(RETRY.read(lambda: _read_description(store)))


def shard_crc32(store: Store, shard: ShardMeta) -> int:
    """Return the ``zlib.crc32`` of a shard in a store."""
    crc = 0
    for piece in _pieces(store, shard):
        crc = isal_zlib.crc32(piece, crc)
    return crc


@lru_cache(MOST_KEPT)
def _kept(uri: str, folder: Path) -> tuple[DatasetMeta, Store]:
    """Return the description of a dataset from this node's copy, and its store; a process keeps both for later attempts.

    Raises:
        KeyError: There is no copy, or the disk has damaged it.
        StorageError: It cannot be read.
    """
    description = LocalStore(folder).get(META_FILE)
    if _digest(description) != folder.name:
        raise KeyError(META_FILE)
    return parse_meta(description, f"{uri}/{META_FILE}"), open_store(uri)


def _digest(description: bytes) -> str:
    return sha256(description).hexdigest()[:16]


def _changed(uri: str, found: str, known: str) -> Fault:
    return Fault(
        fact=f"{uri}/{META_FILE} has digest {found}",
        rule=f"it had {known} when this driver of the run began, and all ranks read the same rows",
        remedy="put the dataset of before there again, or begin another run: set run.name",
    )


def _read_description(store: Store) -> bytes:
    try:
        return store.get(META_FILE)
    except KeyError:
        raise ConfigError(no_dataset(f"{store.uri}/{META_FILE} does not exist")) from None


def _shards(meta: DatasetMeta) -> list[ShardMeta]:
    return [shard for split in meta.splits.values() for shard in split.files]


def _pieces(store: Store, shard: ShardMeta) -> Iterator[bytes]:
    # ranged reads bound the memory of a copy
    for start in range(0, shard.num_bytes, PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, shard.num_bytes - start)
        try:
            yield store.get(shard.file, start=start, num_bytes=num_bytes)
        except KeyError:
            fact = f"{store.uri}/{shard.file} does not exist"
            raise DataError(shard_fault(fact, f"{META_FILE} names it")) from None
