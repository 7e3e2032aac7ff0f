"""Compute the peak bytes of a rank: state, activations in flight, and what the device reserves.

The parts are added up for every rank of the pipeline, by closed forms that agree with the
instruction lists of the schedules. ``raymega.plan.memory.state_bytes`` counts state,
``raymega.plan.memory.activation_bytes`` activations.
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
"""Bytes of a GPU that no tensor can use: the driver's context and the communicators' buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Peak memory of the rank at pipeline coordinate ``pp_rank``, in bytes by part.

    ``activation_bytes`` are the temporary bytes of an update where these are more, because both
    never exist at the same time.
    """

    pp_rank: int
    state_bytes: int
    activation_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self.state_bytes + self.activation_bytes + self.reserved_bytes


def memory_use(
    plan: RunPlan, ranks: Sequence[RankClass] = (), costs: StageCosts | None = None
) -> MemoryUse:
    """Return the peak memory of the fullest rank of ``plan`` on a GPU.

    Args:
        plan: Plan of the run.
        ranks: Classes of its ranks, when the caller has them already.
        costs: Costs of its stages, when the caller has them already.
    """
    costs = costs or StageCosts(activation_shape(plan.job))
    kinds = ranks or rank_kinds(plan)
    uses = [_rank_memory(plan, kind, costs, pp_rank=kind.pp_ranks[0]) for kind in kinds]
    return max(uses, key=lambda use: use.total_bytes)


def pipeline_memory(plan: RunPlan) -> list[tuple[MemoryUse, Elements]]:
    """Return the peak memory of every rank of the pipeline, with the elements that it holds."""
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
    """Return the bytes of other ranks' keys, values and gradients while one layer runs."""
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
    """Return the most micro-batches that wait for their backward on one rank, counted by chunk.

    1F1B holds one for each stage from here to the end (Narayanan et al. 2021, figure 3). Its
    interleaved form warms up all chunks but one, and twice the distance to the end (figure 4).
    Zero-bubble schedules hold equally many on every rank (Qi et al. 2023, 2024), zb_auto as many as
    it may. 1F1B with paired passes holds one more.
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
