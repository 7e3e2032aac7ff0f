"""Estimate the exposed seconds of gradient reductions and weight gathers over replicas in a step.

The traffic depends on the level of sharding. It overlaps the computation that runs concurrently, as
far as that lasts. The first portion of a gather and the last one of a reduction overlap nothing.
"""

from __future__ import annotations

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.elements import Elements
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.run_plan import RunPlan
from raymega.plan.tensor_table import layer_tensors
from raymega.plan.zero_levels import ZeroLevel, dp_shard_ranks, level_of
from raymega.planner.kernels.collective_time import (
    all_reduce_s,
    gather_s,
    make_span,
    ring_steps_s,
)
from raymega.planner.kernels.system_traits import Software

BUCKETS = 8
"""Number of buckets in which gradients are sent; the last one has no computation left to overlap.
"""


CONTENTION = 0.2
"""Share of hidden traffic that computation takes longer: the kernels of a collective occupy about a
fifth of the cores of a GPU, and its memory, while they run."""


def data_parallel_s(
    plan: RunPlan, held: Elements, device: Accelerator, software: Software, *, backward_s: float
) -> float:
    """Return the exposed seconds of data-parallel traffic in a step.

    Up to level ``optimizer`` the reduction overlaps the last backward, and the gather the first
    forward. From ``gradients`` on a reduction overlaps every backward. At ``parameters`` weights
    are gathered for every forward, and again, concurrently with the reductions, for every backward.

    Args:
        plan: Plan of the run.
        held: Elements that a rank holds.
        device: Accelerator of every rank.
        software: Traits of the system, such as whether traffic overlaps computation.
        backward_s: Seconds of the backward of one micro-batch through all chunks of a rank.
    """
    reduce, gather, copies = _traffic_s(plan, held, device, software)
    level = level_of(plan.job.parallel)
    forward_s, passes = backward_s / 2, plan.batch.num_micro_batches
    # Without overlap all traffic is exposed.
    if not software.hides_gradients:
        sums = passes if level >= ZeroLevel.GRADIENTS else 1
        gathers = 2 * passes if level == ZeroLevel.PARAMETERS else 1
        return sums * reduce + gathers * gather + copies
    shared = 0.0 if device.shared_cores else CONTENTION
    ends = (reduce + gather) / BUCKETS
    # Sharded parameters: gathers in every pass, reductions in every backward.
    if level == ZeroLevel.PARAMETERS:
        each = max(0.0, gather - forward_s) + max(0.0, gather + reduce - backward_s)
        exposed = passes * each + ends
        return exposed + shared * max(0.0, passes * (reduce + 2 * gather) - exposed) + copies
    # Other levels: one gather, and the last reduction overlaps all but its last bucket.
    sums = passes if level == ZeroLevel.GRADIENTS else 1
    late = (sums - 1) * max(0.0, reduce - backward_s) + max(reduce / BUCKETS, reduce - backward_s)
    exposed = late + max(gather / BUCKETS, gather - forward_s)
    return exposed + shared * max(0.0, sums * reduce + gather - exposed) + copies


def _traffic_s(
    plan: RunPlan, held: Elements, device: Accelerator, software: Software
) -> tuple[float, float, float]:
    """Return the seconds of one pass over everything that a rank holds: reduce, gather and copies.

    The first reduces gradients to the ranks that own them. The second gathers weights, or without
    sharding the sums, to where they are used. The third sums over the copies of hybrid sharding.
    Tensors of experts use edp, all others the replicas.
    """
    grid, parallel = plan.grid, plan.job.parallel
    is_sharded = level_of(parallel) > ZeroLevel.NONE
    # Frozen weights are gathered where each use gathers, and nothing of them is reduced.
    is_passing = level_of(parallel) == ZeroLevel.PARAMETERS
    reduce = gather = copies = 0.0
    coded = held.coded
    for count, frozen, codes, ranks, stride in (
        (held.dense + held.wide, held.frozen, coded.dense, grid.replicas, grid.tp),
        (held.experts, held.frozen_experts, coded.experts, grid.edp, grid.etp * grid.ep),
    ):
        if not count + (frozen + codes) * is_passing:
            continue
        size = dp_shard_ranks(parallel, ranks) if is_sharded else ranks
        span = make_span(device, size=size, stride=stride)
        gradients = count * software.gradient_bytes
        element = DTYPE_BYTES[plan.job.precision.dtype]
        weights = (count + frozen * is_passing) * element if is_sharded else gradients
        reduce += gather_s(device, span, gradients)
        gather += gather_s(device, span, weights + coded.gathered_bytes(codes) * is_passing)
        # Hybrid sharding: the ranks that own the same part of each copy reduce it.
        across = make_span(device, size=ranks // size, stride=stride * size)
        copies += all_reduce_s(device, across, gradients / size)
        if level_of(parallel) >= ZeroLevel.GRADIENTS:
            steps_s = _collectives(plan, software) * ring_steps_s(device, span)
            reduce, gather = reduce + steps_s, gather + steps_s
    return reduce, gather, copies


def _collectives(plan: RunPlan, software: Software) -> float:
    """Return the number of collectives in one pass: one for each block, or for each tensor of it."""
    blocks = plan.job.model.num_layers / plan.grid.pp
    if not software.gathers_tensors:
        return blocks
    return blocks * len(layer_tensors(plan.job.model, 0))
