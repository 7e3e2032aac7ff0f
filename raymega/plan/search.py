"""Finds the layouts on which a job would run fastest on so many devices.

It tries every legal choice of degrees, chunks, micro-batch, recompute and sharding, throws away what
does not fit, and ranks the rest by step_time. It measures nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raymega.config.schema import Job
from raymega.errors import Fault, PlanError
from raymega.plan.accelerators import Accelerator
from raymega.plan.activations import activation_shape
from raymega.plan.candidates import Space, candidates
from raymega.plan.layer_time import BlockTimes, block_times
from raymega.plan.memory_use import MemoryUse, memory_use, pipeline_elements
from raymega.plan.rules import job_faults
from raymega.plan.run_plan import RunPlan, job_values, make_plan, with_options
from raymega.plan.software import RAYMEGA
from raymega.plan.state_size import Elements
from raymega.plan.step_time import Known, StepTime, step_time


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


def search(
    job: Job,
    device: Accelerator,
    *,
    num_devices: int,
    top: int,
    fixed: frozenset[str] = frozenset(),
) -> SearchResult:
    """The fastest layout of each of the ``top`` fastest grids of ``job`` on ``num_devices``.

    Args:
        job: Of which; what the search sets of it is candidates.CHOSEN.
        device: What the ranks are.
        num_devices: Ranks.
        top: Most grids to return.
        fixed: Dotted paths of fields that stay as the job has them.

    Raises:
        PlanError: No legal layout has so many ranks, or none fits into memory.
    """
    found: list[Found] = []
    refused: Counter[str] = Counter()
    judge = _Judge(device)
    space = Space(job=job, device=device, num_devices=num_devices, fixed=fixed)
    for candidate in candidates(space):
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
FAR_ABOVE = 2.0
"""Times the device's memory: what needs more is not asked how fast it would be."""


class _Judge:
    """Prices candidates, the cheapest refusal first, and counts once what many of them share."""

    def __init__(self, device: Accelerator) -> None:
        self.missed: list[Found] = []
        self._device = device
        self._shared: dict[tuple[object, ...], tuple[RunPlan, tuple[Elements, ...]] | None] = {}
        self._blocks: dict[tuple[object, ...], BlockTimes] = {}

    def verdict(self, job: Job) -> Found | str:
        """What is expected of ``job``, or what rules it out."""
        shared = self._share(job)
        if shared is None:
            return BREAKS_A_RULE
        base, elements = shared
        plan = with_options(base, job)
        memory = memory_use(plan, elements)
        if memory.total_bytes > FAR_ABOVE * self._device.memory_bytes:
            return DOES_NOT_FIT
        known = Known(blocks=self._blocks_of(job), first_elements=elements[0])
        found = Found(plan=plan, time=step_time(plan, self._device, known=known), memory=memory)
        if memory.total_bytes > self._device.memory_bytes:
            self.missed.append(found)
            return DOES_NOT_FIT
        return BREAKS_A_RULE if job_faults(job_values(job)) else found

    def _share(self, job: Job) -> tuple[RunPlan, tuple[Elements, ...]] | None:
        """Grid, stages and parameters of all layouts with these degrees; None when none is legal."""
        parallel, schedule = job.parallel, job.schedule
        degrees = parallel.tp, parallel.cp, parallel.pp, parallel.dp, parallel.ep, parallel.etp
        key = (*degrees, parallel.cp_method, schedule.chunks, schedule.name)
        if key not in self._shared:
            try:
                plan = make_plan(job)
            except PlanError:
                self._shared[key] = None
            else:
                self._shared[key] = plan, pipeline_elements(plan)
        return self._shared[key]

    def _blocks_of(self, job: Job) -> BlockTimes:
        parallel = job.parallel
        cut = parallel.tp, parallel.cp, parallel.cp_method, parallel.ep, parallel.etp
        key = (*cut, parallel.dp, job.schedule.micro_batch_size)
        if key not in self._blocks:
            self._blocks[key] = block_times(activation_shape(job), self._device, RAYMEGA)
        return self._blocks[key]


def _as_yaml(value: object) -> str:
    """On one line, without spaces."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nothing_fits(job: Job, device: Accelerator, num_devices: int, refused: Counter[str]) -> Fault:
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return Fault(
        fact=f"{num_devices} x {device.name} for {job.run.name}: {reasons or 'no layout at all'}",
        rule=f"a rank has {device.memory_bytes / 2**30:.0f} GiB, and every rank a sequence at least",
        remedy="use more devices, a smaller model, or another data.global_batch_size",
    )
