"""Blocks in which messages of sequence parallelism overlap products, and the jobs that have them."""

from __future__ import annotations

from raymega.config.schema import Job

MOST_BLOCKS = 4
"""Most blocks of a gather or a sum. More hide more of it, in smaller products and more launches."""


def num_blocks(tp: int) -> int:
    """Return the number of blocks for ``tp`` ranks: the largest divisor up to MOST_BLOCKS."""
    return next(count for count in range(MOST_BLOCKS, 0, -1) if tp % count == 0)


def overlaps_messages(job: Job, device: str = "") -> bool:
    """Return whether linear layers overlap messages and products, by ``parallel.tp_comm_overlap``.

    Args:
        job: Job that may have device auto.
        device: ``cpu`` or ``cuda`` where a worker knows it; else the job's own.
    """
    parallel = job.parallel
    if not parallel.sequence_parallel or parallel.tp == 1:
        return False
    if parallel.tp_comm_overlap == "auto":
        return (device or job.cluster.device) != "cpu"
    return parallel.tp_comm_overlap
