"""Layout: one way to run a job, as values, and the job that runs so.

It owns which options a layout has and which ones are legal for a job; it draws and runs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from raymega.config.schema import Job, ParallelSection
from raymega.plan.rules import job_faults
from raymega.plan.run_plan import job_values
from raymega.schedule.table import SCHEDULES

DEGREES = ("tp", "cp", "pp", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SIMPLEST_SCHEDULE = "gpipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of the axes, and what else may not change a run's numbers."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = SIMPLEST_SCHEDULE
    micro_batch_size: int = 1
    order: str = DEFAULT_ORDER
    sharding: str = "none"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def degree(self, axis: str) -> int:
        """Size of ``axis``."""
        return int(getattr(self, axis))

    def with_degree(self, axis: str, degree: int) -> Layout:
        """The same but for one degree."""
        change: dict[str, Any] = {axis: degree}
        return replace(self, **change)

    def grid(self) -> str:
        """Short form of the degrees, such as ``tp2-pp2``."""
        parts = [f"{axis}{self.degree(axis)}" for axis in DEGREES if self.degree(axis) > 1]
        return "-".join(parts) or "one-rank"

    def describe(self) -> str:
        """Everything that differs from the plainest layout of these degrees, and the schedule."""
        text = f"{self.grid()}, {self.schedule}, micro-batch {self.micro_batch_size}"
        if self.order != DEFAULT_ORDER:
            text += f", order {self.order}"
        return text if self.sharding == "none" else f"{text}, sharding {self.sharding}"

    def overrides(self) -> tuple[str, ...]:
        """The ``--set`` texts that give a job this layout."""
        return (
            *(f"parallel.{axis}={self.degree(axis)}" for axis in DEGREES),
            f"parallel.order={self.order}",
            f"parallel.sharding={self.sharding}",
            f"schedule.name={self.schedule}",
            f"schedule.micro_batch_size={self.micro_batch_size}",
        )


def layout_of(job: Job) -> Layout:
    """The layout that the job asks for."""
    return Layout(
        tp=job.parallel.tp,
        cp=job.parallel.cp,
        pp=job.parallel.pp,
        dp=job.parallel.dp,
        schedule=job.schedule.name,
        micro_batch_size=job.schedule.micro_batch_size,
        order=job.parallel.order,
        sharding=job.parallel.sharding,
    )


def reference_layout(job: Job) -> Layout:
    """One rank that takes the whole batch at once: nothing is cut, sent or accumulated."""
    return Layout(micro_batch_size=job.data.global_batch_size)


def with_layout(job: Job, layout: Layout) -> Job:
    """The job on ``layout``; whether that is legal is :func:`is_legal`'s to say."""
    values = job.model_dump()
    values["parallel"] |= {axis: layout.degree(axis) for axis in DEGREES}
    values["parallel"] |= {"order": layout.order, "sharding": layout.sharding}
    values["schedule"] |= {"name": layout.schedule, "micro_batch_size": layout.micro_batch_size}
    return Job.model_validate(values)


def is_legal(job: Job, layout: Layout) -> bool:
    """Whether the job can run so, with a sample for every data-parallel rank."""
    if layout.dp > job.data.global_batch_size:
        return False
    candidate = with_layout(job, layout)
    return not job_faults(job_values(candidate))


def legal_shapes(job: Job, max_ranks: int) -> Iterator[Layout]:
    """Every legal choice of degrees with 2 to ``max_ranks`` ranks; the rest is the plainest."""
    for degrees in product(range(1, max_ranks + 1), repeat=len(DEGREES)):
        tp, cp, pp, dp = degrees
        shape = Layout(tp=tp, cp=cp, pp=pp, dp=dp)
        if 1 < shape.world_size <= max_ranks and is_legal(job, shape):
            yield shape


def schedules() -> tuple[str, ...]:
    """Names of all schedules, the simplest first."""
    return tuple(sorted(SCHEDULES, key=lambda name: (name != SIMPLEST_SCHEDULE, name)))


def shardings() -> tuple[str, ...]:
    """What the job file allows for parallel.sharding, none first."""
    return get_args(ParallelSection.model_fields["sharding"].annotation)
