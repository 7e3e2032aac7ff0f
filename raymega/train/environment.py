"""The worker's process: threads, device, determinism. The only reader of its environment."""

from __future__ import annotations

import torch

from raymega.plan.run_plan import RunPlan


def prepare_process(plan: RunPlan, *, device: str, local_rank: int) -> torch.device:
    """Set threads and determinism for this worker and return its device.

    With GPUs, Ray shows a worker only its own, so its index is 0 unless several are visible.
    """
    torch.set_num_threads(max(1, int(plan.job.cluster.cpus_per_worker)))
    if plan.job.run.deterministic:
        torch.use_deterministic_algorithms(mode=True)
    if device == "cpu":
        return torch.device("cpu")
    index = local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
