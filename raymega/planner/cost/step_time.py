"""Predict the seconds of one optimizer step by part, before anything runs.

The module combines stages to a pipeline, and adds what happens once a step.
``raymega.planner.cost.stage_cost`` gives the times of stages,
``raymega.planner.kernels.collective_time`` those of transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul

from raymega.plan.fp8_layers import Fp8Coverage
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_shape import ActivationShape, activation_shape
from raymega.plan.memory.state_bytes import state_of
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.data_parallel_time import data_parallel_s
from raymega.planner.cost.forward_time import pipeline_messages_s, reference_s
from raymega.planner.cost.layer_time import counts_traffic
from raymega.planner.cost.optimizer_time import update_s
from raymega.planner.cost.pipeline_bubble_time import Passes, RankTimes, waiting_s
from raymega.planner.cost.rank_classes import RankClass, rank_kinds, stage_kind
from raymega.planner.cost.stage_cost import StageCosts, StageTime, stage_costs
from raymega.planner.kernels.kernel_time import host_s, memory_s, stream_s
from raymega.planner.kernels.system_traits import RAYMEGA, Software

OPTIMIZER_BYTES = 28 + 6
"""Bytes read and written for one parameter. The fused update reads gradient, master and two moments, and
writes all but the gradient; the rounding then reads the master again and writes the weight."""
BEGINS_LATE = ("zb_h2", "zb_v")
"""Schedules whose bubble has the late start of later ranks. Steps in a row share it where no rank
waits for the update."""
UNEVEN_SHARE = 0.35
"""Share of the difference between the longest chunks' sum and the busiest rank that a step waits,
as simulated schedules show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step by part; the parts add up to ``total_s``.

    Attributes:
        compute_s: Seconds of the busiest rank's kernels over all micro-batches.
        tensor_parallel_s: Exposed seconds of that rank's traffic over tp and cp.
        messages_s: Exposed seconds of its messages to pipeline neighbours.
        bubble_s: Seconds that it waits for the pipeline to fill and drain.
        data_parallel_s: Exposed seconds of gradient reductions and weight gathers over dp.
        optimizer_s: Seconds of the update, communication for it included.
        sharing_s: Seconds of waiting for a core that other workers of the node have; 0 on devices
            that work independently.
        experts_s: Exposed seconds of sending the busiest rank's tokens to experts and back.
        straggler_s: Seconds that all wait for the slowest device, taken to be on the busiest rank.
        reference_s: Seconds of the forward passes before the step by a frozen base or a live teacher.
    """

    compute_s: float
    tensor_parallel_s: float
    messages_s: float
    bubble_s: float
    data_parallel_s: float
    optimizer_s: float
    sharing_s: float = 0.0
    experts_s: float = 0.0
    straggler_s: float = 0.0
    reference_s: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part by its name in words, such as ``tensor parallel``; a reference's where there is one."""
        found = asdict(self)
        if not self.reference_s:
            del found["reference_s"]
        return {name[:-2].replace("_", " "): seconds for name, seconds in found.items()}

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        after_s = self.data_parallel_s + self.optimizer_s + self.sharing_s
        return self.reference_s + self.pipeline_s + after_s

    @property
    def pipeline_s(self) -> float:
        """Seconds of forward and backward of all micro-batches."""
        traffic = self.tensor_parallel_s + self.messages_s + self.experts_s
        return self.compute_s + traffic + self.bubble_s + self.straggler_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecomputedCosts:
    """Costs that many layouts share, so that a search computes them once.

    Attributes:
        costs: Costs of stages as the layout cuts them.
        ranks: Classes of the pipeline's ranks.
    """

    costs: StageCosts
    ranks: Sequence[RankClass]


def step_time(
    plan: RunPlan,
    device: Accelerator,
    software: Software = RAYMEGA,
    *,
    fp8_coverage: Fp8Coverage | None = None,
    known: PrecomputedCosts | None = None,
) -> StepTime:
    """Return the predicted time of a step of ``plan``'s batch, by closed forms.

    The pipeline runs at the pace of its busiest rank, and fills and drains at the average one's.
    ``raymega.planner.cost.pipeline_bubble_time`` gives the bubble. ``fp8_coverage`` has the fp8
    products of all blocks, where the job itself does not configure them.
    """
    job, grid = plan.job, plan.grid
    known = known or _precomputed(plan, device, software, fp8_coverage)
    # Pace of the pipeline, and its waiting.
    pace = _pace(plan, known, device, software)
    micro_batches = plan.batch.num_micro_batches
    held = known.ranks[0].elements
    state = known.costs.state(job, held, grid)
    bubble_s, messages_s = _waits(plan, pace, software)
    compute = micro_batches * (pace.busiest_s - pace.traffic_s - pace.experts_s)
    # The step of devices that work independently.
    alone = StepTime(
        compute_s=compute,
        tensor_parallel_s=micro_batches * pace.traffic_s,
        experts_s=micro_batches * pace.experts_s,
        messages_s=messages_s,
        bubble_s=bubble_s + _uneven_s(plan, pace),
        data_parallel_s=data_parallel_s(
            plan, held, device, software, backward_s=pace.busiest_s * 2 / 3
        ),
        optimizer_s=max(
            _update_memory_s(known.costs.shape, device, software)(
                device, state.num_owned * OPTIMIZER_BYTES
            ),
            host_s(device, state.host_bytes),
        )
        + update_s(job, held, grid, device),
        straggler_s=(device.straggler - 1) * compute,
    )
    # CPU workers also wait for the cores that they share.
    if not device.shared_cores:
        return replace(alone, reference_s=reference_s(plan, device, software))
    workers = min(grid.world_size, device.devices_per_node)
    all_s = workers * work_s(plan, device, software, known=known) / device.shared_cores
    shared = replace(alone, sharing_s=max(0.0, all_s - alone.total_s))
    return replace(shared, reference_s=reference_s(plan, device, software))


def _update_memory_s(
    shape: ActivationShape, device: Accelerator, software: Software
) -> Callable[[Accelerator, float], float]:
    """Return the function that prices the update's traffic, which is counted in full for raymega."""
    return stream_s if counts_traffic(shape, device, software) else memory_s


def work_s(
    plan: RunPlan,
    device: Accelerator,
    software: Software = RAYMEGA,
    *,
    known: PrecomputedCosts | None = None,
) -> float:
    """Return the seconds of a step in which a rank occupies a core, as the mean of the ranks.

    Where workers have fewer cores than they are, waiting costs nothing, because a waiting worker
    leaves its core to others. But the work of all counts. Moving bytes is work of a core too, and
    overlaps nothing.
    """
    known = known or _precomputed(plan, device, software)
    pace, held = _pace(plan, known, device, software), known.ranks[0].elements
    state = state_of(plan.job, held, plan.grid)
    # Moving bytes occupies the core, so no traffic overlaps.
    hiding_nothing = replace(software, hides_gradients=False)
    sums_s = data_parallel_s(plan, held, device, hiding_nothing, backward_s=0.0)
    passes_s = plan.batch.num_micro_batches * (pace.mean.total_s + pace.messages_s)
    whole_s = update_s(plan.job, held, plan.grid, device)
    return passes_s + sums_s + whole_s + memory_s(device, state.num_owned * OPTIMIZER_BYTES)


def _precomputed(
    plan: RunPlan,
    device: Accelerator,
    software: Software,
    fp8_coverage: Fp8Coverage | None = None,
) -> PrecomputedCosts:
    costs = stage_costs(plan.job, device, software, fp8_coverage=fp8_coverage)
    return PrecomputedCosts(costs=costs, ranks=rank_kinds(plan))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pace:
    """Seconds of one micro-batch through all chunks of a rank, forward and backward.

    Attributes:
        busiest_s: Seconds of the rank that takes longest, traffic of its layers included.
        ranks: Passes of each kind of rank.
        mean: Mean passes over the ranks.
        chunks_s: Sum over the chunks, each on the rank on which it takes longest.
        last_stage_s: Seconds of the last stage.
        traffic_s: Seconds of the busiest rank's traffic over tp and cp.
        experts_s: Seconds of the busiest rank's tokens on their way to experts and back.
        messages_s: Exposed seconds of messages to neighbours, not included above.
    """

    busiest_s: float
    ranks: tuple[RankTimes, ...]
    mean: Passes
    chunks_s: float
    last_stage_s: float
    traffic_s: float
    experts_s: float
    messages_s: float


def _pace(plan: RunPlan, known: PrecomputedCosts, device: Accelerator, software: Software) -> _Pace:
    # Stage times of each rank class; its first rank stands for all.
    ranks = [
        [known.costs.time(*each) for each in zip(rank.kinds, rank.stages, strict=True)]
        for rank in known.ranks
    ]
    seconds = [sum(chunk.total_s for chunk in chunks) for chunks in ranks]
    busiest = ranks[seconds.index(max(seconds))]
    passes = [_passes(chunks) for chunks in ranks]
    counts = [len(rank.pp_ranks) for rank in known.ranks]
    return _Pace(
        busiest_s=max(seconds),
        ranks=tuple(
            RankTimes(tuple({rank.pp_ranks[0], rank.pp_ranks[-1]}), mine)
            for rank, mine in zip(known.ranks, passes, strict=True)
        ),
        mean=Passes(
            *(sum(map(mul, each, counts)) / plan.grid.pp for each in zip(*passes, strict=True)),
        ),
        chunks_s=sum(max(chunk.total_s for chunk in each) for each in zip(*ranks, strict=True)),
        last_stage_s=next(
            chunk.total_s
            for chunks, rank in zip(ranks, known.ranks, strict=True)
            for chunk, stage in zip(chunks, rank.stages, strict=True)
            if stage.is_last
        ),
        traffic_s=sum(chunk.tensor_parallel_s for chunk in busiest),
        experts_s=sum(chunk.experts_s for chunk in busiest),
        messages_s=pipeline_messages_s(plan.job, known.costs.shape, device, software),
    )


def stage_times(plan: RunPlan, device: Accelerator) -> list[StageTime]:
    """Return the times of every stage in layer order."""
    costs = stage_costs(plan.job, device, RAYMEGA)
    return [costs.time(stage_kind(costs.shape, stage), stage) for stage in plan.stages]


def message_time(plan: RunPlan, device: Accelerator) -> float:
    """Return the exposed seconds of one activation between neighbours of the pipeline."""
    shape = activation_shape(plan.job)
    both_ways = 2 * plan.job.schedule.chunks
    return pipeline_messages_s(plan.job, shape, device, RAYMEGA) / both_ways


def _passes(chunks: Sequence[StageTime]) -> Passes:
    backward_s = sum(chunk.backward_s for chunk in chunks)
    weight_s = sum(chunk.weight_s for chunk in chunks)
    return Passes(sum(chunk.forward_s for chunk in chunks), backward_s - weight_s, weight_s)


def _order(plan: RunPlan) -> str:
    """Return the schedule's name; for zb_auto that of the published order that it starts from.

    zb_auto seldom differs from that order by 1 %.
    """
    schedule = plan.job.schedule
    if schedule.name != "zb_auto":
        return schedule.name
    is_free = (
        schedule.max_in_flight_microbatches != "pp"
        and int(schedule.max_in_flight_microbatches) >= 2 * plan.grid.pp - 1
    )
    return "zb_h2" if is_free else "zb_h1"


def _waits(plan: RunPlan, pace: _Pace, software: Software) -> tuple[float, float]:
    """Return the busiest rank's waiting for passes of others, and for messages, in seconds."""
    chunks, num, pp = plan.placement.chunks, plan.batch.num_micro_batches, plan.grid.pp
    sent_s, ranks, mean = pace.messages_s / 2, pace.ranks, pace.mean
    still_s = 0.0
    # A rank that computes nothing while it sends has longer passes instead.
    if not software.hides_messages:
        longer = _standing_still(sent_s, is_split=_order(plan).startswith("zb_"))
        ranks = tuple(RankTimes(each.pp_ranks, each.passes.plus(longer)) for each in ranks)
        mean, sent_s, still_s = mean.plus(longer), 0.0, num * longer.total_s
    bubble_s, messages_s = waiting_s(
        _order(plan), chunks=chunks, num_micro_batches=num, ranks=ranks, mean=mean, pp=pp,
        message_s=sent_s,
    )  # fmt: skip
    # Steps follow without a gap: the late start of later ranks is not paid again.
    if not software.waits_for_update and _order(plan) in BEGINS_LATE:
        bubble_s = max(0.0, bubble_s - (pp - 1) * mean.forward_s / chunks)
    return bubble_s, messages_s + still_s


def _standing_still(message_s: float, *, is_split: bool) -> Passes:
    """Return the additional seconds of passes on a rank that computes nothing while it sends.

    Messages of input gradients overlap weight gradients where the backward is split.
    """
    return Passes(message_s, 0.0 if is_split else message_s, 0.0)


def _uneven_s(plan: RunPlan, pace: _Pace) -> float:
    """Return the seconds that chunks of unequal length on different ranks add to a step.

    The order absorbs most of the difference. In a round that is not full, micro-batches follow each
    other on the last stage, and wait nowhere else.
    """
    pp, chunks, num = plan.grid.pp, plan.placement.chunks, plan.batch.num_micro_batches
    if num >= pp:
        return num * UNEVEN_SHARE * (pace.chunks_s - pace.busiest_s)
    if chunks == 1 or plan.placement.is_vee:
        return 0.0
    return (num - 1) * max(0.0, pace.last_stage_s - pace.mean.total_s / chunks)
