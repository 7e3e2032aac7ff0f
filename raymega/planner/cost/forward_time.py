"""Predict what a step computes in forward passes of their own before it: a reference's, a live teacher's, embeddings'.

A forward-only pipeline runs at the pace of its busiest rank, and fills and drains once.
"""

from __future__ import annotations

from raymega.config.schema import Job
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.run_plan import RunPlan, teacher_plan
from raymega.planner.cost.rank_classes import stage_kind
from raymega.planner.cost.stage_cost import stage_costs
from raymega.planner.kernels.collective_time import gather_s, make_span, message_s
from raymega.planner.kernels.system_traits import Software


def passes_before(plan: RunPlan) -> list[RunPlan]:
    """Return the plan of each forward pass that a step begins with, in the order in which they run."""
    preference = plan.job.preference
    if plan.job.distillation.is_live:
        return [teacher_plan(plan)]
    if plan.job.model.head.kind == "embedding":  # of which each loss reads the whole batch's
        return [plan]
    # the frozen base; and the model itself, where kto estimates its divergence
    is_live = preference.needs_reference and preference.reference == "base"
    return [plan] * (is_live + (preference.loss_type == "kto"))


def reference_s(plan: RunPlan, device: Accelerator, software: Software) -> float:
    """Return the seconds of the forward passes that a step begins with; 0 where it has none."""
    return sum((_pass_s(each, device, software) for each in passes_before(plan)), 0.0)


def _pass_s(plan: RunPlan, device: Accelerator, software: Software) -> float:
    """Return the seconds of one forward pass over the micro-batches of a step."""
    costs = stage_costs(plan.job, device, software)
    times = [costs.time(stage_kind(costs.shape, stage), stage).forward_s for stage in plan.stages]
    ranks_s = [
        sum(times[stage.index] for stage in plan.chunks_of(pp_rank))
        for pp_rank in range(plan.grid.pp)
    ]
    busiest_s, whole_s = max(ranks_s), sum(ranks_s)
    # an activation that goes forward is half of what a micro-batch of training sends
    sent_s = pipeline_messages_s(plan.job, costs.shape, device, software) / 2
    num_micro_batches = plan.batch.num_micro_batches
    alone_s = num_micro_batches * (busiest_s + sent_s) + whole_s - busiest_s
    if not device.shared_cores:
        return alone_s * device.straggler
    # CPU workers share the cores of their node
    workers = min(plan.grid.world_size, device.devices_per_node)
    work_s = workers * num_micro_batches * whole_s / plan.grid.pp / device.shared_cores
    return max(alone_s, work_s)


def pipeline_messages_s(
    job: Job, shape: ActivationShape, device: Accelerator, software: Software
) -> float:
    """Return the exposed seconds of pipeline messages for one micro-batch.

    Each chunk sends one activation forward and one gradient back.
    """
    parallel, chunks = job.parallel, job.schedule.chunks
    if parallel.pp == 1:
        return 0.0
    whole = shape.tokens * shape.model.hidden_size * shape.element
    stride = parallel.tp * parallel.cp * parallel.dp
    inside = stride * parallel.pp <= device.devices_per_node
    # With chunks other work overlaps the bytes: latency alone counts.
    if software.hides_messages and chunks > 1 and not device.shared_cores:
        return 2 * chunks * message_s(device, 0.0, is_inside=inside)
    # Each tp rank sends its part of the activation.
    seconds = message_s(device, whole / parallel.tp, is_inside=inside)
    if not parallel.sequence_parallel:  # the parts of tp ranks are gathered again
        seconds += gather_s(device, make_span(device, size=parallel.tp, stride=1), whole)
    return 2 * chunks * seconds
