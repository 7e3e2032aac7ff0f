"""Shards of a dataset in an object store as files on this node, which its processes share.

A file under its final name is whole and its checksum was right. A process holds a shared lock on each shard
that it has mapped; only unlocked files are evicted. Killed processes lose their locks, so nothing they
leave is in the way. `raymega.data.streaming.fetcher` brings the files.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymega.data.arrow import file_crc32, map_shard, open_shard
from raymega.data.format import NO_CRC32, ShardMeta
from raymega.data.streaming.fetcher import Fetcher, Wants
from raymega.data.streaming.node_cache import is_at, locked, share_lock
from raymega.errors import DataError, Fault, StorageError
from raymega.storage.store import Store

log = logging.getLogger(__name__)

MOST_HELD = 256
"""Most shards of a split that a process has mapped; each takes a file descriptor for its lock."""
TOLD_AFTER_S = 1.0
"""Waits for a shard from this long on are told in the log."""
FREE_S = 0
"""Time of change of a file that is needed no more; the files of earliest time are evicted first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Mapped shard, and the descriptor that holds its lock."""

    content: Any
    descriptor: int


class ShardCache:
    """Files of one split in an object store, see `raymega.data.arrow.Files`."""

    def __init__(self, store: Store, folder: Path, fetcher: Fetcher) -> None:
        """Take the store of the dataset, the folder of its files on this node, and what brings them."""
        self.uri, self._folder, self._fetcher = store.uri, folder, fetcher
        self._wants = Wants(store=store, folder=folder)
        self._held = OrderedDict[str, _Held]()

    def need(self, shards: Sequence[ShardMeta]) -> None:
        """Fetch the shards in this order, and let go of all others."""
        files = {shard.file for shard in shards}
        for file in self._wants.kept.keys() - files:
            self._let_go(file)
            with suppress(OSError):
                os.utime(self._folder / file, (FREE_S, FREE_S))
        for file in files - self._wants.kept.keys():
            with suppress(OSError):
                os.utime(self._folder / file)
        self._fetcher.want(self._wants, shards)

    def table(self, shard: ShardMeta) -> pa.Table:
        """Return the columns of a shard; waits until it is here.

        Raises:
            DataError: The store lacks the shard, or its content is not what dataset.json says.
            StorageError: The shard did not come within the fetcher's timeout, or cannot be written.
        """
        found: pa.Table = self.mapped(shard, map_shard)
        return found

    def mapped(self, shard: ShardMeta, map_file: Callable[[Path, ShardMeta], Any]) -> Any:
        """Return what ``map_file`` makes of a shard's file, which stays mapped while it is read often.

        Raises:
            DataError: As :meth:`table`.
            StorageError: As :meth:`table`.
        """
        if shard.file in self._held:
            self._held.move_to_end(shard.file)
            return self._held[shard.file].content
        held = self._here(shard, lambda path: map_file(path, shard))
        if len(self._held) >= MOST_HELD:
            self._let_go(next(iter(self._held)))
        self._held[shard.file] = held
        return held.content

    @contextmanager
    def reader(self, shard: ShardMeta) -> Iterator[pa.RecordBatchFileReader]:
        """Return a reader of the shard's record batches; waits until it is here."""
        held = self._here(shard, lambda path: map_shard(path, shard))
        try:
            with open_shard(self._folder / shard.file) as reader:
                yield reader
        finally:
            os.close(held.descriptor)

    def whole(self, file: ShardMeta) -> bytearray:
        """Return the bytes of a file of the split, from the store.

        Raises:
            DataError: As :meth:`table`.
            StorageError: The store cannot be reached.
        """
        return self._fetcher.whole(self._wants, file)

    def drop_damaged(self, shard: ShardMeta) -> bool:
        """Let go of a shard; return whether its file was not what had been fetched, so that it comes again."""
        held = self._held.pop(shard.file, None)
        descriptor = held.descriptor if held else _lock(self._folder / shard.file)
        if descriptor is None:
            return False
        try:
            return self._removes(shard, descriptor)
        finally:
            os.close(descriptor)

    def _here(
        self, shard: ShardMeta, map_file: Callable[[Path], Any], *, is_last: bool = False
    ) -> _Held:
        """Lock and map a shard, after waiting for it if it is not here; a damaged file is fetched again, once."""
        path, descriptor = self._folder / shard.file, self._locked(shard)
        try:
            return _Held(content=map_file(path), descriptor=descriptor)
        except BaseException as error:
            is_gone = (
                isinstance(error, DataError) and not is_last and self._removes(shard, descriptor)
            )
            os.close(descriptor)
            if not is_gone:
                raise
        return self._here(shard, map_file, is_last=True)

    def _locked(self, shard: ShardMeta) -> int:
        """Return a descriptor with a lock on a shard's file, after waiting for it if it is not here."""
        path, began, waited_s = self._folder / shard.file, time.monotonic(), 0.0
        while (descriptor := _lock(path)) is None:
            self._wait(shard, began)
            waited_s = time.monotonic() - began
        self._fetcher.note_read(waited_s=waited_s)
        if waited_s > TOLD_AFTER_S:
            log.warning("waited %.1f s for %s/%s", waited_s, self.uri, shard.file)
        return descriptor

    def _removes(self, shard: ShardMeta, descriptor: int) -> bool:
        """Remove the file of a descriptor if its checksum is wrong; return whether it is gone."""
        path = self._folder / shard.file
        with locked(self._fetcher.root):
            if not is_at(path, descriptor):  # another process has removed it
                return True
            if shard.crc32 in (NO_CRC32, crc32 := file_crc32(path)):
                return False
            path.unlink()
        log.warning("%s has crc32 %08x: its disk damaged it, it is fetched again", path, crc32)
        return True

    def _wait(self, shard: ShardMeta, began: float) -> None:
        self._fetcher.hasten(self._wants, shard)
        if time.monotonic() - began > self._fetcher.timeout_s:
            raise StorageError(_late(self.uri, shard, self._fetcher.timeout_s, self._wants.trouble))

    def _let_go(self, file: str) -> None:
        if held := self._held.pop(file, None):
            os.close(held.descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor of the file with a shared lock on it, or None if there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    share_lock(descriptor)
    # it may have been evicted between the two calls
    if is_at(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _late(uri: str, shard: ShardMeta, timeout_s: float, trouble: str) -> Fault:
    return Fault(
        fact=f"{uri}/{shard.file} is not here after {timeout_s:g} s ({trouble or 'it is being read'})",
        rule="a shard comes within elastic.collective_timeout_s",
        remedy="see that the store answers; `raymega doctor` measures it; or raise elastic.collective_timeout_s",
    )
