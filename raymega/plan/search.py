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
from raymega.plan.activations import activation_shape
from raymega.plan.layer_time import LayerTime, layer_time
from raymega.plan.memory_use import MemoryUse, memory_use, pipeline_elements
from raymega.plan.rules import job_faults
from raymega.plan.run_plan import RunPlan, job_values, make_plan, with_options
from raymega.plan.software import RAYMEGA
from raymega.plan.step_time import Known, StepTime, step_time

MICRO_BATCH_SIZES = (1, 2, 4, 8)
MOST_CHUNKS = 8
CP_METHODS = ("ring", "all_to_all")
LEAST_TOKENS = 4096
"""Of a sequence on each context-parallel rank; shorter parts cost more than they save."""
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout that fits, and what is expected of it."""

    plan: RunPlan
    time: StepTime
    memory: MemoryUse

    def overrides(self, job: Job) -> tuple[str, ...]:
        """What turns ``job`` into this layout, as ``--set`` takes it."""
        mine, theirs = job_values(self.plan.job), job_values(job)
        return tuple(
            f"{path}={_as_yaml(value)}" for path, value in mine.items() if value != theirs[path]
        )

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        job = self.plan.job
        tokens = self.plan.batch.global_batch_size * job.data.seq_len
        return tokens / self.time.total_s / self.plan.grid.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """One layout a grid, the fastest first.

    Attributes:
        best: These.
        refused: How many others, by what ruled them out.
        missed: Of those that memory alone ruled out, and that are faster than ``best``, the one that
            needs least.
    """

    best: tuple[Found, ...]
    refused: Counter[str]
    missed: Found | None


def search(job: Job, device: Accelerator, *, num_devices: int, top: int) -> SearchResult:
    """The fastest layout of each of the ``top`` fastest grids of ``job`` on ``num_devices``.

    Raises:
        PlanError: No legal layout has so many ranks, or none fits into memory.
    """
    found: list[Found] = []
    refused: Counter[str] = Counter()
    judge = _Judge(device)
    for candidate in candidates(job, device, num_devices=num_devices):
        verdict = judge.verdict(candidate)
        if isinstance(verdict, str):
            refused[verdict] += 1
        else:
            found.append(verdict)
    if not found:
        raise PlanError(_nothing_fits(job, device, num_devices, refused))
    best: dict[str, Found] = {}
    for each in sorted(found, key=lambda each: each.time.total_s):
        best.setdefault(each.plan.grid.describe(), each)
    refused["fit, and are slower"] = len(found) - min(top, len(best))
    fastest = next(iter(best.values())).time.total_s
    missed = _least_missed([each for each in judge.missed if each.time.total_s < fastest])
    return SearchResult(best=tuple(best.values())[:top], refused=refused, missed=missed)


def _least_missed(faster: list[Found]) -> Found | None:
    by_memory = sorted(faster, key=lambda each: each.memory.total_bytes)
    legal = (each for each in by_memory if not job_faults(job_values(each.plan.job)))
    return next(legal, None)


BREAKS_A_RULE = "breaks a rule of the job"
DOES_NOT_FIT = "does not fit into memory"


class _Judge:
    """Prices candidates, the cheapest refusal first, and counts once what many of them share."""

    def __init__(self, device: Accelerator) -> None:
        self.missed: list[Found] = []
        self._device = device
        self._shared: dict[tuple[object, ...], tuple[RunPlan, tuple[int, ...]] | None] = {}
        self._blocks: dict[tuple[object, ...], LayerTime] = {}

    def verdict(self, job: Job) -> Found | str:
        """What is expected of ``job``, or what rules it out."""
        shared = self._share(job)
        if shared is None:
            return BREAKS_A_RULE
        base, elements = shared
        plan = with_options(base, job)
        memory = memory_use(plan, elements)
        known = Known(block=self._block(job), first_elements=elements[0])
        found = Found(plan=plan, time=step_time(plan, self._device, known=known), memory=memory)
        if memory.total_bytes > self._device.memory_bytes:
            self.missed.append(found)
            return DOES_NOT_FIT
        return BREAKS_A_RULE if job_faults(job_values(job)) else found

    def _share(self, job: Job) -> tuple[RunPlan, tuple[int, ...]] | None:
        """Grid, stages and parameters of all layouts with these degrees; None when none is legal."""
        parallel, schedule = job.parallel, job.schedule
        degrees = parallel.tp, parallel.cp, parallel.pp, parallel.dp, parallel.cp_method
        key = (*degrees, schedule.chunks, schedule.name)
        if key not in self._shared:
            try:
                plan = make_plan(job)
            except PlanError:
                self._shared[key] = None
            else:
                self._shared[key] = plan, pipeline_elements(plan)
        return self._shared[key]

    def _block(self, job: Job) -> LayerTime:
        parallel = job.parallel
        key = parallel.tp, parallel.cp, parallel.cp_method, job.schedule.micro_batch_size
        if key not in self._blocks:
            self._blocks[key] = layer_time(activation_shape(job), self._device, RAYMEGA)
        return self._blocks[key]


def candidates(job: Job, device: Accelerator, *, num_devices: int) -> Iterator[Job]:
    """Every layout that is worth asking about, legal or not."""
    model = job.model
    tps = [d for d in _divisors(device.devices_per_node) if num_devices % d == 0]
    for tp in (tp for tp in tps if model.num_heads % tp == 0):
        for pp in (p for p in _divisors(num_devices // tp) if p <= model.num_layers):
            for cp in _context_degrees(job, num_devices // tp // pp):
                dp = num_devices // tp // pp // cp
                methods = dict.fromkeys((job.parallel.cp_method, *CP_METHODS))
                for method in methods if cp > 1 else (job.parallel.cp_method,):
                    if dp <= job.data.global_batch_size:
                        yield from _with_options(job, tp=tp, pp=pp, dp=dp, cp=cp, method=method)


def _context_degrees(job: Job, ranks: int) -> Iterator[int]:
    """Powers of two that leave every rank a long part of a sequence."""
    cp = 1
    while ranks % cp == 0 and (cp == 1 or job.data.seq_len // cp >= LEAST_TOKENS):
        yield cp
        cp *= 2


def _with_options(  # one an axis
    job: Job, *, tp: int, pp: int, dp: int, cp: int, method: str
) -> Iterator[Job]:
    sequences = -(-job.data.global_batch_size // dp)
    sizes = [size for size in MICRO_BATCH_SIZES if size <= sequences]
    chunks = [v for v in range(1, MOST_CHUNKS + 1) if v == 1 or (pp > 1 and _cuts(job, pp * v))]
    shardings = ("none", "optimizer") if dp * cp > 1 else ("none",)
    schedules = ("1f1b", "zb_h1") if pp > 1 else ("1f1b",)
    for size, v, sharding, recompute, schedule in product(
        sizes, chunks, shardings, RECOMPUTES, schedules
    ):
        if schedule == "1f1b" or v == 1:
            yield _changed(
                job,
                parallel={
                    "tp": tp, "pp": pp, "dp": dp, "cp": cp, "cp_method": method,
                    "sharding": sharding,
                    "sequence_parallel": tp > 1 and job.data.seq_len // cp % tp == 0,
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


def _as_yaml(value: object) -> str:
    """On one line, without spaces."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nothing_fits(job: Job, device: Accelerator, num_devices: int, refused: Counter[str]) -> Fault:
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return Fault(
        fact=f"{num_devices} x {device.name} for {job.run.name}: {reasons or 'no layout at all'}",
        rule=f"a rank has {device.memory_bytes / 2**30:.0f} GiB, and every rank a sequence at least",
        remedy="use more devices, a smaller model, or another data.global_batch_size",
    )
