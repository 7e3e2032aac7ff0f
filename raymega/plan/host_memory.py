"""Add up the host memory of a rank that copies to and from its device use; a GPU has it pinned.

It is mapped before the first step. ``raymega.parallel.core.pinned_memory`` maps and pins it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymega.plan.batch import BatchPlan
from raymega.plan.memory.activation_bytes import peak_bytes, stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements, state_of
from raymega.plan.run_plan import RunPlan
from raymega.plan.save_cost import save_cost
from raymega.plan.snapshot_replicas import snapshot_cost
from raymega.schedule.table import make_schedule

NARROW = ("bfloat16", "float16")
"""Formats of weights that have separate masters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemoryUse:
    """Host memory of one rank, in bytes by part.

    Attributes:
        optimizer_bytes: Bytes of offloaded masters and optimizer state.
        activation_bytes: Bytes of offloaded activations at the schedule's peak.
        checkpoint_bytes: Bytes of the copy of a checkpoint; 0 where snapshots' memory holds it.
        snapshot_bytes: Bytes of the copies of snapshots.
        are_copies_pinned: True where some of what is saved is on the device.
    """

    optimizer_bytes: int
    activation_bytes: int
    checkpoint_bytes: int
    snapshot_bytes: int
    are_copies_pinned: bool

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self._offloaded_bytes + self._copied_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the total that are pinned on a GPU: a copy of what is on the host needs not be."""
        return self._offloaded_bytes + self._copied_bytes * self.are_copies_pinned

    @property
    def _offloaded_bytes(self) -> int:
        return self.optimizer_bytes + self.activation_bytes

    @property
    def _copied_bytes(self) -> int:
        return self.checkpoint_bytes + self.snapshot_bytes


def host_memory(plan: RunPlan, rank: int) -> HostMemoryUse:
    """Return the host memory of ``rank``; exact except for alignment, less than 64 bytes a tensor."""
    job, at = plan.job, plan.grid.coords(rank)
    held = rank_elements(job, plan.stages_of(rank), plan.grid, tp_rank=at.tp)
    state = state_of(job, held, plan.grid)
    # Offload leaves on the device what is its own master: all in float32, and routers.
    is_all_away = state.host_bytes > 0 and job.precision.dtype in NARROW and not held.wide
    has_snapshots = job.elastic.snapshot_every > 0
    return HostMemoryUse(
        optimizer_bytes=state.host_bytes,
        activation_bytes=offloaded_activation_bytes(plan, rank),
        checkpoint_bytes=save_cost(plan, rank).buffer_bytes,
        snapshot_bytes=snapshot_cost(plan, rank).buffer_bytes if has_snapshots else 0,
        are_copies_pinned=not is_all_away,
    )


def offloaded_activation_bytes(plan: RunPlan, rank: int) -> int:
    """Return the bytes of offloaded activations of ``rank`` in the run's step that has most."""
    if "activations" not in plan.job.memory.offload:
        return 0
    return max(_activation_bytes(plan, rank, batch) for batch in plan.batches)


def _activation_bytes(plan: RunPlan, rank: int, batch: BatchPlan) -> int:
    shape = activation_shape(plan.job)
    away = [
        replace(kept, micro_batch_bytes=kept.host_bytes, rerun_bytes=0)
        for kept in (stage_activations(shape, stage) for stage in plan.stages_of(rank))
    ]
    program = make_schedule(plan.job.schedule.name, plan.sizes(batch))
    # Backward of the inputs fetches everything back, so the weights' part holds no host memory.
    return peak_bytes(program.lists[plan.grid.coords(rank).pp], away, wgrad_activation_fraction=0.0)
