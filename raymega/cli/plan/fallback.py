"""What `raymega plan` says of the grids that a run goes on with when workers are lost; no logic of its own."""

from __future__ import annotations

from raymega.cli.tables import table
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.search.fallback import Fallback, fallbacks

MOST_ROWS = 4


def fallback_objects(plan: RunPlan, device: Accelerator | None) -> list[dict[str, object]]:
    """Plain values, from the highest number of workers."""
    return [
        {
            "most_workers": each.most,
            "least_workers": each.least,
            "grid": each.plan.grid.degrees(),
            "num_micro_batches": each.plan.batch.num_micro_batches,
        }
        for each in _found(plan, device)
    ]


def show_fallbacks(plan: RunPlan, device: Accelerator | None) -> None:
    """A row for each grid; nothing for a single worker."""
    section, world_size = plan.job.elastic, plan.grid.world_size
    if world_size == 1:
        return
    if section.min_workers == "grid":
        print("\nwhen workers are lost: wait for the whole grid (elastic.min_workers=grid)")
        return
    print(
        f"\nwhen workers are lost and not replaced within {section.replan_after_s:g} s, the run goes on "
        "with the same batch"
    )
    rows = [_row(each) for each in _found(plan, device)]
    print(table(("workers left", "grid", "uses", "micro-batches"), rows) if rows else "on no grid")


def _found(plan: RunPlan, device: Accelerator | None) -> list[Fallback]:
    if plan.job.elastic.min_workers == "grid":
        return []
    return fallbacks(plan.job, device=device, limit=MOST_ROWS)


def _row(each: Fallback) -> tuple[object, ...]:
    left = f"{each.most:,}" if each.most == each.least else f"{each.most:,} to {each.least:,}"
    grid = each.plan.grid
    return left, grid.describe(), grid.world_size, each.plan.batch.num_micro_batches
