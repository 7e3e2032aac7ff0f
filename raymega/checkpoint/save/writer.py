"""Saves a rank's share: copies it to host memory, and writes it while training continues.

It uses one host buffer as large as the share (the rank's state divided by the data-parallel degree),
or as large as the job allows, and keeps it between saves. A failing store never raises into training. The driver commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf

from isal.isal_zlib import crc32

from raymega.box import SavedBox
from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.data_file import (
    MAX_BOX_BYTES,
    LocalBlock,
    WriteAssignment,
    file_header,
    layout_file,
    pack,
    saved_boxes,
    share_boxes,
)
from raymega.checkpoint.format.keys import data_file, folder_of
from raymega.checkpoint.save.background import Background
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.local_cache import LocalCache
from raymega.checkpoint.save.rate_limit import RateLimiter
from raymega.errors import StorageError, one_line
from raymega.messages import RankSaveProgress, ShardSaved
from raymega.parallel.core.pinned_memory import aligned
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.storage.retry import RetryPolicy
from raymega.storage.store import Store

log = logging.getLogger(__name__)

RETRY = RetryPolicy(pauses_s=(1.0, 4.0))
"""Retries of a data file, with pauses in seconds; then the save is given up, and the next one is due."""

FILES_IN_FLIGHT = 2
"""Number of files that a rank writes at once; a store may upload each in several parts."""
State = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveLimits:
    """Limits on the resources of a save; 0 is no limit.

    Attributes:
        file_bytes: Largest data file in bytes; a larger box gets a file of its own.
        buffer_bytes: Host memory of the copy. A larger share is copied and written in portions, and
            training waits for all of them except the last.
        bytes_per_s: Rate of all files of a rank together.
        report_every_s: Seconds between progress reports of a save.
        timeout_s: Longest wait in seconds for a write of which the store takes nothing; then the save that
            waits is given up. A run's last save waits longer, by the time for which it would be tried.
    """

    file_bytes: int = 2**30
    buffer_bytes: int = 0
    bytes_per_s: int = 0
    report_every_s: float = 2.0
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A data file: its name, its blocks in order, and their first byte in the buffer."""

    name: str
    layout: tuple[WriteAssignment, ...]
    base: int

    @property
    def num_bytes(self) -> int:
        return self.layout[-1].start + self.layout[-1].num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Division:
    """Share of a rank, divided into files and portions.

    Attributes:
        local_blocks: Blocks of the rank from which the share was derived.
        portions: Files of the share, grouped by what the buffer holds at once.
    """

    local_blocks: tuple[LocalBlock, ...] = ()
    portions: tuple[tuple[_File, ...], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the share in bytes."""
        return sum(file.num_bytes for files in self.portions for file in files)

    @property
    def buffer_bytes(self) -> int:
        """Size in bytes of the largest portion, which the buffer must hold."""
        ends = (files[-1].base + files[-1].num_bytes for files in self.portions)
        return max(ends, default=0)


@dataclass(kw_only=True, slots=True)
class _Save:
    """State of a save under way; ``written`` has the bytes handed to the store, by file."""

    step: int
    state: State
    host: HostCopy
    num_bytes: int
    began_s: float
    is_last: bool
    stall_s: float = 0.0
    write_s: float = 0.0
    boxes: list[SavedBox] = field(default_factory=list)
    headers: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    reported_s: float = 0.0
    error: str = ""


class CheckpointWriter:
    """Writer of one save at a time: copies in the caller's thread, writes in a background thread."""

    def __init__(  # noqa: PLR0913  # train.entry is the one place that calls it
        self,
        store: Store,
        *,
        rank: int,
        attempt: int,
        report: Callable[[ShardSaved | RankSaveProgress], None],
        retry: RetryPolicy = RETRY,
        last_retry: RetryPolicy = RETRY,
        limits: SaveLimits = SaveLimits(),
        local_cache: LocalCache | None = None,
    ) -> None:
        """Make the writer of global rank ``rank`` in attempt ``attempt``.

        ``report`` must not raise. It gets RankSaveProgress during a save and one ShardSaved at its end,
        from the background thread (from the caller's for a save that is given up at once).
        ``last_retry`` retries the files of a run's last save, ``retry`` those of every other.
        ``local_cache`` gets each file before the store does.
        """
        self._store, self._report = store, report
        self._rank, self._attempt = rank, attempt
        self._retry, self._last_retry = retry, last_retry
        self._limits, self._local_cache = limits, local_cache
        self._pace = RateLimiter(limits.bytes_per_s)
        self._host = self._last = HostCopy()
        self._background = Background("checkpoint")
        self._moved_s = time.monotonic()  # when a try began, or the store took bytes
        self._division = _Division()

    @property
    def is_busy(self) -> bool:
        """Return whether a save is still being written."""
        return self._background.is_busy

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes that the writer keeps between saves."""
        return self._host.num_bytes

    def reserve(self, blocks: Sequence[TensorBlock], into: Sequence[HostCopy] = ()) -> None:
        """Map and pin buffers for ``blocks``, so that no save does it between two steps.

        Args:
            blocks: Tensors of the rank.
            into: Buffers that saves will be given; without any the writer's own.

        Raises:
            RuntimeError, OSError: No host memory is left.
        """
        for host in into or (self._host,):
            host.reserve(self._divide(blocks).buffer_bytes, is_pinned=_is_on_gpu(blocks))

    def save(  # noqa: PLR0913  # a copy or a buffer, and what the schedule knows
        self,
        step: int,
        blocks: Sequence[TensorBlock],
        state: State,
        *,
        into: Callable[[], HostCopy] | None = None,
        copy: HostCopy | None = None,
        is_last: bool = False,
        waited_s: float = 0.0,
    ) -> float:
        """Copy this rank's share of ``blocks``, start its write, and return the seconds training waited.

        It first waits for the save before. CPU tensors may change when it returns, GPU tensors after
        :meth:`fence`.

        Args:
            step: Number of completed steps.
            blocks: Tensors of the rank.
            state: Scalars of the trainer.
            into: Function that returns the buffer to copy to, called when the save before is written.
                Without it the writer's own buffer is used.
            copy: Copy of the share that a writer of the same limits has made already. It, and the
                buffer of ``into``, must not change until this writer is no longer busy.
            is_last: Whether training ends with this save, so that no later one makes up for it.
            waited_s: Seconds for which training has waited for the save before already.
        """
        save = _Save(
            step=step, state=state, host=self._host, num_bytes=0, is_last=is_last,
            began_s=time.monotonic() - waited_s,
        )  # fmt: skip
        # One save at a time: the buffer still holds the one before.
        if error := self._stuck("the save before", is_last=is_last):
            return self._give_up(save, error)
        # Choose the buffer, and make it large enough for the largest portion.
        save.host = self._last = copy or (into() if into else self._host)
        division = self._divide(blocks)
        save.num_bytes, largest = division.num_bytes, division.buffer_bytes
        buffer_bytes = self._limits.buffer_bytes
        if buffer_bytes and largest > buffer_bytes:
            error = f"a row of {largest} bytes is more than checkpoint.buffer_bytes={buffer_bytes}"
            return self._give_up(save, error)
        try:
            save.host.reserve(largest, is_pinned=_is_on_gpu(blocks))
        except (RuntimeError, OSError) as error:  # torch's and mmap's for exhausted memory
            return self._give_up(save, f"no host memory for the copy: {error}")
        # All portions except the last share the buffer in turn, so training waits for their writes.
        *earlier, last = division.portions or ((),)
        for files in earlier:
            assert copy is None, "a copy holds the whole share"
            self._start(save, files, blocks, is_last=False)
            if cause := self._stuck("its first part", is_last=save.is_last) or save.error:
                return self._give_up(save, cause)
        # The last portion is written while training continues.
        self._start(save, last, () if copy else blocks, is_last=True)
        return save.stall_s

    def fence(self) -> None:
        """Make later GPU work wait for the copy; call it before the tensors change."""
        self._last.fence()

    def wait(self) -> bool:
        """Wait until nothing is being written; return False on a timeout of ``limits.timeout_s``."""
        return self._background.wait(self._limits.timeout_s)

    def advances(self, seconds: float, *, is_last: bool = False) -> bool:
        """Wait ``seconds`` at most; return whether something is being written that is worth a longer wait.

        ``is_last`` is for a wait before a run's last save.
        """
        left_s = self._patience_s(is_last=is_last) - (time.monotonic() - self._moved_s)
        return left_s > 0 and not self._background.wait(min(seconds, left_s))

    def _stuck(self, what: str, *, is_last: bool) -> str:
        """Wait for ``what`` is being written, as long as it advances; return an error if it does not, else ""."""
        while self.advances(inf, is_last=is_last):
            pass
        limit_s = self._patience_s(is_last=is_last)
        return f"the store has taken nothing of {what} for {limit_s:g} s" if self.is_busy else ""

    def _patience_s(self, *, is_last: bool) -> float:
        """Return how long a write of which the store takes nothing is waited for, in seconds."""
        return self._limits.timeout_s + (sum(self._last_retry.pauses_s) if is_last else 0.0)

    def _divide(self, blocks: Sequence[TensorBlock]) -> _Division:
        """Return the division of the rank's share, computed anew only when the blocks changed."""
        local_blocks = tuple(map(_local_block, blocks))
        if local_blocks != self._division.local_blocks:
            portions = tuple(self._portions(local_blocks))
            self._division = _Division(local_blocks=local_blocks, portions=portions)
        return self._division

    def _portions(self, local_blocks: Sequence[LocalBlock]) -> Iterator[tuple[_File, ...]]:
        # Share to boxes, boxes to files, files to portions that fit the buffer.
        buffer_bytes = self._limits.buffer_bytes
        limits = [limit for limit in (buffer_bytes, self._limits.file_bytes) if limit]
        assignments = share_boxes(local_blocks, max_box_bytes=min([MAX_BOX_BYTES, *limits]))
        sizes = [assignment.num_bytes for assignment in assignments]
        parts = pack(sizes, min([sum(sizes), *limits]))
        layouts = [layout_file(assignments[part]) for part in parts]
        file_bytes = [aligned(sum(sizes[part])) for part in parts]
        name = partial(data_file, attempt=self._attempt, rank=self._rank)
        for portion in pack(file_bytes, buffer_bytes or 2 * sum(sizes)):
            bases = accumulate(file_bytes[portion], initial=0)
            yield tuple(
                _File(name=name(number=number), layout=layouts[number], base=base)
                for number, base in zip(range(len(parts))[portion], bases, strict=False)
            )

    def _start(
        self, save: _Save, files: Sequence[_File], blocks: Sequence[TensorBlock], *, is_last: bool
    ) -> None:
        if blocks:
            save.host.copy(
                (file.base + part.start, blocks[part.local_block].at(part.box))
                for file in files
                for part in file.layout
            )
        self._moved_s = time.monotonic()
        save.stall_s = self._moved_s - save.began_s
        self._background.run(lambda: self._write(save, files, is_last=is_last))

    def _give_up(self, save: _Save, error: str) -> float:
        log.warning("step %d is not saved: %s", save.step, error)
        save.error, save.stall_s = error, time.monotonic() - save.began_s
        self._finish(save)
        return save.stall_s

    def _write(self, save: _Save, files: Sequence[_File], *, is_last: bool) -> None:
        """Write one portion in the background thread; every failure becomes a report."""
        began = time.monotonic()
        try:
            save.host.wait()
            with ThreadPoolExecutor(FILES_IN_FLIGHT, thread_name_prefix="checkpoint-file") as pool:
                for boxes in pool.map(lambda file: self._put(save, file), files):
                    save.boxes += boxes
        except Exception as cause:  # noqa: BLE001  # the thread's edge
            save.error = f"{type(cause).__name__}: {cause}"
            log.warning("step %d is not saved: %s", save.step, save.error)
        save.write_s += time.monotonic() - began
        if is_last:
            self._finish(save)

    def _finish(self, save: _Save) -> None:
        boxes = BoxTable.of(() if save.error else save.boxes)
        self._report(
            ShardSaved(
                rank=self._rank, step=save.step, boxes=boxes, state=save.state,
                stall_s=save.stall_s, write_s=save.write_s,
                num_bytes=int(boxes.rows["num_bytes"].sum()), error=save.error,
                headers={} if save.error else save.headers,
            )
        )  # fmt: skip

    def _put(self, save: _Save, file: _File) -> tuple[SavedBox, ...]:
        """Write one data file, with retries, and return its boxes with their checksums."""
        blocks = [save.host.chunk(file.base + part.start, part.num_bytes) for part in file.layout]
        header = file_header(file.layout, {"step": str(save.step), "attempt": str(self._attempt)})
        key = folder_of(save.step) + file.name
        chunks = [memoryview(header), *blocks]
        if self._local_cache is not None:
            self._local_cache.put(key, chunks)

        def put(_number: int) -> None:
            try:
                self._store.put(key, self._counted(save, file.name, chunks), overwrite=True)
            except (StorageError, OSError) as error:
                if save.is_last:
                    self._report_progress(save, error=one_line(error))
                raise

        # The file does not hold the checksums, so they are computed once, during the transfer.
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-sum") as summing:
            save.headers[file.name] = crc32(header)
            checksums = summing.submit(lambda: [crc32(block) for block in blocks])
            (self._last_retry if save.is_last else self._retry).run(put)
            return saved_boxes(
                file.layout, checksums.result(), file=file.name, header_bytes=len(header)
            )

    def _counted(
        self, save: _Save, name: str, chunks: Sequence[memoryview]
    ) -> Iterator[memoryview]:
        """Yield the bytes of a file at the job's rate, and report progress; a retry counts from 0."""
        save.written[name] = 0
        self._moved_s = time.monotonic()
        for piece in self._pace.pass_on(chunks):
            yield piece
            save.written[name] += len(piece)
            # Files in flight share the time of the last report.
            self._moved_s = now = time.monotonic()
            if now - max(save.reported_s, save.began_s) >= self._limits.report_every_s:
                save.reported_s = now
                self._report_progress(save)

    def _report_progress(self, save: _Save, *, error: str = "") -> None:
        written = min(sum(save.written.values()), save.num_bytes)
        self._report(
            RankSaveProgress(
                rank=self._rank, step=save.step, num_bytes=save.num_bytes, written_bytes=written,
                error=error,
            )
        )  # fmt: skip


def _is_on_gpu(blocks: Sequence[TensorBlock]) -> bool:
    return any(block.values.is_cuda for block in blocks)


def _local_block(block: TensorBlock) -> LocalBlock:
    """Return the description of a block, without its values."""
    return LocalBlock(
        tensor=block.name, dtype=block.dtype, global_shape=block.tensor.shape, box=block.box,
        is_primary=block.is_primary, holders=block.holders, replica=block.replica,
    )  # fmt: skip
