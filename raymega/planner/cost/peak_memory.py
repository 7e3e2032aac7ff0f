"""Compute the peak bytes of a rank: state, activations in flight, and what the device reserves.

The parts are added up for every rank of the pipeline and every moment of a step that may be its
fullest, by closed forms that agree with the instruction lists of the schedules.
``raymega.plan.memory.state_bytes`` counts state, ``raymega.plan.memory.activation_bytes`` activations,
``raymega.planner.cost.working_memory`` what kernels hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from raymega.plan.memory.activation_bytes import StageActivations, bytes_to_first_wait
from raymega.plan.memory.activation_shape import ActivationShape, activation_shape
from raymega.plan.memory.elements import Elements
from raymega.plan.memory.state_bytes import StateSize, state_of
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage
from raymega.plan.zero_levels import ZeroLevel, level_of
from raymega.planner.cost.rank_classes import RankClass, rank_kinds
from raymega.planner.cost.stage_cost import StageCosts
from raymega.planner.cost.teacher_memory import TeacherMemory, teacher_memory
from raymega.planner.cost.working_memory import (
    passing_bytes,
    transfer_bytes,
)

RESERVED_BYTES = 2 * 2**30
"""Bytes of a GPU that no tensor can use: the driver's context and the communicators' buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Peak memory of the rank at pipeline coordinate ``pp_rank``, in bytes by part.

    The parts are those of the fullest moment of a step. ``activation_bytes`` include what kernels hold,
    and are the temporary bytes of an update where that is the fullest moment.
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
    plan: RunPlan,
    ranks: Sequence[RankClass] = (),
    costs: StageCosts | None = None,
    *,
    limit_bytes: float = inf,
) -> MemoryUse:
    """Return the peak memory of the fullest rank of ``plan`` on a GPU.

    Args:
        plan: Plan of the run.
        ranks: Classes of its ranks, when the caller has them already.
        costs: Costs of its stages, when the caller has them already.
        limit_bytes: Bytes above which the first rank found is returned, for whether it fits is known then.
    """
    costs = costs or StageCosts(activation_shape(plan.job))
    kinds = ranks or rank_kinds(plan)
    uses = []
    for kind in kinds:
        uses.append(_rank_memory(plan, kind, costs, pp_rank=kind.pp_ranks[0]))
        if uses[-1].total_bytes > limit_bytes:
            break
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
    is_paired = plan.job.parallel.overlap_moe_expert_parallel_comm
    in_flight = micro_batches_in_flight(
        plan.job.schedule.name,
        pp=plan.grid.pp,
        pp_rank=pp_rank,
        chunks=len(kind.stages),
        num_micro_batches=plan.batch.num_micro_batches,
        max_in_flight_microbatches=plan.job.schedule.max_in_flight_microbatches,
        is_paired=is_paired,
    )
    chunks = [costs.kept(*each) for each in zip(kind.kinds, kind.stages, strict=True)]
    head = sum(map(costs.head_bytes, kind.stages))
    mean = (sum(each.micro_batch_bytes for each in chunks) - head) / len(chunks)
    # Of several chunks the last one's backward follows its forward at once, unless forwards all come first.
    is_alone = len(chunks) > 1 and plan.job.schedule.name != "gpipe"
    kept = round(in_flight * mean) + head * (1 if is_alone else in_flight // len(chunks))
    if is_paired and plan.job.schedule.name == "1f1b" and in_flight > 1:
        kept = round((in_flight - 1) * (mean + head) + _begun_bytes(costs.shape, kind, mean))
    state = costs.state(plan.job, kind.elements, plan.grid)
    work = _RankWork(
        kept=kept,
        head=head,
        chunks=chunks,
        stages=kind.stages,
        state=state,
        held=kind.elements,
        num_neighbours=(pp_rank > 0) + (pp_rank < plan.grid.pp - 1),
    )
    teacher = teacher_memory(plan, pp_rank)
    has_working_memory = costs.shape.has_working_memory and plan.job.cluster.device != "cpu"
    moments = (
        _gpu_moments(work, plan, costs) if has_working_memory else _plain_moments(work, costs.shape)
    )
    moments = _with_teacher(moments, teacher, work)
    fullest = max(moments, key=sum)
    return MemoryUse(
        pp_rank=pp_rank,
        state_bytes=teacher.state_bytes
        + state.total_bytes
        - state.passing_bytes
        + fullest.passing_bytes,
        activation_bytes=fullest.activation_bytes,
        reserved_bytes=RESERVED_BYTES,
    )


def _begun_bytes(shape: ActivationShape, kind: RankClass, whole: float) -> float:
    """Return the bytes of the forward that takes turns with a backward, as far as it is ahead; at most ``whole``.

    A backward that recomputes its blocks waits for experts twice as often: the forward may be over before it.
    """
    if shape.memory.recompute == "full":
        return whole
    return min(whole, max(bytes_to_first_wait(shape, stage) for stage in kind.stages))


class _Moment(NamedTuple):
    """Bytes of a moment beyond the state that is always there.

    Attributes:
        passing_bytes: Bytes of sharded weights and gradients, and of offloaded state, for a use.
        activation_bytes: Bytes of activations and of what kernels hold.
    """

    passing_bytes: int
    activation_bytes: int


def _with_teacher(
    moments: Iterator[_Moment], teacher: TeacherMemory, work: _RankWork
) -> Iterator[_Moment]:
    """Yield a step's moments with what a teacher's pass has left in them, its own pass, and the divergence."""
    if teacher == TeacherMemory():
        yield from moments
        return
    for passing, activations in moments:
        yield _Moment(passing, activations + teacher.kept_bytes)
    yield _Moment(0, teacher.pass_bytes)
    yield _Moment(work.state.passing_bytes, work.kept + teacher.kept_bytes + teacher.loss_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankWork:
    """Memory facts of a rank: bytes that it keeps for backward at most, and what they are of.

    ``head`` are those of one micro-batch's head, 0 without it.
    """

    kept: int
    head: int
    chunks: Sequence[StageActivations]
    stages: Sequence[Stage]
    state: StateSize
    held: Elements
    num_neighbours: int

    @property
    def rerun_bytes(self) -> int:
        """Most bytes of the blocks that are recomputed, or that offload has on the device."""
        return max(each.rerun_bytes for each in self.chunks)


def _plain_moments(work: _RankWork, shape: ActivationShape) -> Iterator[_Moment]:
    """Yield the moments of a CPU, whose kernels work in portions: in a pass, and in the update."""
    passing = work.state.passing_bytes
    yield _Moment(passing, work.kept + work.rerun_bytes + passing_bytes(shape))
    yield _Moment(passing, work.state.update_bytes)


def _gpu_moments(work: _RankWork, plan: RunPlan, costs: StageCosts) -> Iterator[_Moment]:
    """Yield the moments of a GPU: in the loss, the head, a block's two halves, and the update."""
    shape, gathered = costs.shape, _gathered_bytes(work, plan)
    working = costs.working(has_experts=any(map(shape.blocks_with_experts, work.stages)))
    around = transfer_bytes(shape, num_neighbours=work.num_neighbours)
    if work.head:
        # Offload still copies the last unit away.
        leaving = work.rerun_bytes // 2 if "activations" in shape.memory.offload else 0
        for part, gradients in ((leaving + working.loss, 0), (working.head, work.held.end_sums)):
            # Head and last block are gathered, where two blocks may be elsewhere.
            if plan.batch.num_micro_batches > 1:
                gradients = work.held.end_sums + work.held.block_sums
            passing = min(gathered, _sharded_bytes(work, plan, shape, gradients))
            yield _Moment(passing, work.kept + around + part)
    for part in (working.feed_forward, working.attention):
        yield _Moment(gathered, work.kept - work.head + around + work.rerun_bytes + part)
    yield _Moment(work.state.passing_bytes, work.state.update_bytes)


def _sharded_bytes(
    work: _RankWork, plan: RunPlan, shape: ActivationShape, num_gradients: int
) -> int:
    """Return the bytes of ``num_gradients`` gradients, and of the head's and the last block's weights."""
    is_whole = level_of(plan.job.parallel) == ZeroLevel.PARAMETERS
    num_weights = (work.held.block + work.held.end) * is_whole
    return num_gradients * shape.wide + num_weights * shape.element


def _gathered_bytes(work: _RankWork, plan: RunPlan) -> int:
    """Return the bytes of sharded weights and gradients in a pass, without offloaded state."""
    job = plan.job
    if "optimizer" not in job.memory.offload:
        return work.state.passing_bytes
    here = job.model_copy(update={"memory": job.memory.model_copy(update={"offload": ()})})
    return state_of(here, work.held, plan.grid).passing_bytes


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
