"""The job on a layout, the layout of a job, and which layouts a job can have.

It draws and runs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from raymega.config.schema import Job
from raymega.plan.fp8_layers import goes_by_micro_batch
from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import job_faults
from raymega.verify.layout import DEGREES, OPTIONS, Layout


def layout_of(job: Job) -> Layout:
    """The layout that the job asks for."""
    values: dict[str, Any] = {axis: getattr(job.parallel, axis) for axis in DEGREES}
    values["micro_batch_size"] = job.schedule.micro_batch_size
    values |= {option.name: job_values(job)[option.path] for option in OPTIONS}
    return Layout(**values)


def reference_layout(job: Job) -> Layout:
    """One rank that takes the whole batch at once: nothing is cut, sent or accumulated.

    Where routing or scales go by the tokens of a micro-batch, the batch is in micro-batches as the job says.
    """
    return Layout(micro_batch_size=fixed_size(job) or job.data.global_batch_size)


def fixed_size(job: Job) -> int:
    """Samples of a micro-batch where another number would be another run, else 0."""
    return job.schedule.micro_batch_size if goes_by_micro_batch(job) else 0


def with_layout(job: Job, layout: Layout) -> Job:
    """The job on ``layout``; whether that is legal is :func:`is_legal`'s to say."""
    values = job.model_dump()
    for path, value in _values(layout).items():
        section, _, field = path.partition(".")
        values[section][field] = value
    return Job.model_validate(values)


def is_legal(job: Job, layout: Layout) -> bool:
    """Whether the job can run so, with a sample for every data-parallel rank."""
    return legality(job)(layout)


def legality(job: Job) -> Callable[[Layout], bool]:
    """:func:`is_legal` for many layouts of one job."""
    values, size = job_values(job), fixed_size(job)

    def can_run(layout: Layout) -> bool:
        if layout.dp > job.data.global_batch_size or size not in (0, layout.micro_batch_size):
            return False
        return not job_faults(values | _values(layout))

    return can_run


def _values(layout: Layout) -> dict[str, Any]:
    """Dotted path in a job to the layout's value, of everything that it decides."""
    values: dict[str, Any] = {f"parallel.{axis}": layout.degree(axis) for axis in DEGREES}
    values["schedule.micro_batch_size"] = layout.micro_batch_size
    values |= {option.path: layout.value(option) for option in OPTIONS}
    return values


def legal_shapes(job: Job, max_ranks: int) -> Iterator[Layout]:
    """Every legal choice of degrees with 2 to ``max_ranks`` ranks; the rest is the plainest."""
    can_run = legality(job)
    for degrees in product(range(1, max_ranks + 1), repeat=len(DEGREES)):
        tp, cp, pp, dp = degrees
        shape = Layout(tp=tp, cp=cp, pp=pp, dp=dp, micro_batch_size=fixed_size(job) or 1)
        if 1 < shape.world_size <= max_ranks and can_run(shape):
            yield shape
