"""A rank's side of snapshots: when the next one begins, and when older ones are dropped.

Copy and write are those of a checkpoint (``save/writer.py``), but to snapshot servers instead
of the run's store. All ranks decide alike: their inputs are summed over all ranks in the small
all-reduce of each step. ``snapshots/snapshot.py`` defines when a snapshot is whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from threading import Thread

from raymega.checkpoint.format.keys import ROOT, CheckpointId, data_prefix
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits, State
from raymega.checkpoint.snapshots.buffers import SnapshotBuffers
from raymega.checkpoint.snapshots.part import SnapshotPart
from raymega.checkpoint.tools.retention import RetentionPolicy, expired_keys
from raymega.errors import RaymegaError
from raymega.messages import RankSaveProgress, Replicas, ShardSaved
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.run_plan import RunPlan
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.replicated_store import ReplicatedStore
from raymega.storage.retry import RetryPolicy
from raymega.storage.shared_memory import SharedMemories

log = logging.getLogger(__name__)

RETRY = RetryPolicy(pauses_s=(0.1, 0.1))
"""Retries with pauses in seconds; short, because a write fails only when no snapshot server accepts it."""


class SnapshotWriter:
    """Writer of a rank's snapshots, one at a time. The training loop calls its public methods.

    In each step the values of :meth:`extra_reductions` are summed over all ranks, and :meth:`observe`
    gets the totals. If the newest snapshot :attr:`is_late`, the loop calls :meth:`wait` and repeats both.
    If a snapshot :attr:`is_due`, it calls :meth:`save`.
    """

    def __init__(self, plan: RunPlan, *, rank: int, attempt: int, replicas: Replicas) -> None:
        """Make the writer of global rank ``rank`` in attempt ``attempt``.

        ``replicas`` names this rank's snapshot servers. Without any, every snapshot fails and training continues.
        """
        self._plan, self._attempt, self._replicas = plan, attempt, replicas
        self._every = plan.job.elastic.snapshot_every
        # Only the snapshot server of this rank's own node can map its memory.
        shared = SharedMemories()
        stores = {
            address: RemoteMemoryStore(
                address, replicas.token, timeout_s=plan.job.elastic.snapshot_timeout_s,
                shared=shared if address == replicas.home else None,
            )
            for address in replicas.write_to
        }  # fmt: skip
        self._copies = ReplicatedStore(stores)
        self._buffers = SnapshotBuffers(
            stores.get(replicas.home), shared, owner=data_prefix(attempt=attempt, rank=rank)
        )
        self._tidied = [stores[address] for address in replicas.tidies]
        self._writer = CheckpointWriter(
            self._copies, rank=rank, attempt=attempt, report=self._finish,
            retry=RETRY,
            limits=SaveLimits(file_bytes=plan.job.checkpoint.file_bytes, report_every_s=inf),
        )  # fmt: skip
        # The newest snapshot of this rank: its step, and its result (None while it is being written).
        self._step = 0
        self._newest: ShardSaved | None = None
        # As of the last observe, equal on all ranks.
        self._whole_step = 0
        self._num_lacking = 0
        self._is_wanted = False
        self._is_free = False
        self._is_lent = False
        self._waited_s = 0.0

    def reserve(self, blocks: Sequence[TensorBlock]) -> None:
        """Map and pin the buffers of snapshots of ``blocks``; raises as :meth:`CheckpointWriter.reserve` does."""
        self._writer.reserve(blocks, self._buffers.all())

    def extra_reductions(self) -> tuple[float, ...]:
        """Return 0 or 1 for each of: this rank is writing, its write failed, it lacks a snapshot server."""
        is_writing = self._step > 0 and self._newest is None
        is_lacking = self._copies.num_stores < self._replicas.num_copies
        return float(is_writing), float(self._has_failed), float(is_lacking)

    def observe(self, totals: Sequence[float], *, step: int, is_lent: bool = False) -> None:
        """Update the state that all ranks share from the ``totals`` of :meth:`extra_reductions`.

        Args:
            totals: Sums over all ranks.
            step: Number of completed steps.
            is_lent: Whether any rank has lent its buffer (see :meth:`lend`); then no snapshot begins.
        """
        self._is_lent = is_lent
        num_writing, num_failed, num_lacking = map(round, totals)
        self._is_free, self._num_lacking = num_writing == 0, num_lacking
        # Written by every rank and failed on none: the newest snapshot is whole, older ones can go.
        is_whole = self._is_free and num_failed == 0
        if is_whole and self._step > self._whole_step:
            self._whole_step = self._step
            if self._tidied:
                Thread(target=self._tidy, name="tidy", daemon=True).start()
        self._is_wanted |= step % self._every == 0

    @property
    def is_due(self) -> bool:
        """Return whether a snapshot begins now: one is wanted and no rank still writes; equal on all ranks."""
        return self._is_wanted and self._is_free and not self._is_lent

    @property
    def is_under_way(self) -> bool:
        """Return whether a rank still writes the newest snapshot; equal on all ranks."""
        return not self._is_free

    @property
    def is_late(self) -> bool:
        """Return whether training must wait for the newest snapshot; equal on all ranks."""
        is_held_up = self._is_wanted and not self._is_free
        return is_held_up and self._plan.job.elastic.snapshot_backpressure == "wait"

    def save(self, step: int, blocks: Sequence[TensorBlock], state: State) -> HostCopy | None:
        """Copy this rank's share and start its write to the snapshot servers.

        ``CheckpointWriter.save`` says when the tensors may change.

        Returns:
            The copy, which stays unchanged until the second snapshot after this one; None when it failed.
        """
        self._is_wanted, self._is_free, self._waited_s = False, False, 0.0
        self._step, self._newest = step, None
        host = self._buffers.free(whole_step=self._whole_step, step=step)
        self._writer.save(step, blocks, state, into=lambda: host)
        return None if self._has_failed else host

    def lend(self) -> HostCopy:
        """Return a buffer for another writer's copy, valid until the next snapshot begins."""
        assert self._is_free, "the snapshot under way may be the newest whole one"
        return self._buffers.free(whole_step=self._whole_step)

    def fence(self) -> None:
        """Make later GPU work wait for the copy; call it before the tensors change."""
        self._writer.fence()

    def wait(self) -> None:
        """Wait, and let training wait, until this rank has written its snapshot."""
        began_s = time.monotonic()
        self._writer.wait()
        self._waited_s = time.monotonic() - began_s

    def metrics(self) -> dict[str, float]:
        """Return metrics of this rank's newest snapshot and of the newest whole one."""
        newest = self._newest
        standing = {
            "checkpoint/snapshot_step": float(self._whole_step),
            "checkpoint/snapshot_lacking": float(self._num_lacking),
        }
        if newest is None or newest.error:
            return standing
        return standing | {
            "checkpoint/snapshot_stall_s": newest.stall_s + self._waited_s,
            "checkpoint/snapshot_s": newest.stall_s + newest.write_s,
            "checkpoint/snapshot_bytes": float(newest.num_bytes),
        }

    @property
    def _has_failed(self) -> bool:
        return bool(self._newest and self._newest.error)

    def _finish(self, shard: ShardSaved | RankSaveProgress) -> None:
        """Put this rank's part after its data; called by the writer, from its own thread."""
        if isinstance(shard, RankSaveProgress):
            return
        # The part comes last: readers take it as proof that the data are there.
        error = shard.error or _attempt(lambda: self._put_part(shard))
        self._newest = replace(shard, error=error)

    def _put_part(self, shard: ShardSaved) -> None:
        grid = self._plan.grid
        part = SnapshotPart(
            attempt=self._attempt, grid=grid.degrees(), world_size=grid.world_size, shard=shard
        )
        self._copies.put(part.key, [part.to_json()], overwrite=True)

    def _tidy(self) -> None:
        """Drop objects older than the newest whole snapshot, whichever rank wrote them."""
        newest = CheckpointId(attempt=self._attempt, step=self._whole_step)
        for server in self._tidied:
            _attempt(partial(_drop_older, server, newest))


def _drop_older(server: RemoteMemoryStore, newest: CheckpointId) -> None:
    server.drop(expired_keys(server.list(ROOT), {newest: inf}, RetentionPolicy(last=1)))


def _attempt(action: Callable[[], None]) -> str:
    """Run ``action`` and return the text of its error; empty on success."""
    try:
        action()
    except (RaymegaError, OSError) as error:
        log.warning("snapshots: %s", error)
        return str(error)
    return ""
