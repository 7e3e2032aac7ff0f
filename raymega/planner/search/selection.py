"""The layout for so many workers, and why: what ``parallel: auto`` and a re-planned run go by.

It asks the search and puts its answer into words; who asks, and when, is others' to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from raymega.config.schema import Job
from raymega.errors import Fault, PlanError
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.search.candidates import CHOSEN
from raymega.planner.search.search import RankedLayout, SearchResult, search

TOP = 8
"""Grids that are looked at where not every one can be had."""
NUM_WORKERS = "cluster.num_workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        job: The job on the layout; ``cluster.num_workers`` is as it was, or ``grid``.
        found: Its plan, with time and memory as predicted.
        overrides: What turned the job into it, as ``--set`` takes it.
        reasons: Sentences for people: what was tried, what would be next, what binds, what was
            held, how far to trust it.
    """

    job: Job
    found: RankedLayout
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def num_workers(self) -> int:
        """Those that the layout uses."""
        return self.found.plan.grid.world_size


def anywhere(_grid: Grid) -> bool:
    """Any grid can be had."""
    return True


def best_grid(
    job: Job,
    num_workers: int,
    device: Accelerator,
    *,
    fixed: Collection[str] = (),
    fits: Callable[[Grid], bool] = anywhere,
) -> Choice:
    """The layout of ``job`` with the shortest step on ``num_workers``.

    The same arguments give the same layout. What a run computes does not depend on it, so that any
    choice continues any run. What to do with fewer workers than a grid needs is fallback's.

    Args:
        job: Its model, batch and data stay.
        num_workers: Of ``device``, all of which are used.
        device: What a worker has.
        fixed: Dotted paths that stay as the job has them, of candidates.CHOSEN; all others of these
            are free.
        fits: Whether the nodes that there are can hold a grid.

    Raises:
        PlanError: No layout is legal and fits; the fault says what ruled out how many.
    """
    held = frozenset({*fixed, NUM_WORKERS})
    top = 2 if fits is anywhere else TOP
    result = search(
        _for_workers(job, num_workers), device, num_devices=num_workers, top=top, fixed=held
    )
    best = tuple(found for found in result.best if fits(found.plan.grid))
    if not best:
        raise PlanError(_nowhere(job, num_workers, len(result.best)))
    return Choice(
        job=best[0].plan.job,
        found=best[0],
        overrides=best[0].overrides(job),
        reasons=tuple(_reasons(replace(result, best=best), device, held)),
    )


def _for_workers(job: Job, num_workers: int) -> Job:
    """A job that names its workers by number is one for these."""
    if job.cluster.num_workers == "grid":
        return job
    return job.with_values(cluster={"num_workers": num_workers})


def _nowhere(job: Job, num_workers: int, tried: int) -> Fault:
    return Fault(
        fact=f"{num_workers} workers for {job.run.name}: none of the {tried} fastest grids",
        rule="the nodes that there are must hold a grid, tensor-parallel groups on one node each",
        remedy="use other nodes, or set parallel.is_tp_across_nodes_allowed",
    )


def _reasons(result: SearchResult, device: Accelerator, held: frozenset[str]) -> Iterator[str]:
    best, grid = result.best[0], result.best[0].plan.grid
    tried = 1 + sum(result.refused.values())
    yield (
        f"{describe(best)} on {grid.world_size} x {device.name}: the fastest of {tried:,} layouts, "
        f"{seconds(best.time.total_s)} a step expected, {best.tokens_per_s:,.0f} tokens/s a worker"
    )
    if len(result.best) > 1:
        second = result.best[1]
        slower = second.time.total_s / best.time.total_s - 1
        yield f"next: {describe(second)}, {slower:+.1%}"
    if result.missed is None:
        yield "memory does not bind: nothing that does not fit would be faster"
    else:
        gain = 1 - result.missed.time.total_s / best.time.total_s
        needs = result.missed.memory.total_bytes / 2**30
        yield (
            f"memory binds: {describe(result.missed)} would be {gain:.1%} faster and needs "
            f"{needs:.1f} GiB of {device.memory_bytes / 2**30:.1f}"
        )
    for reason, count in result.refused.most_common():
        yield f"{count:,} others: {reason}"
    stated = sorted(held.intersection(CHOSEN))
    if stated:
        yield f"held as the job has it: {', '.join(stated)}"
    yield expected_error(device)


def describe(found: RankedLayout) -> str:
    """The grid and what else was chosen, in one line."""
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
    """With the unit that leaves three digits before or behind the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value * 1e6:.3g} us"
