"""Bytes that a rank needs at the most: state, activations in flight, and what the device keeps back.

State is state_bytes' and activations are activation_bytes' to count; here they are put together for every
rank of the pipeline, by closed forms that the lists of the schedules agree with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.plan.memory.activation_bytes import ActivationShape, activation_shape
from raymega.plan.memory.state_bytes import Elements, state_of
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.context_cost import shape_cost
from raymega.planner.cost.rank_classes import RankClass, rank_kinds
from raymega.planner.cost.stage_cost import StageCosts

RESERVED_BYTES = 2 * 2**30
"""Of a GPU that no tensor can have: the driver's context and the buffers of communicators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Of the rank that needs most; ``pp_rank`` says where it is.

    ``activation_bytes`` are what an update holds for a moment where that is more: both are never
    there at once.
    """

    pp_rank: int
    state_bytes: int
    activation_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.activation_bytes + self.reserved_bytes


def memory_use(
    plan: RunPlan, ranks: Sequence[RankClass] = (), costs: StageCosts | None = None
) -> MemoryUse:
    """What the fullest rank of ``plan`` needs on a GPU.

    Args:
        plan: Of which.
        ranks: What its ranks hold, when that is known already.
        costs: Of its stages; the same.
    """
    costs = costs or StageCosts(activation_shape(plan.job))
    kinds = ranks or rank_kinds(plan)
    uses = [_rank_memory(plan, kind, costs, pp_rank=kind.pp_ranks[0]) for kind in kinds]
    return max(uses, key=lambda use: use.total_bytes)


def pipeline_memory(plan: RunPlan) -> list[tuple[MemoryUse, Elements]]:
    """The same of every rank of the pipeline, beside the parameters that it holds."""
    costs = StageCosts(activation_shape(plan.job))
    kind_of = {pp_rank: kind for kind in rank_kinds(plan) for pp_rank in kind.pp_ranks}
    return [
        (_rank_memory(plan, kind_of[pp_rank], costs, pp_rank=pp_rank), kind_of[pp_rank].elements)
        for pp_rank in range(plan.grid.pp)
    ]


def _rank_memory(plan: RunPlan, kind: RankClass, costs: StageCosts, *, pp_rank: int) -> MemoryUse:
    in_flight = micro_batches_in_flight(
        plan.job.schedule.name,
        pp=plan.grid.pp,
        pp_rank=pp_rank,
        chunks=len(kind.stages),
        num_micro_batches=plan.batch.num_micro_batches,
        max_in_flight_microbatches=plan.job.schedule.max_in_flight_microbatches,
        is_paired=plan.job.parallel.overlap_moe_expert_parallel_comm,
    )
    chunks = [costs.kept(*each) for each in zip(kind.kinds, kind.stages, strict=True)]
    mean = sum(each.micro_batch_bytes for each in chunks) / len(chunks)
    rerun = max(each.rerun_bytes for each in chunks)
    state = state_of(plan.job, kind.elements, plan.grid)
    activations = round(in_flight * mean) + rerun + _passing_bytes(costs.shape)
    return MemoryUse(
        pp_rank=pp_rank,
        state_bytes=state.total_bytes,
        activation_bytes=max(activations, state.update_bytes),
        reserved_bytes=RESERVED_BYTES,
    )


def _passing_bytes(shape: ActivationShape) -> int:
    """Others' keys, values and gradients while one layer works."""
    if shape.parallel.cp == 1:
        return 0
    return round(shape_cost(shape, shape.parallel.cp_method).passing_bytes)


def micro_batches_in_flight(  # noqa: PLR0913  # one a size
    schedule: str,
    *,
    pp: int,
    pp_rank: int,
    chunks: int,
    num_micro_batches: int,
    max_in_flight_microbatches: int | str = "pp",
    is_paired: bool = False,
) -> int:
    """The most that wait for their backward on one rank, each chunk's counted by itself.

    1F1B holds one for each stage from here to the end (Narayanan et al. 2021, figure 3); its
    interleaved form warms up all chunks but one, and twice the way to the end (figure 4). Zero-bubble
    schedules hold as many on every rank (Qi et al. 2023, 2024), zb_auto what it may. Paired passes of 1F1B
    take one more.
    """
    after = pp - 1 - pp_rank
    held = {
        "gpipe": num_micro_batches * chunks,
        "zb_h1": pp,
        "zb_auto": pp if max_in_flight_microbatches == "pp" else int(max_in_flight_microbatches),
        "zb_h2": 2 * pp - 1,
        "zb_v": 2 * pp,
        "dualpipe_v": 2 * pp + 1,
    }
    of_1f1b = after + 1 + is_paired if chunks == 1 or pp == 1 else 2 * after + 1
    warm = held.get(schedule, of_1f1b + (chunks - 1) * pp)
    return min(num_micro_batches * chunks, warm)
