"""Define the levels of sharding: what ranks with the same parameters share, each level adding more.

Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020.
``raymega.plan.memory.state_bytes`` counts the bytes of a level, and
``raymega.planner.cost.data_parallel_time`` estimates its seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

from raymega.config.parallel import ParallelSection
from raymega.config.schema import Job


class ZeroLevel(IntEnum):
    """Values of parallel.sharding, in order."""

    NONE = 0
    OPTIMIZER = 1
    """Sharded masters and moments: ZeRO-1."""
    GRADIENTS = 2
    """Sharded sums of gradients as well: ZeRO-2."""
    PARAMETERS = 3
    """Sharded weights as well, which are gathered before each use: ZeRO-3."""


BUCKET_BYTES = 32 * 2**20
"""Gradient bytes from which a bucket is full, if the rank has many more."""
MIN_BUCKETS = 4
"""Number of buckets of a rank with fewer bytes; the last one to fill has no work to overlap."""
GLOO_THREADS = 2
"""Number of collectives that a gloo group runs at once; one that gathers fills memory of its own
first."""


def full_bucket_bytes(gradient_bytes: int) -> int:
    """Return the gradient bytes from which a bucket is full on a rank with ``gradient_bytes``."""
    return min(BUCKET_BYTES, -(-gradient_bytes // MIN_BUCKETS))


def level_of(parallel: ParallelSection) -> ZeroLevel:
    """Return the level that the job asks for."""
    return ZeroLevel[parallel.sharding.upper()]


def data_parallel_shard_size(parallel: ParallelSection) -> int:
    """Return how many neighbouring replicas share one copy of the state; 0 for all of them.

    The number of all replicas is another for experts.
    """
    return (
        0 if parallel.data_parallel_shard_degree == "all" else parallel.data_parallel_shard_degree
    )


def dp_shard_ranks(parallel: ParallelSection, replicas: int) -> int:
    """Return how many of ``replicas`` share one copy of the state."""
    # without sharding every replica has a whole copy
    if parallel.sharding == "none":
        return 1
    return data_parallel_shard_size(parallel) or replicas


def can_outlive_loss(
    ep: int,
    is_cp_dynamic: bool,  # noqa: FBT001  # fields of a rule come by position
    sharding: str,
    group: int | str,
    cp: int,
    offload: Collection[str],
) -> bool:
    """Return whether replicas, if they are enough, still hold all of the state when one of them is lost.

    Experts that are spread over replicas are lost with one, and so is state that all replicas share. State in
    host memory, and that of a dynamic cp, is not taken over.

    Args:
        ep: Degree of expert parallelism.
        is_cp_dynamic: Value of ``parallel.dynamic_cp``.
        sharding: Value of ``parallel.sharding``.
        group: Value of ``parallel.data_parallel_shard_degree``.
        cp: Degree of context parallelism.
        offload: Value of ``memory.offload``.
    """
    if ep > 1 or is_cp_dynamic or "optimizer" in offload:
        return False
    # hybrid sharding: whole neighbourhoods of replicas are lost and kept
    return sharding == "none" or (group != "all" and cp == 1)


def replicas_per_copy(job: Job) -> int:
    """Return how many neighbouring replicas hold the state once between them; 0 where none of it outlives a loss."""
    parallel = job.parallel
    if not can_outlive_loss(
        parallel.ep, parallel.dynamic_cp, parallel.sharding,
        parallel.data_parallel_shard_degree, parallel.cp, job.memory.offload,
    ):  # fmt: skip
        return 0
    num_replicas = parallel.dp * parallel.cp
    sharers = dp_shard_ranks(parallel, num_replicas)
    if sharers == 1:
        return 1
    return sharers if sharers < num_replicas and not job.model.moe.num_experts else 0
