"""Text of the host memory that a rank uses to copy to and from its device."""

from __future__ import annotations

from raymega.plan.host_memory import HostMemoryUse, host_memory
from raymega.plan.run_plan import RunPlan


def most_host_memory(plan: RunPlan) -> HostMemoryUse:
    """Return the host memory of the rank that uses most, among those of one replica."""
    places = ((rank, plan.grid.coords(rank)) for rank in range(plan.grid.world_size))
    uses = (host_memory(plan, rank) for rank, at in places if at.dp == at.cp == at.tp == 0)
    return max(uses, key=lambda use: use.total_bytes)


def show_host_memory(plan: RunPlan) -> None:
    """Print the host memory of a rank, and how much of it a GPU has pinned."""
    use = most_host_memory(plan)
    is_gpu = plan.job.cluster.device != "cpu"
    pinned = (
        f", {readable(use.pinned_bytes)} of them pinned before the first step" if is_gpu else ""
    )
    parts = {
        "offloaded state": use.optimizer_bytes, "offloaded activations": use.activation_bytes,
        "copy of a checkpoint": use.checkpoint_bytes, "copies of snapshots": use.snapshot_bytes,
    }  # fmt: skip
    kept = ", ".join(f"{name} {readable(part)}" for name, part in parts.items() if part)
    print(f"\nhost memory of a rank: at most {readable(use.total_bytes)}{pinned} ({kept})")


def readable(num_bytes: int) -> str:
    """Return bytes in the largest unit that keeps them above 1."""
    for unit, size in (("EiB", 2**60), ("PiB", 2**50), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
