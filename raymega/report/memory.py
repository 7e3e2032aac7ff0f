"""Memory of a run's ranks: what the plan predicted, and what the ranks measured."""

from __future__ import annotations

import json
from collections.abc import Mapping

from raymega.config.schema import Job
from raymega.drawing.bars import Bars, draw_bars
from raymega.drawing.page import charts, folded, note, table
from raymega.errors import RaymegaError, counted
from raymega.plan.run_plan import ON_GRID, RunPlan, make_plan
from raymega.planner.html_report import FILLS, memory_parts
from raymega.tracking.history import RunHistory

GIB, MIB = 2**30, 2**20
MOST_RANKS = 256
"""Most rows of the table of ranks."""
ON_CPU = (
    "On CPUs the measured figure is the resident size of the whole process, with Python, torch and what "
    "other attempts left behind; the plan counts tensors only."
)
ON_GPU = (
    "Measured is the peak of torch's allocator; the plan has also what the device reserves, which "
    "the allocator does not see."
)


def job_of(history: RunHistory) -> Job | None:
    """Return the job of the newest driver; None where this version cannot read it."""
    try:
        return Job.model_validate_json(json.dumps(history.run["job"]))
    except (KeyError, ValueError):
        return None


def plan_of(job: Job | None, grid: Mapping[str, int]) -> RunPlan | None:
    """Return the plan of the newest attempt, whose grid may be smaller than the job's."""
    if job is None:
        return None
    try:
        return make_plan(job.with_values(parallel=grid, cluster=ON_GRID) if grid else job)
    except RaymegaError:
        return None


def memory_section(history: RunHistory, plan: RunPlan | None) -> str:
    """Return bars of planned and measured memory by pipeline rank, and a table of all ranks."""
    measured = {
        rank: metrics["peak_bytes"]
        for rank, metrics in sorted(history.memory.items())
        if metrics.get("peak_bytes")
    }
    # small runs in MiB
    unit, size = ("GiB", GIB) if max(measured.values(), default=0) >= GIB else ("MiB", MIB)
    peaks = {rank: peak / size for rank, peak in measured.items()}
    if plan is None:
        rows = [(rank, f"{peak:.2f}") for rank, peak in peaks.items()]
        return table(("rank", f"measured {unit}"), rows) if rows else note("Nothing was measured.")
    planned = _planned(plan, GIB / size)
    by_stage: dict[str, list[float]] = {}
    for rank, peak in peaks.items():
        if rank < plan.grid.world_size:
            by_stage.setdefault(f"pp {plan.grid.coords(rank).pp}", []).append(peak)
    picture = draw_bars(
        Bars(
            title=f"{unit} by pipeline rank, planned and measured",
            unit=unit,
            rows=planned,
            fills=FILLS,
            marks={label: (min(found), max(found)) for label, found in by_stage.items()},
        )
    )
    details = (
        folded(f"each of {counted(len(peaks), 'rank')}", _ranks(plan, peaks, planned, unit))
        if peaks
        else ""
    )
    said = ON_CPU if plan.job.cluster.device == "cpu" else ON_GPU
    return "".join((charts([picture]), note(said), details))


def _planned(plan: RunPlan, scale: float) -> dict[str, dict[str, float]]:
    """Return the planned parts of each pipeline rank; on CPUs no device reserves anything."""
    is_cpu = plan.job.cluster.device == "cpu"
    return {
        f"pp {rank}": {
            name: size * scale
            for name, size in parts.items()
            if not (is_cpu and name == "reserved")
        }
        for rank, parts in enumerate(memory_parts(plan))
    }


def _ranks(
    plan: RunPlan, peaks: Mapping[int, float], planned: Mapping[str, Mapping[str, float]], unit: str
) -> str:
    rows = []
    for rank, peak in [*peaks.items()][:MOST_RANKS]:
        at = plan.grid.coords(rank % plan.grid.world_size)
        whole = sum(planned[f"pp {at.pp}"].values())
        rows.append((rank, at.tp, at.cp, at.pp, at.dp, f"{whole:.2f}", f"{peak:.2f}"))
    headers = ("rank", "tp", "cp", "pp", "dp", f"planned {unit}", f"measured {unit}")
    return table(headers, rows)
