"""Levels of sharding: what the ranks that hold the same parameters share out, each level the ones before too.

Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020. What a
level costs in bytes is state_bytes', in seconds data_parallel_time's.
"""

from __future__ import annotations

from enum import IntEnum

from raymega.config.parallel import ParallelSection


class ZeroLevel(IntEnum):
    """Values of parallel.sharding, in order."""

    NONE = 0
    OPTIMIZER = 1
    """Masters and moments: ZeRO-1."""
    GRADIENTS = 2
    """Their sums as well: ZeRO-2."""
    PARAMETERS = 3
    """And the weights, which are gathered before each use: ZeRO-3."""


BUCKET_BYTES = 32 * 2**20
"""Gradient bytes from which a bucket is full, if the rank has many more."""
MIN_BUCKETS = 4
"""A rank with fewer bytes has about so many buckets: the last one to fill has no work to hide behind."""
GLOO_THREADS = 2
"""Of a group over gloo: so many of its collectives are at work at once, and one that gathers fills memory
of its own first."""


def full_bucket_bytes(gradient_bytes: int) -> int:
    """From how many gradient bytes a bucket is full on a rank that has so many."""
    return min(BUCKET_BYTES, -(-gradient_bytes // MIN_BUCKETS))


def level_of(parallel: ParallelSection) -> ZeroLevel:
    """What the job asks for."""
    return ZeroLevel[parallel.sharding.upper()]


def data_parallel_shard_size(parallel: ParallelSection) -> int:
    """How many neighbouring replicas share one copy out; 0 is all, which experts have other numbers of."""
    return (
        0 if parallel.data_parallel_shard_degree == "all" else parallel.data_parallel_shard_degree
    )


def dp_shard_ranks(parallel: ParallelSection, replicas: int) -> int:
    """How many of ``replicas`` share one copy of the state out."""
    if parallel.sharding == "none":
        return 1
    return data_parallel_shard_size(parallel) or replicas
