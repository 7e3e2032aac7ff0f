"""Decide whether the kernels between a layer's matrix products are compiled."""

from __future__ import annotations

from raymega.config.schema import Job


def compiles_kernels(job: Job, device: str = "") -> bool:
    """Return whether a job asks for compiled kernels; ``run.kernels=auto`` does on GPUs.

    There the kernels of single operations take longer to launch and to read memory than one that is
    fused. With ``run.deterministic`` auto does not: which compiled kernel a rank has may depend on the
    shapes that it has met.

    Args:
        job: Job that may have device auto.
        device: ``cpu`` or ``cuda`` where a worker knows it; else the job's own.
    """
    if job.run.kernels != "auto":
        return job.run.kernels == "compile"
    return (device or job.cluster.device) != "cpu" and not job.run.deterministic
