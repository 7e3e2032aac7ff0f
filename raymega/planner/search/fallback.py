"""Find the layout that a job falls back to when fewer workers are left than its grid needs.

Replicas are dropped first. No parameter then changes its place on the grid, and only the number of
micro-batches rises. When not even one replica is left, ``raymega.planner.search.selection`` chooses
a new grid. The global batch, and with it the samples of each step, are the same on every grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raymega.config.schema import Job
from raymega.errors import PlanError
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.run_plan import ON_GRID, RunPlan, make_plan
from raymega.plan.validation.unused_fields import settled
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.search.search import anywhere
from raymega.planner.search.selection import best_plan

MOST_SEARCHES = 8
"""Most numbers of workers that are searched, from the highest; each search takes up to some
seconds."""
SEARCH_DEVICE = CATALOGUE["h100"]
"""Accelerator whose speeds compare layouts where the job's device is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """Plan with which a run continues on ``least`` to ``most`` workers."""

    most: int
    least: int
    plan: RunPlan


def smaller_plan(
    job: Job,
    *,
    most: int,
    least: int = 1,
    device: Accelerator | None = None,
    fits: Callable[[Grid], bool] = anywhere,
) -> RunPlan | None:
    """Return the best plan of ``job`` for at most ``most`` workers, fewer than its grid has.

    Args:
        job: Job with the grid that it should have.
        most: Number of workers that are left.
        least: Least number of workers with which the run may continue.
        device: Accelerator of the workers. Without one, plans with fewer replicas skip the memory
            check, and new grids are searched for ``SEARCH_DEVICE``.
        fits: Function that returns whether the nodes that are left can hold a grid.

    Returns:
        A plan of at most ``most`` workers, or None when no legal layout has ``least`` to ``most``.
    """
    # First drop whole replicas.
    for plan in _fewer_replicas(job, most=most, device=device):
        if plan.grid.world_size < least:
            return None
        if fits(plan.grid):
            return plan
    # Then search for new grids, which cut a replica differently.
    for num_workers in range(most, max(least, most - MOST_SEARCHES + 1) - 1, -1):
        try:
            on_grid = job.with_values(cluster=ON_GRID)
            return best_plan(on_grid, num_workers, device or SEARCH_DEVICE, fits=fits)
        except PlanError:
            continue
    return None


def fallbacks(job: Job, *, device: Accelerator | None = None, limit: int) -> list[Fallback]:
    """Return the fallbacks of a job by number of workers from the highest, ``limit`` at most."""
    world_size = make_plan(job).grid.world_size
    least = 1 if job.elastic.min_workers == "grid" else job.elastic.min_workers
    found: list[Fallback] = []
    most = world_size - 1
    while most >= least and len(found) < limit:
        plan = smaller_plan(job, most=most, least=least, device=device)
        if plan is None:
            break
        found.append(Fallback(most=most, least=plan.grid.world_size, plan=plan))
        most = plan.grid.world_size - 1
    return found


def with_replicas(job: Job, dp: int) -> RunPlan | None:
    """Return the plan of ``job`` with ``dp`` replicas and no other change of its grid; None if it is illegal."""
    return _plan_or_none(_changed(job, dp=dp))


def _fewer_replicas(job: Job, *, most: int, device: Accelerator | None) -> Iterator[RunPlan]:
    """Yield plans of the same cut with fewer replicas, the largest first.

    Experts are spread over the ranks of several replicas. When these become too few, each rank gets
    more experts. Where replicas cannot be grouped for sharding as before, all of them share the
    state.
    """
    parallel = job.parallel
    replica = parallel.tp * parallel.cp * parallel.pp
    eps = [ep for ep in range(parallel.ep, 0, -1) if parallel.ep % ep == 0]
    groups = dict.fromkeys((parallel.data_parallel_shard_degree, "all"))
    for dp in range(min(parallel.dp - 1, most // replica), 0, -1):
        # Prefer the job's own ep and sharding group; the first legal plan wins.
        changed = (
            _changed(job, dp=dp, ep=ep, data_parallel_shard_degree=g) for ep in eps for g in groups
        )
        plans = map(_plan_or_none, changed)
        plan = next((plan for plan in plans if plan and _has_room(plan, device)), None)
        if plan is not None:
            yield plan


def _changed(job: Job, **parallel: int | str) -> Job:
    return settled(job.with_values(parallel=parallel, cluster=ON_GRID))


def _plan_or_none(job: Job) -> RunPlan | None:
    try:
        return make_plan(job)
    except PlanError:
        return None


def _has_room(plan: RunPlan, device: Accelerator | None) -> bool:
    if device is None:
        return True
    return memory_use(plan).total_bytes <= device.memory_bytes
