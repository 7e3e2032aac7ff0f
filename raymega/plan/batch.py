"""Split a step's global batch into micro-batches, and assign global samples to them.

This is the only module that divides a batch. Slots beyond the global batch are masked and count
nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from raymega.config.data import DataSection
from raymega.config.schema import Job

SCORED_MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches that a pipeline stage gets between two exchanges of scores; more make a smaller bubble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Division of a step's batch; sizes are in sequences."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    dp: int

    @property
    def num_masked(self) -> int:
        """Number of slots in the last micro-batches that hold no sample."""
        slots = self.num_micro_batches * self.micro_batch_size * self.dp
        return slots - self.global_batch_size

    def samples(self, micro_batch: int, dp_rank: int, first_sample: int) -> tuple[int, ...]:
        """Return the global sample indices of one micro-batch; -1 marks a masked slot.

        Consecutive samples form a micro-batch, and consecutive micro-batches go to consecutive
        data-parallel ranks. The set of samples of a step is therefore the same on every grid.
        """
        # sample order: micro-batch, dp rank, row
        start = (micro_batch * self.dp + dp_rank) * self.micro_batch_size
        offsets = range(start, start + self.micro_batch_size)
        return tuple(first_sample + i if i < self.global_batch_size else -1 for i in offsets)


def make_batch(*, global_batch_size: int, micro_batch_size: int, dp: int) -> BatchPlan:
    """Return a batch of ceil(global_batch_size / (micro_batch_size * dp)) micro-batches."""
    per_round = micro_batch_size * dp
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=-(-global_batch_size // per_round),
        dp=dp,
    )


def samples_after(steps: int, section: DataSection) -> int:
    """Return the samples that the first ``steps`` steps of a run read, through its batch ramp."""
    samples = 0
    for until, size in _ramp_of(section):
        taken = min(steps, max(0, -(-(until - samples) // size)))
        steps, samples = steps - taken, samples + taken * size
    return samples + steps * section.global_batch_size


def steps_for(samples: int, section: DataSection) -> int:
    """Return the fewest steps that read at least ``samples`` samples, through the batch ramp."""
    steps = done = 0
    for until, size in _ramp_of(section):
        taken = max(0, -(-(min(until, samples) - done) // size))
        steps, done = steps + taken, done + taken * size
    return steps + max(0, -(-(samples - done) // section.global_batch_size))


def _ramp_of(section: DataSection) -> list[tuple[int, int]]:
    return [(stage.until_samples, stage.global_batch_size) for stage in section.batch_ramp]


@dataclass(frozen=True, kw_only=True, slots=True)
class RampStage:
    """Smaller batch that is used until ``until_samples`` samples of the run are consumed."""

    until_samples: int
    batch: BatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Consecutive steps with one batch; ``num_steps`` 0 means to the end of the run."""

    first_step: int
    first_sample: int
    num_steps: int
    batch: BatchPlan


def batch_at(ramp: Sequence[RampStage], batch: BatchPlan, samples: int) -> BatchPlan:
    """Return the batch of the step that begins at global sample ``samples``.

    It depends on nothing else. A stage whose length is no multiple of its batch ends with the first
    step that reaches ``until_samples``. A resumed run therefore continues with the right batch on
    any grid.
    """
    return next((stage.batch for stage in ramp if samples < stage.until_samples), batch)


def phases(ramp: Sequence[RampStage], batch: BatchPlan) -> Iterator[Phase]:
    """Yield the phases of the run from its first step (1), without those that have no step."""
    step, sample = 1, 0
    for stage in ramp:
        size = stage.batch.global_batch_size
        # An earlier stage may have consumed this stage's samples: then it has no step.
        num_steps = max(0, -(-(stage.until_samples - sample) // size))
        if num_steps:
            yield Phase(
                first_step=step, first_sample=sample, num_steps=num_steps, batch=stage.batch
            )
        step, sample = step + num_steps, sample + num_steps * size
    yield Phase(first_step=step, first_sample=sample, num_steps=0, batch=batch)


def row_length(num_tokens: int, job: Job) -> int:
    """Return a row length that holds ``num_tokens`` and that the grid can cut, at most ``data.seq_len``."""
    seq_len, parallel = job.data.seq_len, job.parallel
    # cuts of context and sequence parallelism, and tiles of fp8 products
    unit = lcm(2 * parallel.cp * parallel.tp * 16, job.data.document_multiple)
    return min(seq_len, -(-num_tokens // unit) * unit) if seq_len % unit == 0 else seq_len
