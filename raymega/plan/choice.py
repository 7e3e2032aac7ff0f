"""The layout for so many workers, and why: what ``parallel: auto`` and a re-planned run go by.

It asks the search and puts its answer into words; who asks, and when, is others' to decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from raymega.config.schema import Job
from raymega.errors import PlanError
from raymega.plan.accelerators import Accelerator
from raymega.plan.candidates import CHOSEN
from raymega.plan.expected_error import expected_error
from raymega.plan.search import Found, SearchResult, search

MOST_SIZES = 8
"""Numbers of workers that are tried before the rest is given up."""
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
    found: Found
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def num_workers(self) -> int:
        """Those that the layout uses."""
        return self.found.plan.grid.world_size


def best_grid(
    job: Job,
    num_workers: int,
    device: Accelerator,
    *,
    fixed: Collection[str] = (),
    is_exact: bool = True,
) -> Choice:
    """The layout of ``job`` with the shortest step on ``num_workers``.

    The same arguments give the same layout. What a run computes does not depend on it, so that any
    choice continues any run.

    Args:
        job: Its model, batch and data stay.
        num_workers: Of ``device``.
        device: What a worker has.
        fixed: Dotted paths that stay as the job has them, of candidates.CHOSEN; all others of these
            are free.
        is_exact: Use all workers; else at most so many, where fewer are faster or alone legal.

    Raises:
        PlanError: No layout is legal and fits; the fault says what ruled out how many.
    """
    held = frozenset({*fixed, NUM_WORKERS} if is_exact else fixed)
    base = _for_workers(job, num_workers if is_exact else "grid")
    sizes = [num_workers] if is_exact else list(_sizes(job, num_workers, held))
    results: dict[int, SearchResult] = {}
    refusal: PlanError | None = None
    for size in sizes:
        try:
            results[size] = search(base, device, num_devices=size, top=2, fixed=held)
        except PlanError as error:
            refusal = refusal or error
    if not results:
        assert refusal is not None, "every size is found or refused"
        raise refusal
    size = min(results, key=lambda size: results[size].best[0].time.total_s)
    found = results[size].best[0]
    return Choice(
        job=found.plan.job,
        found=found,
        overrides=found.overrides(job),
        reasons=tuple(_reasons(results[size], device, held, num_workers=num_workers)),
    )


def _for_workers(job: Job, num_workers: int | Literal["grid"]) -> Job:
    """A job that names its workers by number is one for these."""
    if job.cluster.num_workers == "grid":
        return job
    cluster = job.cluster.model_copy(update={"num_workers": num_workers})
    return job.model_copy(update={"cluster": cluster})


def _sizes(job: Job, num_workers: int, held: frozenset[str]) -> Iterator[int]:
    """Numbers of workers from all downwards to half, those that the held degrees divide."""
    unit = 1
    for axis in ("tp", "cp", "pp"):
        if f"parallel.{axis}" in held:
            unit *= getattr(job.parallel, axis)
    largest = num_workers - num_workers % unit
    least = max(unit, num_workers // 2)
    yield from (
        range(largest, least - 1, -unit)
        if largest // unit <= MOST_SIZES
        # Of many, those that have many factors: a prime number of workers has few layouts.
        else (sorted(range(least, largest + 1, unit), key=_roundness, reverse=True)[:MOST_SIZES])
    )


def _roundness(number: int) -> tuple[int, int]:
    """How often 2 divides it, and the number itself."""
    return min(6, (number & -number).bit_length()), number


def _reasons(
    result: SearchResult, device: Accelerator, held: frozenset[str], *, num_workers: int
) -> Iterator[str]:
    best, grid = result.best[0], result.best[0].plan.grid
    tried = 1 + sum(result.refused.values())
    yield (
        f"{describe(best)} on {grid.world_size} x {device.name}: the fastest of {tried:,} layouts, "
        f"{seconds(best.time.total_s)} a step expected, {best.tokens_per_s:,.0f} tokens/s a worker"
    )
    if grid.world_size < num_workers:
        yield f"{num_workers - grid.world_size} of {num_workers} workers stay idle: with them no step is shorter"
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


def describe(found: Found) -> str:
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
