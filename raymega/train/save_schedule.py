"""Timing of saves: checkpoints to the run's store, snapshots to the memory of nodes.

The writers in `checkpoint/` copy and write; the driver commits a checkpoint when all ranks have
written.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.events import SaveSkipped
from raymega.messages import Channel, Working
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.run_plan import RunPlan
from raymega.plan.save_cost import shares_snapshot
from raymega.train.build import TrainingComponents
from raymega.train.forward_backward import sum_over_world
from raymega.train.nan_locator import refuse_non_finite_state
from raymega.train.state import TrainState
from raymega.train.step import StepOutcome

log = logging.getLogger(__name__)

REPORT_EVERY_S, REPORTS_PER_S = 2.0, 50.0
WAIT_S = 1.0
"""Seconds between two signs of life of ranks that wait for the save before."""
NO_SNAPSHOTS = (0.0, 0.0, 0.0)
"""Zeros in place of a snapshot's three sums: the length of an all-reduce may decide its order of sums."""


def save_limits(plan: RunPlan) -> SaveLimits:
    """Return the limits of a save; the driver gets at most REPORTS_PER_S reports a second in all."""
    section = plan.job.checkpoint
    return SaveLimits(
        file_bytes=section.file_bytes,
        buffer_bytes=section.buffer_bytes,
        bytes_per_s=section.bytes_per_s,
        report_every_s=max(REPORT_EVERY_S, plan.grid.world_size / REPORTS_PER_S),
    )


class SaveScheduler:
    """Scheduler of a rank's two writers; all ranks decide alike, from sums of the step's all-reduce."""

    def __init__(
        self,
        parts: TrainingComponents,
        *,
        channel: Channel,
        writer: CheckpointWriter,
        snapshots: SnapshotWriter | None,
        rank: int,
    ) -> None:
        self._parts, self._channel, self._rank = parts, channel, rank
        self._writer, self._snapshots = writer, snapshots
        self._is_writing = False
        self._is_shared = snapshots is not None and shares_snapshot(parts.plan.job)

    def reserve(self) -> None:
        """Map and pin the host memory of all saves before the first step: pinning stops the device."""
        blocks = self._blocks()
        try:
            if self._snapshots:
                self._snapshots.reserve(blocks)
            if not self._is_shared:
                self._writer.reserve(blocks)
        except (RuntimeError, OSError) as error:
            log.warning("no host memory for the copies of saves, which will try again: %s", error)

    def extra_reductions(self) -> tuple[float, ...]:
        """Return this rank's state of saves as numbers that the next step sums over all ranks."""
        numbers = self._snapshots.extra_reductions() if self._snapshots else NO_SNAPSHOTS
        return float(self._writer.is_busy), *numbers

    def fence(self) -> None:
        """Make later GPU work wait for pending copies; called before an update changes the tensors."""
        self._writer.fence()
        if self._snapshots:
            self._snapshots.fence()

    def observe(self, outcome: StepOutcome, *, is_last: bool = False) -> dict[str, float]:
        """Read the step's sums, and wait for a snapshot that must be complete before training continues.

        It waits for a late snapshot, and for one whose buffer the checkpoint of this step needs.

        Returns:
            Metrics of snapshots.
        """
        num_writing, *others = outcome.extra_reductions
        self._is_writing = num_writing > 0
        if not self._snapshots:
            return {}
        # Lent memory: while a checkpoint is read from snapshots' buffers, no snapshot may begin.
        step, is_lent = outcome.state.step, self._is_shared and self._is_writing
        self._snapshots.observe(others, step=step, is_lent=is_lent)
        is_needed = self._is_shared and self.is_checkpoint_due(outcome, is_last=is_last)
        # All ranks take this branch together, as it has a collective.
        if self._snapshots.is_late or (is_needed and self._snapshots.is_under_way):
            self._snapshots.wait()
            again = sum_over_world(self._parts, self._snapshots.extra_reductions())
            self._snapshots.observe(again, step=step, is_lent=is_lent)
        return self._snapshots.metrics()

    def is_checkpoint_due(self, outcome: StepOutcome, *, is_last: bool) -> bool:
        """Return whether a checkpoint is due, unless a save still being written makes it skip."""
        every = self._parts.plan.job.checkpoint.every
        return is_last or outcome.save or (every > 0 and outcome.state.step % every == 0)

    def save_what_is_due(self, outcome: StepOutcome, *, is_last: bool) -> None:
        """Save a checkpoint and a snapshot after a step, as far as each is due."""
        state, section = outcome.state, self._parts.plan.job.checkpoint
        # checkpoint: skip it while one is written, unless it was asked for
        is_saving = self.is_checkpoint_due(outcome, is_last=is_last)
        if is_saving:
            is_free_to_skip = not (is_last or outcome.save)
            if is_free_to_skip and self._is_writing and section.when_busy == "skip":
                self._report_skip(state.step)
                is_saving = False
            else:
                refuse_non_finite_state(self._parts, state.step)
        # snapshot: first, as the checkpoint can be written from its copy
        copy = None
        if self._snapshots and self._snapshots.is_due and not is_last:
            copy = self._snapshots.save(state.step, self._blocks(), state.scalars())
        if is_saving:
            self._save_checkpoint(state, copy, is_last=is_last)

    def wait(self) -> None:
        """Wait until the last checkpoint is written or given up; its reports are the signs of life."""
        while not self._writer.wait():
            log.warning("the last checkpoint is still being written")

    def _save_checkpoint(self, state: TrainState, copy: HostCopy | None, *, is_last: bool) -> None:
        """Write a checkpoint from the snapshot's ``copy``, else through snapshot or own memory."""
        waited_s = self._outlast_save_before(is_last=is_last)
        writer = partial(self._writer.save, state.step, self._blocks(), state.scalars())
        save = partial(writer, is_last=is_last, waited_s=waited_s)
        if self._snapshots is None or not self._is_shared:
            save()
        elif copy is not None:
            save(copy=copy)
        elif self._snapshots.is_under_way:  # this step's snapshot, but this rank failed to copy it
            save()
        else:
            save(into=self._snapshots.lend)

    def _outlast_save_before(self, *, is_last: bool) -> float:
        """Wait until no rank writes, except one whose store takes nothing; return the seconds.

        All ranks wait together, however different their stores are: a rank that began the next step alone
        would wait there for the slowest, and take it for lost after elastic.collective_timeout_s.
        """
        began_s = time.monotonic()
        while self._is_writing:
            advances = self._writer.advances(WAIT_S, is_last=is_last)
            if self._rank == 0:
                self._channel.report(Working(rank=0))
            self._is_writing = sum_over_world(self._parts, [float(advances)])[0] > 0
        return time.monotonic() - began_s

    def _blocks(self) -> list[TensorBlock]:
        return list(self._parts.optimizer.blocks())

    def _report_skip(self, step: int) -> None:
        """Report from rank 0 alone that a save was skipped; all ranks skip it."""
        if self._rank == 0:
            self._channel.report(SaveSkipped(step=step))
