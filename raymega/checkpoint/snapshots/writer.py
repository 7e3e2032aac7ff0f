"""Snapshots as a rank makes them: when the next one may begin, and which older ones may go.

The copy and the write are a checkpoint's own (writer); they go to keepers instead of the store. All
ranks decide alike, because what they decide by is summed over all of them in each step's one small
all-reduce. What makes a snapshot whole is snapshots'.
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
from raymega.checkpoint.snapshots.snapshot import SnapshotPart
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
"""Short: what is tried again is only what no keeper at all took."""


class SnapshotWriter:
    """A rank's snapshots, one at a time; every method but the writer's report is the loop's to call.

    With each step: :meth:`extra_reductions` goes into the step's sums and :meth:`observe` takes their totals,
    both once more after :meth:`wait` where the newest snapshot :attr:`is_late`; :meth:`save` begins
    the next one where it :attr:`is_due`.
    """

    def __init__(self, plan: RunPlan, *, rank: int, attempt: int, replicas: Replicas) -> None:
        """Make the snapshots of global rank ``rank`` in worker group ``attempt``.

        ``replicas`` names this rank's keepers; without any every snapshot fails, and training goes
        on.
        """
        self._plan, self._attempt, self._replicas = plan, attempt, replicas
        self._every = plan.job.elastic.snapshot_every
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
        self._step = 0  # of the newest snapshot, and how it went: None while it is written
        self._newest: ShardSaved | None = None
        self._whole_step = 0
        self._num_lacking = 0
        self._is_wanted = False
        self._is_free = False
        self._is_lent = False
        self._waited_s = 0.0

    def extra_reductions(self) -> tuple[float, ...]:
        """What all ranks must know of this one: is it writing, has it failed, is a keeper lost."""
        is_writing = self._step > 0 and self._newest is None
        is_lacking = self._copies.num_stores < self._replicas.num_copies
        return float(is_writing), float(self._has_failed), float(is_lacking)

    def observe(self, totals: Sequence[float], *, step: int, is_lent: bool = False) -> None:
        """Learn from the sums of the step that led to ``step`` completed ones, as every rank does.

        While memory ``is_lent`` on any rank (see :meth:`lend`) no snapshot begins.
        """
        self._is_lent = is_lent
        num_writing, num_failed, num_lacking = map(round, totals)
        self._is_free, self._num_lacking = num_writing == 0, num_lacking
        is_whole = self._is_free and num_failed == 0
        if is_whole and self._step > self._whole_step:
            self._whole_step = self._step
            if self._tidied:
                Thread(target=self._tidy, name="tidy", daemon=True).start()
        self._is_wanted |= step % self._every == 0

    @property
    def is_due(self) -> bool:
        """All ranks begin a snapshot now, or none does: one is wanted, and nobody still writes."""
        return self._is_wanted and self._is_free and not self._is_lent

    @property
    def is_under_way(self) -> bool:
        """All ranks know of the newest snapshot whether it is whole, or none does."""
        return not self._is_free

    @property
    def is_late(self) -> bool:
        """All ranks wait now until the newest snapshot is written, or none does."""
        is_held_up = self._is_wanted and not self._is_free
        return is_held_up and self._plan.job.elastic.snapshot_backpressure == "wait"

    def save(self, step: int, blocks: Sequence[TensorBlock], state: State) -> HostCopy | None:
        """Copy this rank's share and start its way to the keepers; see CheckpointWriter.save for when tensors may change.

        Returns:
            The copy, which stays as it is until the next snapshot but one; None where there is none.
        """
        self._is_wanted, self._is_free, self._waited_s = False, False, 0.0
        self._step, self._newest = step, None
        host = self._buffers.free(whole_step=self._whole_step, step=step)
        self._writer.save(step, blocks, state, into=lambda: host)
        return None if self._has_failed else host

    def lend(self) -> HostCopy:
        """Memory for a copy of another writer's, as long as no snapshot is made or under way."""
        assert self._is_free, "the snapshot under way may be the newest whole one"
        return self._buffers.free(whole_step=self._whole_step)

    def fence(self) -> None:
        """Call before the tensors change: on a GPU the change then comes behind the copy."""
        self._writer.fence()

    def wait(self) -> None:
        """Wait until this rank writes nothing; training stands still for it."""
        began_s = time.monotonic()
        self._writer.wait()
        self._waited_s = time.monotonic() - began_s

    def metrics(self) -> dict[str, float]:
        """Of the newest snapshot that this rank has written, and of the newest that is whole."""
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
        """The data are written, or cannot be; called by the writer, from its own thread."""
        if isinstance(shard, RankSaveProgress):
            return
        error = shard.error or _attempt(lambda: self._put_part(shard))
        self._newest = replace(shard, error=error)

    def _put_part(self, shard: ShardSaved) -> None:
        grid = self._plan.grid
        part = SnapshotPart(
            attempt=self._attempt, grid=grid.degrees(), world_size=grid.world_size, shard=shard
        )
        self._copies.put(part.key, [part.to_json()], overwrite=True)

    def _tidy(self) -> None:
        """Drop what is older than the newest whole snapshot, whoever wrote it."""
        newest = CheckpointId(attempt=self._attempt, step=self._whole_step)
        for keeper in self._tidied:
            _attempt(partial(_drop_older, keeper, newest))


def _drop_older(keeper: RemoteMemoryStore, newest: CheckpointId) -> None:
    keeper.drop(expired_keys(keeper.list(ROOT), {newest: inf}, RetentionPolicy(last=1)))


def _attempt(action: Callable[[], None]) -> str:
    """Why it cannot be done; empty when it was."""
    try:
        action()
    except (RaymegaError, OSError) as error:
        log.warning("snapshots: %s", error)
        return str(error)
    return ""
