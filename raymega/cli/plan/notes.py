"""Notes of `raymega plan`: what keeps a run from starting on this machine, and what no device holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raymega.config.schema import Job
from raymega.errors import counted
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.state_bytes import StateSize
from raymega.plan.run_plan import RunPlan
from raymega.plan.zero_levels import replicas_per_copy

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Resources that a local run would have: CPUs, and whether there is a GPU."""

    num_cpus: int
    has_gpu: bool


def this_machine() -> Machine:
    """Return what this machine has, without loading a driver."""
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    return Machine(num_cpus=os.cpu_count() or 1, has_gpu=has_gpu)


def notes(plan: RunPlan, sizes: list[StateSize]) -> Iterator[str]:
    """Yield what a reader should know before a start; nothing where all is well."""
    yield from _memory_notes(sizes)
    yield from _replica_notes(plan.job)
    yield from _image_notes(plan.job)
    yield from _machine_notes(plan, this_machine())


def _memory_notes(sizes: list[StateSize]) -> Iterator[str]:
    most = max(size.total_bytes for size in sizes)
    largest = max(CATALOGUE.values(), key=lambda device: device.memory_bytes)
    if most > largest.memory_bytes:
        yield (
            f"note: a rank's state takes {most / GIB:,.0f} GiB, and the largest device of the catalogue, "
            f"{largest.name}, has {largest.memory_bytes / GIB:.0f}: more ranks, sharding or a smaller model"
        )


def _replica_notes(job: Job) -> Iterator[str]:
    """Yield why the loss of a replica leaves no other that holds its state."""
    if job.elastic.on_replica_loss != "continue":
        return
    num_replicas, per_copy = job.parallel.dp * job.parallel.cp, replicas_per_copy(job)
    if num_replicas == 1 or not per_copy:
        copies = "one replica holds" if num_replicas == 1 else "all replicas share"
        yield (
            f"note: elastic.on_replica_loss=continue has no effect on this grid, where {copies} the state: a "
            "loss goes back to the newest snapshot or checkpoint; raise parallel.dp"
        )


def _image_notes(job: Job) -> Iterator[str]:
    """Yield what is counted of images of several sizes."""
    vision = job.model.vision
    if vision.max_pixels:
        field = "mean" if vision.mean_pixels else "max"
        yield (
            f"note: an image is counted as {counted(vision.mean_patches, 'token')} (model.vision.{field}_pixels), and the tower's work and "
            f"memory for it as those of the largest, of {vision.num_patches:,}"
        )


def _machine_notes(plan: RunPlan, machine: Machine) -> Iterator[str]:
    """Yield why a start without a cluster would be refused."""
    cluster, world = plan.job.cluster, plan.grid.world_size
    if cluster.device == "cuda" and not machine.has_gpu:
        yield (
            "note: this machine has no GPU, and cluster.device=cuda: it starts on a cluster only "
            f"(train --address HEAD:6379) with {counted(world, 'GPU')}"
        )
    elif cluster.device != "cuda" and world * cluster.cpus_per_worker > machine.num_cpus:
        share = int(1000 * machine.num_cpus / world) / 1000
        remedy = f"--set cluster.cpus_per_worker={share:g}" if share >= 0.001 else "a cluster"
        yield (
            f"note: {counted(world, 'worker')} of {cluster.cpus_per_worker:g} CPUs (cluster.cpus_per_worker) need more "
            f"than the {machine.num_cpus} of this machine: to start here, {remedy}"
        )
