"""Choose the layout for a number of workers, and explain the choice.

``parallel: auto`` and a replan on other workers use it. The module runs the search and puts its
result into words; callers decide when to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from raymega.config.schema import Job
from raymega.errors import Fault, PlanError, counted
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.search.candidates import CHOSEN
from raymega.planner.search.search import (
    MEMORY_MARGIN,
    RankedLayout,
    SearchResult,
    anywhere,
    fastest,
    search,
)

TOP = 8
"""Number of grids that are considered where the nodes may be unable to hold some."""
NUM_WORKERS = "cluster.num_workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Chosen layout, and the reasons for it.

    Attributes:
        job: Job on the layout; ``cluster.num_workers`` is the number of workers, or ``grid`` where
            the job has ``grid``.
        found: Ranked layout, with its plan and the predicted time and memory.
        overrides: Values that turned the job into the layout, as ``--set`` takes them.
        reasons: Sentences for people: what was tried, the next best layout, whether memory binds,
            what was held, and how far to trust the prediction.
    """

    job: Job
    found: RankedLayout
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def num_workers(self) -> int:
        """Number of workers that the layout uses."""
        return self.found.plan.grid.world_size


def best_grid(
    job: Job,
    num_workers: int,
    device: Accelerator,
    *,
    fixed: Collection[str] = (),
    fits: Callable[[Grid], bool] = anywhere,
) -> Choice:
    """Return the layout of ``job`` with the shortest step on ``num_workers``.

    The same arguments give the same layout. What a run computes does not depend on the layout, so
    any choice continues any run. ``raymega.planner.search.fallback`` handles fewer workers than a
    grid needs.

    Args:
        job: Job to lay out; its model, batch and data stay.
        num_workers: Number of workers, all of which are used.
        device: Accelerator of each worker.
        fixed: Dotted paths of fields that keep the job's values; all others that a search sets are
            free.
        fits: Function that returns whether the available nodes can hold a grid.

    Raises:
        PlanError: No layout is legal and fits; the fault counts the layouts that each reason ruled
            out.
    """
    held = frozenset({*fixed, NUM_WORKERS})
    result = search(
        _for_workers(job, num_workers), device, num_devices=num_workers, top=_top(fits), fixed=held
    )
    best = tuple(found for found in result.best if fits(found.plan.grid))
    if not best:
        raise PlanError(_no_nodes(len(result.best), job, num_workers))
    return Choice(
        job=best[0].plan.job,
        found=best[0],
        overrides=best[0].overrides(job),
        reasons=tuple(_reasons(replace(result, best=best), device, held)),
    )


def best_plan(
    job: Job, num_workers: int, device: Accelerator, *, fits: Callable[[Grid], bool] = anywhere
) -> RunPlan:
    """Return the plan of what :func:`best_grid` chooses, which needs no reasons and takes less time.

    Raises:
        PlanError: As there.
    """
    best = fastest(
        _for_workers(job, num_workers),
        device,
        num_devices=num_workers,
        top=_top(fits),
        fixed=frozenset({NUM_WORKERS}),
        fits=fits,
    )
    if best is None:
        raise PlanError(_no_nodes(_top(fits), job, num_workers))
    return best.plan


def _top(fits: Callable[[Grid], bool]) -> int:
    """Return the number of grids to find: the best and the next one, or more where nodes may not hold some."""
    return 2 if fits is anywhere else TOP


def _no_nodes(count: int, job: Job, num_workers: int) -> Fault:
    return Fault(
        fact=f"{counted(num_workers, 'worker')} for {job.run.name}: none of the {count} fastest grids",
        rule="the nodes that there are must hold a grid, tensor-parallel groups on one node each",
        remedy="use other nodes, or set parallel.is_tp_across_nodes_allowed",
    )


def _for_workers(job: Job, num_workers: int) -> Job:
    """Return the job for this number of workers, unless it takes the number from its grid."""
    if job.cluster.num_workers == "grid":
        return job
    return job.with_values(cluster={"num_workers": num_workers})


def _reasons(result: SearchResult, device: Accelerator, held: frozenset[str]) -> Iterator[str]:
    best, grid = result.best[0], result.best[0].plan.grid
    # The chosen layout, and the next one.
    tried = 1 + sum(result.refused.values())
    yield (
        f"{describe(best)} on {grid.world_size} x {device.name}: the fastest of {counted(tried, 'layout')}, "
        f"{seconds(best.time.total_s)} a step expected, {best.tokens_per_s:,.0f} tokens/s a worker"
    )
    if len(result.best) > 1:
        second = result.best[1]
        slower = second.time.total_s / best.time.total_s - 1
        yield f"next: {describe(second)}, {slower:+.1%}"
    # Whether memory binds.
    if result.missed is None:
        yield "memory does not bind: nothing that does not fit would be faster"
    else:
        gain = 1 - result.missed.time.total_s / best.time.total_s
        needs = result.missed.memory.total_bytes / 2**30
        yield (
            f"memory binds: {describe(result.missed)} would be {gain:.1%} faster and needs "
            f"{needs:.1f} GiB of {device.memory_bytes / 2**30:.1f}, of which {MEMORY_MARGIN:.0%} stay free"
        )
    # What was ruled out, and what was held.
    for reason, count in result.refused.most_common():
        yield f"{counted(count, 'other')}: {reason}"
    stated = sorted(held.intersection(CHOSEN))
    if stated:
        yield f"held as the job has it: {', '.join(stated)}"
    yield expected_error(device, best.plan.job)


def describe(found: RankedLayout) -> str:
    """Return the grid and the other chosen values in one line."""
    job = found.plan.job
    parts = [found.plan.grid.describe(), job.schedule.name]
    if found.plan.placement.chunks > 1:
        parts.append(f"{found.plan.placement.chunks} chunks")
    parts += [
        f"micro-batch {job.schedule.micro_batch_size}", f"recompute {job.memory.recompute}",
        f"sharding {job.parallel.sharding}",
    ]  # fmt: skip
    return ", ".join(parts)


def seconds(value: float) -> str:
    """Return a time in s or ms with three decimals, or in us with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value * 1e6:.3g} us"
