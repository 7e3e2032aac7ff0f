"""Brings shards from object stores to this node's disk, ahead of need, in threads.

It owns the threads, the check of what arrives, and the room on the disk: what is not needed soon and not
mapped by any process makes way. Which shards are needed is told by `raymega.data.streaming.shard_cache`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from types import MappingProxyType
from weakref import ref

from isal import isal_zlib

from raymega.data.format import META_FILE, NO_CRC32, ShardMeta, shard_fault, wrong_crc32
from raymega.data.streaming.cache_bound import CacheBound
from raymega.data.streaming.node_cache import TABLES, cache_root, is_at, locked, try_lock
from raymega.errors import DataError, Fault, InternalError, RaymegaError, StorageError
from raymega.storage.retry import RETRY, RetryPolicy
from raymega.storage.store import Store

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
NUM_THREADS = 2
"""Shards that a process fetches at the same time; the processes of a node take different ones."""
POLL_S, ROOM_S, AWAY_S = 0.02, 0.25, 2.0
"""Pauses before a shard is tried again: for a reader that waits, for none, and while the store is away."""
IDLE_S = 1.0
"""Pause after which an idle thread looks whether its fetcher is still in use."""
PARTIAL, THREAD_NAME = ".partial", "raymega-fetch"
COUNTER_FILE = "fetched"
NOTHING_KNOWN: Mapping[str, str] = MappingProxyType({})


@dataclass(kw_only=True, slots=True)
class Wants:
    """Shards of a split that this process wants.

    Attributes:
        store: Store of the dataset.
        folder: Folder of its files on this node.
        waiting: Shards that are not here yet, the most urgent first.
        kept: Files that are needed soon, each with its place in the order of need.
        hasty: Files that a reader waits for.
        failed: Errors of shards that will not come, by file.
        trouble: Newest failure of the store, in words.
    """

    store: Store
    folder: Path
    waiting: list[ShardMeta] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    hasty: set[str] = field(default_factory=set)
    failed: dict[str, RaymegaError] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Use of the cache since the fetcher was made.

    Attributes:
        fetched_bytes: Bytes that all processes of the node fetched.
        hits: Shards that this process opened without a wait.
        misses: Shards that it waited for.
        waited_s: Seconds of these waits.
    """

    fetched_bytes: int
    hits: int
    misses: int
    waited_s: float


class Fetcher:
    """Threads that fetch shards for a process, and the bound of the node's cache.

    Attributes:
        root: Folder of the node.
        limit_bytes: Most bytes of shards there, of all datasets; more where a run that lives allows more.
        timeout_s: Longest wait for one shard, in seconds.
        known: Digests of a run's datasets in object stores, by path; see `raymega.data.samples.known_datasets`.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        timeout_s: float = 600.0,
        root: Path | None = None,
        retry: RetryPolicy = RETRY,
        is_of_run: bool = True,
        known: Mapping[str, str] = NOTHING_KNOWN,
    ) -> None:
        """Make a fetcher, of a run or of a command; its threads start with the first shard that is wanted."""
        self.root, self.limit_bytes, self.timeout_s = root or cache_root(), limit_bytes, timeout_s
        self._retry, self._changed, self.known = retry, Condition(), known
        self._bound = CacheBound(self.root, limit_bytes, is_of_run=is_of_run)
        self._all: list[Wants] = []
        self._under_way: set[Path] = set()
        self._not_before: dict[Path, float] = {}
        self._threads: list[Thread] = []
        self._hits = self._misses = 0
        self._waited_s, self._fetched_before = 0.0, self._node_bytes()

    def want(self, wants: Wants, shards: Sequence[ShardMeta]) -> None:
        """Replace what is wanted of a split; ``shards`` are those that are needed next, in order."""
        with self._changed:
            self._register(wants)
            wants.kept = {shard.file: place for place, shard in enumerate(shards)}
            wants.waiting = list(shards)
            self._changed.notify_all()

    def hasten(self, wants: Wants, shard: ShardMeta) -> None:
        """Fetch a shard before all others, and wait a moment for it.

        Raises:
            RaymegaError: It will not come.
        """
        with self._changed:
            self._register(wants)
            wants.kept.setdefault(shard.file, -1)
            if shard not in wants.waiting:
                wants.waiting.insert(0, shard)
            if shard.file not in wants.hasty:
                # what failed before anybody waited is tried again, and at once: a disk may have been full for a while
                wants.failed.pop(shard.file, None)
                self._not_before.pop(wants.folder / shard.file, None)
                wants.hasty.add(shard.file)
                self._changed.notify_all()
            self._changed.wait(POLL_S)
            if error := wants.failed.get(shard.file):
                raise error

    def note_read(self, *, waited_s: float) -> None:
        """Count a shard that was opened, and the wait for it."""
        with self._changed:
            self._hits += waited_s == 0
            self._misses += waited_s > 0
            self._waited_s += waited_s

    def use(self) -> CacheUse:
        """Return the use of the cache so far."""
        with self._changed:
            return CacheUse(
                fetched_bytes=self._node_bytes() - self._fetched_before,
                hits=self._hits,
                misses=self._misses,
                waited_s=self._waited_s,
            )

    def _register(self, wants: Wants) -> None:
        if not any(wants is each for each in self._all):
            self._all.append(wants)
        # daemons: a process that ends does not wait for a store
        while len(self._threads) < NUM_THREADS:
            self._threads.append(
                Thread(target=_work, args=(ref(self), self._changed), name=THREAD_NAME, daemon=True)
            )
            self._threads[-1].start()

    def _try(self, wants: Wants, shard: ShardMeta) -> None:
        """Bring a shard that was taken, and note what became of it."""
        path, again_s = wants.folder / shard.file, 0.0
        try:
            again_s = self._bring(wants, shard)
        except StorageError as error:
            # the store may come back: tried again while the shard is wanted
            wants.trouble, again_s = str(error), AWAY_S
            log.warning("fetching %s again in %g s: %s", path.name, AWAY_S, error)
        except RaymegaError as error:
            wants.failed[shard.file] = error
        except OSError as error:
            wants.failed[shard.file] = StorageError(self._unwritable(path, error))
        except Exception as error:
            # the thread's edge: readers of the shard would wait for their timeout
            log.exception("fetching %s", path.name)
            wants.failed[shard.file] = InternalError(_unexpected(path, error))
        with self._changed:
            self._under_way.discard(path)
            self._not_before[path] = time.monotonic() + again_s
            self._changed.notify_all()

    def _take(self) -> tuple[Wants, ShardMeta] | None:
        """Take the most urgent shard that no other thread fetches, if there is one."""
        if found := self._next():
            self._under_way.add(found[0].folder / found[1].file)
        return found

    def _pause_s(self) -> float:
        return POLL_S if any(each.waiting for each in self._all) else IDLE_S

    def _next(self) -> tuple[Wants, ShardMeta] | None:
        now, best = time.monotonic(), list[tuple[bool, int, int]]()
        for number, wants in enumerate(self._all):
            # drop what has come, then look for the first that may be tried
            wants.waiting = [each for each in wants.waiting if not self._is_done(wants, each)]
            for place, shard in enumerate(wants.waiting):
                path = wants.folder / shard.file
                if path not in self._under_way and self._not_before.get(path, 0.0) <= now:
                    best.append((shard.file not in wants.hasty, place, number))
                    break
        if not best:
            return None
        _, place, number = min(best)
        return self._all[number], self._all[number].waiting[place]

    def _is_done(self, wants: Wants, shard: ShardMeta) -> bool:
        if not (wants.folder / shard.file).exists():
            return shard.file in wants.failed
        wants.hasty.discard(shard.file)
        return True

    def _bring(self, wants: Wants, shard: ShardMeta) -> float:
        """Bring a shard; return the pause before it is tried again, if it did not come.

        Raises:
            DataError: The store lacks it, or its content is not what dataset.json says.
            StorageError: The store cannot be reached.
            OSError: The file cannot be written.
        """
        path = wants.folder / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(PARTIAL)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # one process fetches it; the lock of a killed one is released
            if not try_lock(descriptor) or not is_at(part, descriptor) or path.exists():
                return POLL_S if shard.file in wants.hasty else ROOM_S
            if not self._make_room(wants, shard, descriptor):
                return ROOM_S
            self._fill(wants.store, shard, partial(os.pwrite, descriptor))
            os.fsync(descriptor)
            with locked(self.root):
                # rename last: a file with the final name is whole
                part.replace(path)
                self._count(shard.num_bytes)
        finally:
            os.close(descriptor)
        return 0.0

    def whole(self, wants: Wants, file: ShardMeta) -> bytearray:
        """Return the bytes of a file that no cache keeps, read in this thread.

        Raises:
            DataError: The store lacks it, or its content is not what dataset.json says.
            StorageError: The store cannot be reached.
        """
        found = bytearray(file.num_bytes)

        def write(piece: bytes, start: int) -> None:
            found[start : start + len(piece)] = piece

        self._fill(wants.store, file, write)
        with locked(self.root):
            self._count(file.num_bytes)
        return found

    def _fill(self, store: Store, shard: ShardMeta, write: Callable[[bytes, int], object]) -> None:
        """Write a shard's bytes, each piece to its place, and check them; a wrong checksum is read once more."""
        for is_last in (False, True):
            crc = 0
            for start in range(0, shard.num_bytes, PIECE_BYTES):
                num_bytes = min(PIECE_BYTES, shard.num_bytes - start)
                piece = self._read(store, shard, start, num_bytes)
                write(piece, start)
                crc = isal_zlib.crc32(piece, crc)
            if shard.crc32 in (crc, NO_CRC32):
                return
            log.warning("%s/%s has crc32 %08x", store.uri, shard.file, crc)
            if is_last:
                raise DataError(wrong_crc32(f"{store.uri}/{shard.file}", crc, shard))

    def _read(self, store: Store, shard: ShardMeta, start: int, num_bytes: int) -> bytes:
        read = partial(store.get, shard.file, start=start, num_bytes=num_bytes)
        try:
            return self._retry.read(read)
        except KeyError:
            fact = f"{store.uri}/{shard.file} does not exist"
            raise DataError(shard_fault(fact, f"{META_FILE} names it")) from None

    def _make_room(self, wants: Wants, shard: ShardMeta, descriptor: int) -> bool:
        """Reserve a shard's bytes in the cache; evict what must go, the files of earliest time first."""
        # what this split needs later than the shard may go, what any needs earlier may not
        with self._changed:
            own = wants.kept.get(shard.file, -1)
            needed = {
                each.folder / file
                for each in self._all
                for file, place in each.kept.items()
                if each is not wants or place <= own
            }
        with locked(self.root):
            # what an attempt that failed has reserved is this shard's room
            own_part = (wants.folder / shard.file).with_suffix(PARTIAL)
            found = sorted(each for each in _files(self.root) if each[2] != own_part)
            free = self._bound.num_bytes() - sum(size for _, size, _ in found)
            for _, size, path in found:
                if free >= shard.num_bytes:
                    break
                if path not in needed and _evict(path):
                    free += size
            # a reader that waits is served all the same, so that two runs on a node do not stop
            if free < shard.num_bytes and shard.file not in wants.hasty:
                return False
            os.ftruncate(descriptor, shard.num_bytes)
        return True

    def _count(self, num_bytes: int) -> None:
        """Add to the bytes that the node has fetched; one write, so that a kill leaves a number."""
        counter = os.open(self.root / COUNTER_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        os.pwrite(counter, b"%020d" % (self._node_bytes() + num_bytes), 0)
        os.close(counter)

    def _node_bytes(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.root / COUNTER_FILE).read_text())
        return 0

    def _unwritable(self, path: Path, error: OSError) -> Fault:
        return Fault(
            fact=f"{path} cannot be written: {error.strerror or error}",
            rule=f"a node keeps up to data.cache_bytes={self.limit_bytes} of shards in {self.root}",
            remedy="free space there, set a smaller data.cache_bytes, or make ~/.raymega/cache a link to "
            "a larger disk",
        )


def _unexpected(path: Path, error: Exception) -> Fault:
    return Fault(
        fact=f"{path} was not fetched: {error!r}",
        rule="a shard comes, or its store or disk refuses it",
        remedy="report this with the traceback in the log; the run can be resumed",
    )


def _work(reference: ref[Fetcher], changed: Condition) -> None:
    """Fetch as long as somebody else has the fetcher: who waits for work must not keep it for the other threads."""
    while True:
        with changed:
            if (fetcher := reference()) is None:
                return
            if (found := fetcher._take()) is None:
                pause_s = fetcher._pause_s()
                del fetcher
                changed.wait(pause_s)
                continue
        fetcher._try(*found)
        del fetcher, found


def _files(root: Path) -> list[tuple[float, int, Path]]:
    """Return time of change, size and path of the cache's files, those that arrive included."""
    found = []
    for folder, folders, names in os.walk(root):
        if Path(folder) == root and TABLES in folders:
            folders.remove(TABLES)
        for name in names:
            if name.endswith((".arrow", ".bin", PARTIAL)):
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
    return found


def _evict(path: Path) -> bool:
    """Remove a file that no process has locked; return whether it is gone."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            if not try_lock(descriptor):
                return False
            path.unlink()
        finally:
            os.close(descriptor)
    return True
