"""Finds the layouts on which a job would run fastest on so many devices.

It tries every legal choice of degrees, chunks, micro-batch, recompute and sharding, throws away what
does not fit, and ranks the rest by step_time. It measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from raymega.config.schema import Job
from raymega.errors import Fault, PlanError
from raymega.plan.accelerators import Accelerator
from raymega.plan.memory_use import MemoryUse, memory_use
from raymega.plan.rules import job_faults
from raymega.plan.run_plan import RunPlan, job_values, make_plan
from raymega.plan.step_time import StepTime, step_time

MICRO_BATCH_SIZES = (1, 2, 4, 8)
MOST_CHUNKS = 8
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout that fits, and what is expected of it."""

    plan: RunPlan
    time: StepTime
    memory: MemoryUse

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        job = self.plan.job
        tokens = self.plan.batch.global_batch_size * job.data.seq_len
        return tokens / self.time.total_s / self.plan.grid.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """One layout a grid, the fastest first; ``refused`` counts the others by what ruled them out."""

    best: tuple[Found, ...]
    refused: Counter[str]


def search(job: Job, device: Accelerator, *, num_devices: int, top: int) -> SearchResult:
    """The fastest layout of each of the ``top`` fastest grids of ``job`` on ``num_devices``.

    Raises:
        PlanError: No legal layout has so many ranks, or none fits into memory.
    """
    found: list[Found] = []
    refused: Counter[str] = Counter()
    for candidate in candidates(job, device, num_devices=num_devices):
        if job_faults(job_values(candidate)):
            refused["breaks a rule of the job"] += 1
            continue
        plan = make_plan(candidate)
        memory = memory_use(plan)
        if memory.total_bytes > device.memory_bytes:
            refused["does not fit into memory"] += 1
            continue
        found.append(Found(plan=plan, time=step_time(plan, device), memory=memory))
    if not found:
        raise PlanError(_nothing_fits(job, device, num_devices, refused))
    best: dict[str, Found] = {}
    for each in sorted(found, key=lambda each: each.time.total_s):
        best.setdefault(each.plan.grid.describe(), each)
    refused["fit, and are slower"] = len(found) - min(top, len(best))
    return SearchResult(best=tuple(best.values())[:top], refused=refused)


def candidates(job: Job, device: Accelerator, *, num_devices: int) -> Iterator[Job]:
    """Every layout that is worth asking about, legal or not."""
    model = job.model
    tps = [d for d in _divisors(device.devices_per_node) if num_devices % d == 0]
    for tp in (tp for tp in tps if model.num_heads % tp == 0):
        for pp in (p for p in _divisors(num_devices // tp) if p <= model.num_layers):
            dp = num_devices // tp // pp
            if dp > job.data.global_batch_size:
                continue
            yield from _with_options(job, tp=tp, pp=pp, dp=dp)


def _with_options(job: Job, *, tp: int, pp: int, dp: int) -> Iterator[Job]:
    sequences = -(-job.data.global_batch_size // dp)
    sizes = [size for size in MICRO_BATCH_SIZES if size <= sequences]
    chunks = [v for v in range(1, MOST_CHUNKS + 1) if v == 1 or (pp > 1 and _cuts(job, pp * v))]
    shardings = ("none", "optimizer") if dp > 1 else ("none",)
    schedules = ("1f1b", "zb_h1") if pp > 1 else ("1f1b",)
    for size, v, sharding, recompute, schedule in product(
        sizes, chunks, shardings, RECOMPUTES, schedules
    ):
        if schedule == "1f1b" or v == 1:
            yield _changed(
                job,
                parallel={
                    "tp": tp, "pp": pp, "dp": dp, "cp": 1, "sharding": sharding,
                    "sequence_parallel": tp > 1 and job.data.seq_len % tp == 0,
                    "stages": "auto" if pp * v > 1 else "even",
                    "first_stage_layers": "even", "last_stage_layers": "even",
                    "is_embedding_a_layer": False, "is_loss_a_layer": False,
                },
                schedule={
                    "micro_batch_size": size, "chunks": v, "name": schedule, "group_size": "pp",
                    "max_activations": "pp",
                },
                memory={"recompute": recompute, "recompute_parts": ("attention",)},
                cluster={"num_workers": "grid"},
            )  # fmt: skip


def _changed(job: Job, **sections: dict[str, Any]) -> Job:
    """The job with other fields in some sections; they are legal values by themselves."""
    changes = {
        name: getattr(job, name).model_copy(update=fields) for name, fields in sections.items()
    }
    return job.model_copy(update=changes)


def _cuts(job: Job, num_stages: int) -> bool:
    return num_stages <= job.model.num_layers


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nothing_fits(job: Job, device: Accelerator, num_devices: int, refused: Counter[str]) -> Fault:
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return Fault(
        fact=f"{num_devices} x {device.name} for {job.run.name}: {reasons or 'no layout at all'}",
        rule=f"a rank has {device.memory_bytes / 2**30:.0f} GiB, and every rank a sequence at least",
        remedy="use more devices, a smaller model, or another data.global_batch_size",
    )
