"""Output of `raymega plan` on ranks: their state and activations, one row for all that are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from raymega.cli.output import table
from raymega.cli.plan.host_memory import readable
from raymega.plan.grid import Coords
from raymega.plan.memory.state_bytes import StateSize, rank_state
from raymega.plan.run_plan import RunPlan

MOST_ROWS = 32
MOST_INTERVALS = 4
"""Most intervals of equal ranks that a row names."""
AXES = ("tp", "cp", "dp", "pp")
PARTS = {
    "weights": "weight", "gradients": "gradient", "masters": "master", "moments": "moment",
    "fixed": "fixed", "gathered": "passing",
}  # fmt: skip


def first_ranks(plan: RunPlan) -> dict[tuple[int, int], int]:
    """Return the first rank of each kind by its (pp, tp): others differ in cp, dp and ep, and hold as much."""
    grid = plan.grid
    kinds = ((pp, tp) for pp in range(grid.pp) for tp in range(grid.tp))
    return {(pp, tp): grid.rank(Coords(pp=pp, tp=tp, cp=0, dp=0)) for pp, tp in kinds}


def rank_sizes(plan: RunPlan) -> list[StateSize]:
    """Return the state of each rank."""

    # Ranks that differ in cp, dp and ep only hold parts of one size.
    @cache
    def size(rank: int, tp: int) -> StateSize:
        return rank_state(plan.job, plan.stages_of(rank), plan.grid, tp_rank=tp)

    first: dict[int, int] = {}
    sizes = []
    for rank in range(plan.grid.world_size):
        at = plan.grid.coords(rank)
        sizes.append(size(first.setdefault(at.pp, rank), at.tp))
    return sizes


def show_ranks(plan: RunPlan, activations: Sequence[int]) -> None:
    """Print a row for each set of equal ranks; ``activations`` are the peak bytes by pipeline rank."""
    # ranks by what a row shows of them
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, size in enumerate(rank_sizes(plan)):
        parts = (getattr(size, f"{part}_bytes") for part in PARTS.values())
        kept = activations[plan.grid.coords(rank).pp]
        in_all = readable(size.total_bytes), readable(kept)
        key = (size.num_parameters, size.num_owned, *parts, *in_all)
        groups.setdefault(key, []).append(rank)
    rows = [(*_who(plan, ranks), *cells) for cells, ranks in groups.items()]
    headers = (
        "ranks",
        "number",
        *AXES,
        "parameters",
        "owned",
        *PARTS,
        "total state",
        "activations",
    )
    print(f"\nranks; state in bytes; sharding {plan.job.parallel.sharding}")
    print(
        "activations kept for backward at the schedule's peak, by formula; recompute "
        f"{plan.job.memory.recompute}"
    )
    print(table(headers, rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        print(f"... and {len(rows) - MOST_ROWS:,} more rows; --json has all of them")


def _who(plan: RunPlan, ranks: Sequence[int]) -> tuple[object, ...]:
    """Return the cells that name equal ranks: numbers, how many, coordinates."""
    places = [plan.grid.coords(rank) for rank in ranks]
    axes = (intervals(getattr(at, axis) for at in places) for axis in AXES)
    return intervals(ranks), len(ranks), *axes


def intervals(numbers: Iterable[int]) -> str:
    """Return whole numbers as intervals, such as ``0-3, 8``; many are cut."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:MOST_INTERVALS]]
    return ", ".join([*shown, *(["..."] if len(found) > MOST_INTERVALS else [])])
