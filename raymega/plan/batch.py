"""How many micro-batches a step has and which global samples each one holds.

The only place that divides a batch; the tail beyond the global batch is masked and counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The step's portions; sizes in sequences."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    dp: int

    @property
    def num_masked(self) -> int:
        """Slots of the last micro-batches that hold no sample."""
        slots = self.num_micro_batches * self.micro_batch_size * self.dp
        return slots - self.global_batch_size

    def samples(self, micro_batch: int, dp_rank: int, first_sample: int) -> tuple[int, ...]:
        """Global sample indices of one micro-batch; -1 marks a masked slot.

        Consecutive samples form a micro-batch, and consecutive micro-batches go to consecutive
        data-parallel ranks, so the set of samples of a step is the same on every grid.
        """
        start = (micro_batch * self.dp + dp_rank) * self.micro_batch_size
        offsets = range(start, start + self.micro_batch_size)
        return tuple(first_sample + i if i < self.global_batch_size else -1 for i in offsets)


def make_batch(*, global_batch_size: int, micro_batch_size: int, dp: int) -> BatchPlan:
    """num_micro_batches = ceil(global_batch_size / (micro_batch_size * dp))."""
    per_round = micro_batch_size * dp
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=-(-global_batch_size // per_round),
        dp=dp,
    )
