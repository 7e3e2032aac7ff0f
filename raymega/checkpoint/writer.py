"""Saves a rank's share: copies it to host memory while training waits, writes it while it goes on.

It takes one host buffer as large as the share (the rank's state divided by the data-parallel
degree) and keeps it between saves. It never raises into training for a store that fails, and does
not decide whether a checkpoint exists: it reports, and the driver commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from zlib import crc32

import torch

from raymega.checkpoint.data_file import Layout, lay_out, saved_boxes
from raymega.checkpoint.items import holding_of, values_at
from raymega.checkpoint.keys import data_file, folder_of
from raymega.checkpoint.planner import share_boxes
from raymega.errors import StorageError
from raymega.messages import SavedBox, ShardSaved
from raymega.parallel.blocks import Block
from raymega.storage.store import Store

log = logging.getLogger(__name__)

State = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a writer bears with its store.

    Attributes:
        timeout_s: Longest wait for the write before; a save that would wait longer is given up.
        retry_delays_s: Pauses before the second and the third try.
    """

    timeout_s: float = 600.0
    retry_delays_s: tuple[float, float] = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """A save whose values are in the host buffer."""

    step: int
    state: State
    stall_s: float
    layout: Layout


class CheckpointWriter:
    """One save at a time: the copy in the caller's thread, the write in a background thread."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        attempt: int,
        dp: int,
        report: Callable[[ShardSaved], None],
        patience: Patience = Patience(),
    ) -> None:
        """Make the writer of global rank ``rank`` in worker group ``attempt``.

        ``dp`` replicas share the work. ``report`` is called once a save, from the background
        thread unless the save is given up at once; it may not raise.
        """
        self._store = store
        self._rank = rank
        self._attempt = attempt
        self._dp = dp
        self._report = report
        self._patience = patience
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: Thread | None = None

    def save(self, step: int, blocks: Sequence[Block], state: State, *, dp_rank: int) -> float:
        """Copy this replica's share of ``blocks``, start its write, return the seconds it took.

        When it returns, the tensors may change. It waits for the save before.
        """
        began = time.monotonic()
        if not self.wait():
            error = f"the save before is still being written after {self._patience.timeout_s:g} s"
            return self._give_up(step, state, began, error)
        holdings = [holding_of(block) for block in blocks]
        shares = share_boxes(holdings, num_replicas=self._dp, replica=dp_rank)
        layout = lay_out(shares, metadata={"step": str(step), "attempt": str(self._attempt)})
        is_cuda = any(block.values.is_cuda for block in blocks)
        try:
            self._reserve(layout.num_bytes, is_pinned=is_cuda)
        except RuntimeError as error:  # how torch reports that host memory is used up
            return self._give_up(step, state, began, f"no host memory for the copy: {error}")
        self._copy(layout, blocks)
        if is_cuda:
            torch.cuda.synchronize()
        stall_s = time.monotonic() - began
        self._start(_Save(step=step, state=state, stall_s=stall_s, layout=layout))
        return stall_s

    def wait(self) -> bool:
        """Wait until nothing is being written; false when that took longer than the patience."""
        if self._thread is not None:
            self._thread.join(self._patience.timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Make the buffer large enough: the only place where host memory is taken."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def _copy(self, layout: Layout, blocks: Sequence[Block]) -> None:
        for share, start in zip(layout.shares, layout.starts, strict=True):
            source = values_at(blocks[share.holding], share.box)
            place = self._buffer[start : start + share.num_bytes].view(source.dtype)
            place.view(source.shape).copy_(source, non_blocking=True)

    def _start(self, save: _Save) -> None:
        self._thread = Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _give_up(self, step: int, state: State, began: float, error: str) -> float:
        log.warning("step %d is not saved: %s", step, error)
        stall_s = time.monotonic() - began
        self._report(
            ShardSaved(
                rank=self._rank, step=step, boxes=(), state=state, stall_s=stall_s, write_s=0.0,
                num_bytes=0, error=error,
            )
        )  # fmt: skip
        return stall_s

    def _write(self, save: _Save) -> None:
        """Body of the background thread; every failure becomes a report."""
        began = time.monotonic()
        boxes: tuple[SavedBox, ...] = ()
        error = ""
        try:
            boxes = self._put(save)
        except Exception as cause:  # noqa: BLE001  # the thread's edge
            error = f"{type(cause).__name__}: {cause}"
            log.warning("step %d is not saved: %s", save.step, error)
        self._report(
            ShardSaved(
                rank=self._rank, step=save.step, boxes=boxes, state=save.state,
                stall_s=save.stall_s, write_s=time.monotonic() - began,
                num_bytes=sum(box.num_bytes for box in boxes), error=error,
            )
        )  # fmt: skip

    def _put(self, save: _Save) -> tuple[SavedBox, ...]:
        """Write the data file, and return what is in it; a share may be empty."""
        file = data_file(attempt=self._attempt, rank=self._rank)
        blocks = self._blocks(save.layout)
        boxes = saved_boxes(save.layout, map(crc32, blocks), file)
        if boxes:
            key = folder_of(save.step) + file
            self._retry(lambda: self._store.put(key, [save.layout.header, *blocks], overwrite=True))
        return boxes

    def _blocks(self, layout: Layout) -> list[memoryview]:
        data = self._buffer.numpy().data
        spans = zip(layout.starts, layout.shares, strict=True)
        return [data[start : start + share.num_bytes] for start, share in spans]

    def _retry(self, put: Callable[[], None]) -> None:
        for delay_s in self._patience.retry_delays_s:
            try:
                return put()
            except (StorageError, OSError) as error:
                log.warning("writing again in %g s: %s", delay_s, error)
                time.sleep(delay_s)
        return put()
