"""Seconds of one optimizer step by part, before anything runs.

It puts blocks together into stages, stages into a pipeline, and adds what happens once a step. Times
of kernels are layer_time's, of transfers link_time's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymega.config.schema import Job
from raymega.plan.accelerators import Accelerator
from raymega.plan.activations import ActivationShape, activation_shape
from raymega.plan.fp8_rules import InEight
from raymega.plan.kernel_time import memory_s
from raymega.plan.layer_time import BlockTimes, block_times, embedding_time, head_time, join_time
from raymega.plan.link_time import gather_s, make_span, message_s
from raymega.plan.replica_time import data_parallel_s
from raymega.plan.run_plan import RunPlan
from raymega.plan.software import RAYMEGA, Software
from raymega.plan.stages import Stage
from raymega.plan.state_size import Elements, rank_elements, state_of

OPTIMIZER_BYTES = 34
"""Read and written for one parameter: gradient, master and two moments in, all but the gradient and
the weight out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, by part; they add up to ``total_s``.

    Attributes:
        compute_s: Kernels of the busiest stage over all micro-batches.
        tensor_parallel_s: Its traffic over tp that nothing hides.
        messages_s: Its messages to neighbours that nothing hides.
        bubble_s: Its waiting for the pipeline to fill and drain.
        data_parallel_s: Gradients and weights over dp that nothing hides.
        optimizer_s: The update.
        sharing_s: Waiting for a core that other workers of the node have; 0 on devices that work
            each by itself.
        experts_s: The busiest stage's tokens on their way to experts and back, that nothing hides.
    """

    compute_s: float
    tensor_parallel_s: float
    messages_s: float
    bubble_s: float
    data_parallel_s: float
    optimizer_s: float
    sharing_s: float = 0.0
    experts_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The step."""
        busy = self.compute_s + self.tensor_parallel_s + self.messages_s
        rest = self.data_parallel_s + self.optimizer_s + self.sharing_s + self.experts_s
        return busy + self.bubble_s + rest


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """One stage, one micro-batch: forward and backward, and what of both is traffic over tp and cp,
    and to experts."""

    forward_s: float
    backward_s: float
    tensor_parallel_s: float
    experts_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What many layouts share, so that a search counts it once.

    Attributes:
        blocks: Times of a block of each kind as the layout cuts it.
        first_elements: Parameters of the pipeline's first rank.
    """

    blocks: BlockTimes
    first_elements: Elements


def step_time(
    plan: RunPlan,
    device: Accelerator,
    software: Software = RAYMEGA,
    *,
    eight: InEight | None = None,
    known: Known | None = None,
) -> StepTime:
    """Of a step of ``plan``'s batch by closed forms, (pp - 1) / (v m) for the bubble.

    The pipeline runs at the pace of its busiest rank, and fills and drains at the average one's.
    ``eight`` are products in fp8 of all blocks, where the job itself says nothing of it.
    """
    job, grid, placement = plan.job, plan.grid, plan.placement
    shape = activation_shape(job)
    shape = replace(shape, eight=eight) if eight else shape
    blocks = known.blocks if known else block_times(shape, device, software)
    stages = _stage_times(plan, shape, blocks, device)
    ranks = [
        [stages[placement.stage(pp, chunk)] for chunk in range(placement.chunks)]
        for pp in range(grid.pp)
    ]
    busiest = max(ranks, key=lambda chunks: sum(chunk.total_s for chunk in chunks))
    once = sum(chunk.total_s for chunk in busiest)
    mean = sum(stage.total_s for stage in stages) / grid.pp
    micro_batches = plan.batch.num_micro_batches
    messages = _messages_s(job, shape, device, software)
    traffic = sum(chunk.tensor_parallel_s for chunk in busiest)
    experts = sum(chunk.experts_s for chunk in busiest)
    held = known.first_elements if known else rank_elements(job, plan.stages_of(0), grid)
    state = state_of(job, held, grid)
    fill = bubble_share(job.schedule.name, pp=grid.pp, chunks=placement.chunks)
    alone = StepTime(
        compute_s=micro_batches * (once - traffic - experts),
        tensor_parallel_s=micro_batches * traffic,
        experts_s=micro_batches * experts,
        messages_s=micro_batches * messages,
        bubble_s=fill * (mean + messages),
        data_parallel_s=data_parallel_s(plan, held, device, software, backward_s=once * 2 / 3),
        optimizer_s=memory_s(device, state.num_owned * OPTIMIZER_BYTES),
    )
    busy_s = micro_batches * mean + alone.data_parallel_s + alone.optimizer_s
    return replace(alone, sharing_s=_sharing_s(alone.total_s, busy_s, device, grid.world_size))


def _sharing_s(total_s: float, busy_s: float, device: Accelerator, num_ranks: int) -> float:
    """What a step takes beyond ``total_s`` where workers have fewer cores than they are.

    A worker that waits leaves its core to others, so that only the work of all of them counts.
    """
    if not device.shared_cores:
        return 0.0
    workers = min(num_ranks, device.devices_per_node)
    return max(0.0, busy_s * workers / device.shared_cores - total_s)


def stage_times(plan: RunPlan, device: Accelerator) -> list[StageTime]:
    """Of every stage in layer order."""
    shape = activation_shape(plan.job)
    return _stage_times(plan, shape, block_times(shape, device, RAYMEGA), device)


def message_time(plan: RunPlan, device: Accelerator) -> float:
    """Of one activation between neighbours of the pipeline, as far as nothing hides it."""
    shape = activation_shape(plan.job)
    both_ways = 2 * plan.job.schedule.chunks
    return _messages_s(plan.job, shape, device, RAYMEGA) / both_ways


def _stage_times(
    plan: RunPlan, shape: ActivationShape, blocks: BlockTimes, device: Accelerator
) -> list[StageTime]:
    """Of every stage; like stages are counted once."""
    known: dict[tuple[object, ...], StageTime] = {}
    found = []
    for stage in plan.stages:
        ends = stage.is_first, stage.is_last
        kind = (stage.num_layers, shape.blocks_with_experts(stage), shape.kept_wide(stage), *ends)
        if kind not in known:
            known[kind] = stage_time(stage, shape, blocks, device)
        found.append(known[kind])
    return found


def bubble_share(schedule: str, *, pp: int, chunks: int) -> float:
    """Waiting of a rank, in passes of one micro-batch through all its chunks."""
    fill = (pp - 1) / chunks
    # Shares of 1f1b's bubble when input and weight gradients take as long as a forward each (Qi et
    # al. 2023, table 1; V schedules: Qi et al. 2024).
    left = {"zb_h1": 1 / 3, "zb_h2": 0.0, "zb_v": 0.0, "zb_auto": 1 / 3, "dualpipe_v": 1 / 3}
    return fill * left.get(schedule, 1.0)


def stage_time(
    stage: Stage, shape: ActivationShape, blocks: BlockTimes, device: Accelerator
) -> StageTime:
    """Its blocks and, at the ends, embedding and head."""
    passes = 3 if shape.memory.recompute == "full" else 2
    further = len(shape.further(stage))
    forward = backward = traffic = experts = 0.0
    for number, block in blocks.of_stage(shape, stage):
        once, once_backward = block.pass_s(shape.memory.recompute)
        forward, backward = forward + number * once, backward + number * once_backward
        traffic += number * passes * (block.tensor_parallel_s + block.context_parallel_s)
        experts += number * passes * block.experts_s
    ends = (
        (int(stage.is_first), embedding_time),
        (int(stage.is_last) + further, head_time),
        (further, join_time),
    )
    for number, part in ends:
        if number:
            more, more_backward = part(shape, device)
            forward, backward = forward + number * more, backward + number * more_backward
    return StageTime(
        forward_s=forward, backward_s=backward, tensor_parallel_s=traffic, experts_s=experts
    )


def _messages_s(job: Job, shape: ActivationShape, device: Accelerator, software: Software) -> float:
    """One activation forward and one gradient back for each chunk, of one micro-batch."""
    parallel, chunks = job.parallel, job.schedule.chunks
    if parallel.pp == 1:
        return 0.0
    if software.hides_messages and chunks > 1:
        return 2 * chunks * device.fitted.network_latency_s
    whole = shape.tokens * shape.model.width * shape.element
    stride = parallel.tp * parallel.cp * parallel.dp
    inside = stride * parallel.pp <= device.devices_per_node
    seconds = message_s(device, whole / parallel.tp, is_inside=inside)
    if not parallel.sequence_parallel:  # what was sent in tp parts is put together again
        seconds += gather_s(device, make_span(device, size=parallel.tp, stride=1), whole)
    return 2 * chunks * seconds
