"""Legality of layouts: a job's own layout, the job on another layout, and which of these are legal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from raymega.config.schema import Job
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import fault_counter as rule_counter
from raymega.schedule.table import SCHEDULES
from raymega.verify.layout import DEGREES, OPTIONS, PATHS, Layout
from raymega.verify.tasks import GRIDS, legal_grids

BY_HAND = ("stages", "first_stage_layers", "last_stage_layers")
"""Options that place layers by hand."""
RANKS_ONLY = ("order", "chunks", "eval_tasks_on")
"""Options that change nothing of what one rank computes."""
PARTS = tuple(path for path in PATHS.values() if path.count(".") > 1)
"""Paths of options that are no fields of a section but of a part of it."""
MOST_CHANGES = 3
"""Largest number of options that are changed so that a layout with a wanted value is legal."""


def layout_of(job: Job) -> Layout:
    """Return the layout that the job asks for; ``run.kernels: auto`` is what it is on CPUs."""
    values: dict[str, Any] = dict(job_values(job))
    if values[PATHS["kernels"]] == "auto":
        values[PATHS["kernels"]] = "eager"
    return Layout(**{name: _value_at(values, path) for name, path in PATHS.items()})


def _value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path`` of :func:`job_values`, which has parts of sections whole."""
    field, part = _field_and_part(path)
    return getattr(values[field], part) if part else values[path]


def _field_and_part(path: str) -> tuple[str, str]:
    """Cut ``model.vision.tensor_parallel`` behind its field; the second is empty where ``path`` is a field."""
    section, field, *part = path.split(".")
    return f"{section}.{field}", ".".join(part)


def values_on(job: Job, layout: Layout) -> dict[str, Any]:
    """Return :func:`job_values` of the job on ``layout``, as far as the layout says."""
    return _changes(job_values(job))(layout)


def _changes(values: Mapping[str, Any]) -> Callable[[Layout], dict[str, Any]]:
    """Return the function of a layout to its values by field, given the job's own ``values``."""

    @cache
    def changed(field: str, part: str, value: Any) -> Any:
        return values[field].model_copy(update={part: value})

    def changes(layout: Layout) -> dict[str, Any]:
        found = layout.values()
        for path in PARTS:
            field, part = _field_and_part(path)
            found[field] = changed(field, part, found.pop(path))
        return found

    return changes


def own_layout(job: Job, small: Job) -> Layout:
    """Return the layout that ``job`` asks for, as ``small``, which was made from it, can have it.

    The micro-batch is the small one's. With dynamic context parallelism only workers beside the run evaluate tasks.
    """
    own, grids = layout_of(job), legal_grids(small)
    has_grid = own.eval_tasks_on == "beside" and own.eval_tasks_grid in grids
    is_beside = bool(grids) and (own.dynamic_cp or own.eval_tasks_on == "beside")
    return replace(
        own,
        micro_batch_size=small.schedule.micro_batch_size,
        eval_tasks_on="beside" if is_beside else "grid",
        eval_tasks_grid=own.eval_tasks_grid if has_grid else GRIDS[0],
    )


def reference_layout(job: Job) -> Layout:
    """Return the layout of one rank that takes the whole batch at once: no sharding, no accumulation.

    Where routing or fp8 scales depend on the tokens of a micro-batch, the job's micro-batch size is kept.
    """
    return Layout(micro_batch_size=fixed_size(job) or job.data.global_batch_size)


def layouts_of_one_rank(job: Job) -> tuple[Layout, ...]:
    """Return the reference layout, and it with each option that one rank can have, and with micro-batches of one.

    On another device than the reference's they show what that device computes, without messages.
    """
    whole = reference_layout(job)
    found = [whole, replace(whole, micro_batch_size=fixed_size(job) or 1)]
    for option in (each for each in OPTIONS if each.name not in RANKS_ONLY):
        # an option of an option is drawn with each value that it belongs to
        for start in [each for each in found if option.matters(each)]:
            if start == whole or option.name.startswith("recompute_"):
                found += [start.with_value(option.name, value) for value in option.values[1:]]
    legal = legality(job)
    return tuple(each for each in dict.fromkeys(found) if legal(each))


def fixed_size(job: Job) -> int:
    """Return the micro-batch size if another one would change the run's numbers, else 0."""
    return job.schedule.micro_batch_size if depends_on_micro_batch_size(job) else 0


def with_layout(job: Job, layout: Layout) -> Job:
    """Return the job with ``layout``, which :func:`is_legal` may refuse."""
    values = job.model_dump()
    for path, value in layout.values().items():
        *sections, field = path.split(".")
        part = values
        for section in sections:
            part = part[section]
        part[field] = value
    return Job.model_validate(values)


def is_legal(job: Job, layout: Layout) -> bool:
    """Return whether the job can run on ``layout``, with a sample for every data-parallel rank."""
    return legality(job)(layout)


def legality(job: Job) -> Callable[[Layout], bool]:
    """Return :func:`is_legal` as a function of the layout, fast for many layouts of one job."""
    count = fault_counter(job)
    return lambda layout: count(layout) == 0


def fault_counter(job: Job) -> Callable[[Layout], int]:
    """Return a function of a layout to the number of rules that the job breaks on it."""
    size, beside = fixed_size(job), legal_grids(job)
    values = job_values(job)
    changes = _changes(values)
    broken_rules = rule_counter(values, {_field_and_part(path)[0] for path in PATHS.values()})

    def count(layout: Layout) -> int:
        own = (layout.dp > job.data.global_batch_size) + (size not in (0, layout.micro_batch_size))
        own += layout.eval_tasks_on == "beside" and layout.eval_tasks_grid not in beside
        return own + broken_rules(changes(layout))

    return count


def legal_shapes(job: Job, max_ranks: int) -> Iterator[Layout]:
    """Yield each legal choice of degrees with 2 to ``max_ranks`` ranks.

    All options are the simplest, except those that the job needs on these degrees, such as
    ``cp_method=all_to_all`` where attention weights are dropped.
    """
    count = fault_counter(job)
    for tp, cp, pp, dp in product(range(1, max_ranks + 1), repeat=len(DEGREES)):
        shape = Layout(tp=tp, cp=cp, pp=pp, dp=dp, micro_batch_size=fixed_size(job) or 1)
        if not 1 < shape.world_size <= max_ranks:
            continue
        # stages by hand could hold any number of them, with nothing inside
        legal = shape if not count(shape) else mend(job, shape, count, keep=BY_HAND, most=1)
        if legal is not None:
            yield legal


def mend(
    job: Job,
    layout: Layout,
    count: Callable[[Layout], int],
    *,
    keep: Collection[str] = (),
    most: int = MOST_CHANGES,
) -> Layout | None:
    """Return a legal layout with at most ``most`` other options than ``layout``; None if none is found.

    Each change is the one that leaves the fewest broken rules. Options named in ``keep`` are not changed.
    """
    for _ in range(most):
        faults = count(layout)
        if not faults:
            return layout
        candidates = list(_changed(job, layout, keep))
        layout = min(candidates, key=count, default=layout)
        if count(layout) >= faults:
            return None
    return layout if not count(layout) else None


def _changed(job: Job, layout: Layout, keep: Collection[str]) -> Iterator[Layout]:
    """Yield the layout with one other option value, except rank orders, which no rule asks for."""
    for option in OPTIONS:
        if option.name == "order" or option.name in keep:
            continue
        for value in (*option.values, *option.others(job, layout)):
            if value == layout.value(option):
                continue
            # not with_value: it would reset what only matters after a further change
            change = {option.name: value}
            if option.name == "schedule":
                kind = SCHEDULES[value]
                change["chunks"] = min(max(layout.chunks, kind.least_chunks), kind.most_chunks)
            yield replace(layout, **change)
