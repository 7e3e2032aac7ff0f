"""When a rank saves its state: checkpoints to the run's store, snapshots to other nodes' memory.

How that is done is the writers' in checkpoint; whether a save exists in the end is the driver's.
"""

from __future__ import annotations

from functools import partial

from raymega.checkpoint.save.host_copy import HostCopy
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.events import SaveSkipped
from raymega.messages import Channel
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.save_cost import shares_snapshot
from raymega.train.build import TrainingComponents
from raymega.train.forward_backward import sum_over_world
from raymega.train.nan_locator import refuse_non_finite_state
from raymega.train.state import TrainState
from raymega.train.step import StepOutcome

NO_SNAPSHOTS = (0.0, 0.0, 0.0)
"""As many numbers as with snapshots: how long a vector is may decide the order of its sums."""


class SaveScheduler:
    """Both writers of a rank. All ranks do the same at the same step, by what a step summed."""

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

    def extra_reductions(self) -> tuple[float, ...]:
        """What the other ranks must know of this one's saves; goes into the next step's sums."""
        numbers = self._snapshots.extra_reductions() if self._snapshots else NO_SNAPSHOTS
        return float(self._writer.is_busy), *numbers

    def fence(self) -> None:
        """Call before the tensors change: on a GPU the change then comes behind the copies."""
        self._writer.fence()
        if self._snapshots:
            self._snapshots.fence()

    def observe(self, outcome: StepOutcome, *, is_last: bool = False) -> dict[str, float]:
        """Learn from a step's sums, before it is reported: a snapshot that must be written by then is.

        That is one which is late, and one whose memory a checkpoint needs.

        Returns:
            Metrics of snapshots.
        """
        num_writing, *others = outcome.extra_reductions
        self._is_writing = num_writing > 0
        if not self._snapshots:
            return {}
        step, is_lent = outcome.state.step, self._is_shared and self._is_writing
        self._snapshots.observe(others, step=step, is_lent=is_lent)
        is_needed = self._is_shared and self.is_checkpoint_due(outcome, is_last=is_last)
        if self._snapshots.is_late or (is_needed and self._snapshots.is_under_way):
            self._snapshots.wait()
            again = sum_over_world(self._parts, self._snapshots.extra_reductions())
            self._snapshots.observe(again, step=step, is_lent=is_lent)
        return self._snapshots.metrics()

    def is_checkpoint_due(self, outcome: StepOutcome, *, is_last: bool) -> bool:
        """Whether :meth:`save_what_is_due` makes a checkpoint, unless the one before is still written."""
        every = self._parts.plan.job.checkpoint.every
        return is_last or outcome.save or (every > 0 and outcome.state.step % every == 0)

    def save_what_is_due(self, outcome: StepOutcome, *, is_last: bool) -> None:
        """After a step: a checkpoint when it is time for one, and a snapshot unless it is the last."""
        state, section = outcome.state, self._parts.plan.job.checkpoint
        is_saving = self.is_checkpoint_due(outcome, is_last=is_last)
        if is_saving:
            is_free_to_skip = not (is_last or outcome.save)
            if is_free_to_skip and self._is_writing and section.when_busy == "skip":
                self._report_skip(state.step)
                is_saving = False
            else:
                refuse_non_finite_state(self._parts, state.step)
        copy = None
        if self._snapshots and self._snapshots.is_due and not is_last:
            copy = self._snapshots.save(state.step, self._blocks(), state.scalars())
        if is_saving:
            self._save_checkpoint(state, copy)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self._writer.wait()

    def _save_checkpoint(self, state: TrainState, copy: HostCopy | None) -> None:
        """From the ``copy`` that is the snapshot of this step, or from one in snapshots' memory, or its own."""
        save = partial(self._writer.save, state.step, self._blocks(), state.scalars())
        if self._snapshots is None or not self._is_shared:
            save()
        elif copy is not None:
            save(copy=copy)
        elif self._snapshots.is_under_way:  # this step's, of which this rank has no copy
            save()
        else:
            save(into=self._snapshots.lend)

    def _blocks(self) -> list[TensorBlock]:
        return list(self._parts.optimizer.blocks())

    def _report_skip(self, step: int) -> None:
        """All ranks know that the save is left out; one says so."""
        if self._rank == 0:
            self._channel.report(SaveSkipped(step=step))
