"""Bytes that a rank needs at the most: state, activations in flight, and what the device keeps back.

State is state_size's and activations are activations' to count; here they are put together for every
rank of the pipeline, by closed forms that the lists of the schedules agree with.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.plan.activations import activation_shape, stage_activations
from raymega.plan.run_plan import RunPlan
from raymega.plan.state_size import rank_state

RESERVED_BYTES = 2 * 2**30
"""Of a GPU that no tensor can have: the driver's context and the buffers of communicators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Of the rank that needs most; ``pp_rank`` says where it is."""

    pp_rank: int
    state_bytes: int
    activation_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.activation_bytes + self.reserved_bytes


def memory_use(plan: RunPlan) -> MemoryUse:
    """What the fullest rank of ``plan`` needs on a GPU."""
    shape = activation_shape(plan.job)
    uses = []
    for pp_rank in range(plan.grid.pp):
        chunks = [
            plan.stages[plan.placement.stage(pp_rank, chunk)]
            for chunk in range(plan.placement.chunks)
        ]
        in_flight = micro_batches_in_flight(
            plan.job.schedule.name,
            pp=plan.grid.pp,
            pp_rank=pp_rank,
            chunks=plan.placement.chunks,
            num_micro_batches=plan.batch.num_micro_batches,
        )
        kept = [stage_activations(shape, stage) for stage in chunks]
        mean = sum(chunk.micro_batch_bytes for chunk in kept) / len(kept)
        activations = round(in_flight * mean) + max(chunk.rerun_bytes for chunk in kept)
        state = rank_state(plan.job, chunks, plan.grid, tp_rank=0).total_bytes
        uses.append(
            MemoryUse(
                pp_rank=pp_rank, state_bytes=state, activation_bytes=activations,
                reserved_bytes=RESERVED_BYTES,
            )
        )  # fmt: skip
    return max(uses, key=lambda use: use.total_bytes)


def micro_batches_in_flight(
    schedule: str, *, pp: int, pp_rank: int, chunks: int, num_micro_batches: int
) -> int:
    """The most that wait for their backward on one rank, each chunk's counted by itself.

    1F1B holds one for each stage from here to the end (Narayanan et al. 2021, figure 3); its
    interleaved form warms up all chunks but one, and twice the way to the end (figure 4). Zero-bubble
    schedules hold as many on every rank (Qi et al. 2023, 2024).
    """
    after = pp - 1 - pp_rank
    held = {
        "gpipe": num_micro_batches * chunks,
        "zb_h1": pp,
        "zb_auto": pp,
        "zb_h2": 2 * pp - 1,
        "zb_v": 2 * pp,
        "dualpipe_v": 2 * pp + 1,
    }
    of_1f1b = after + 1 if chunks == 1 or pp == 1 else 2 * after + 1
    warm = held.get(schedule, of_1f1b + (chunks - 1) * pp)
    return min(num_micro_batches * chunks, warm)
