"""Legality of layouts: a job's own layout, the job on another layout, and which of these are legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from raymega.config.schema import Job
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import job_faults
from raymega.verify.layout import DEGREES, PATHS, Layout


def layout_of(job: Job) -> Layout:
    """Return the layout that the job asks for."""
    values: dict[str, Any] = job_values(job)
    return Layout(**{name: values[path] for name, path in PATHS.items()})


def reference_layout(job: Job) -> Layout:
    """Return the layout of one rank that takes the whole batch at once: no sharding, no accumulation.

    Where routing or fp8 scales depend on the tokens of a micro-batch, the job's micro-batch size is kept.
    """
    return Layout(micro_batch_size=fixed_size(job) or job.data.global_batch_size)


def fixed_size(job: Job) -> int:
    """Return the micro-batch size if another one would change the run's numbers, else 0."""
    return job.schedule.micro_batch_size if depends_on_micro_batch_size(job) else 0


def with_layout(job: Job, layout: Layout) -> Job:
    """Return the job with ``layout``, which :func:`is_legal` may refuse."""
    values = job.model_dump()
    for path, value in layout.values().items():
        section, _, field = path.partition(".")
        values[section][field] = value
    return Job.model_validate(values)


def is_legal(job: Job, layout: Layout) -> bool:
    """Return whether the job can run on ``layout``, with a sample for every data-parallel rank."""
    return legality(job)(layout)


def legality(job: Job) -> Callable[[Layout], bool]:
    """Return :func:`is_legal` as a function of the layout, fast for many layouts of one job."""
    values, size = job_values(job), fixed_size(job)

    def can_run(layout: Layout) -> bool:
        if layout.dp > job.data.global_batch_size or size not in (0, layout.micro_batch_size):
            return False
        return not job_faults(values | layout.values())

    return can_run


def legal_shapes(job: Job, max_ranks: int) -> Iterator[Layout]:
    """Yield each legal choice of degrees with 2 to ``max_ranks`` ranks, all options simplest."""
    can_run = legality(job)
    for tp, cp, pp, dp in product(range(1, max_ranks + 1), repeat=len(DEGREES)):
        shape = Layout(tp=tp, cp=cp, pp=pp, dp=dp, micro_batch_size=fixed_size(job) or 1)
        if 1 < shape.world_size <= max_ranks and can_run(shape):
            yield shape
