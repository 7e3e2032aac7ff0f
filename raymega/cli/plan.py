"""`raymega plan`: shows what a job will do, without starting anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raymega import api
from raymega.plan.run_plan import RunPlan
from raymega.plan.state_size import StateSize, count_parameters, rank_state
from raymega.schedule.instructions import Schedule
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import make_schedule
from raymega.schedule.text import timetable

MAX_ROWS = 32
GIB = 2**30


def plan(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: --set parallel.tp=2")
    ] = None,
    grid: Annotated[str, typer.Option(help="Degrees to plan with: --grid tp=2,pp=2")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show grid, stages, batch, schedule, parameters and state bytes of a job.

    Example: raymega plan jobs/verify.yaml --grid tp=2,pp=2
    """
    degrees = [f"parallel.{pair.strip()}" for pair in grid.split(",") if pair]
    job = api.load_job(job_file, [*(overrides or ()), *degrees])
    show_plan(api.plan(job), as_json=as_json)


def show_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Print a plan for people, or as one JSON object."""
    if as_json:
        print(json.dumps(_plan_object(plan)))
        return
    console = Console(highlight=False)
    _show_summary(console, plan)
    _show_stages(console, plan)
    _show_ranks(console, plan)
    _show_schedule(console, plan)


def _sizes(plan: RunPlan) -> list[StateSize]:
    job, grid = plan.job, plan.grid
    return [
        rank_state(
            job.model,
            plan.stage_of(rank),
            grid,
            tp_rank=grid.coords(rank).tp,
            dtype=job.precision.dtype,
        )
        for rank in range(grid.world_size)
    ]


def _bubble(plan: RunPlan) -> float:
    return simulate(_schedules(plan), Durations(forward=1.0, backward=2.0)).bubble


def _schedules(plan: RunPlan) -> tuple[Schedule, ...]:
    return make_schedule(
        plan.job.schedule.name, pp=plan.grid.pp, num_micro_batches=plan.batch.num_micro_batches
    )


def _plan_object(plan: RunPlan) -> dict[str, object]:
    job, grid = plan.job, plan.grid
    return {
        "run": job.run.name,
        "grid": {axis: grid.degree(axis) for axis in ("tp", "pp", "dp", "cp", "ep", "etp")},
        "world_size": grid.world_size,
        "num_parameters": count_parameters(job.model),
        "batch": asdict(plan.batch),
        "stages": [asdict(stage) for stage in plan.stages],
        "schedule": job.schedule.name,
        "bubble": _bubble(plan),
        "ranks": [
            {"rank": rank, **asdict(grid.coords(rank)), **asdict(size), "total": size.total_bytes}
            for rank, size in enumerate(_sizes(plan))
        ],
    }


def _show_summary(console: Console, plan: RunPlan) -> None:
    job, batch = plan.job, plan.batch
    console.print(
        f"run {job.run.name}: {job.model.family}, {count_parameters(job.model):,} parameters, "
        f"{job.precision.dtype}, {job.run.steps} steps"
    )
    tail = f", {batch.num_masked} masked slots" if batch.num_masked else ""
    console.print(
        f"grid {plan.grid.describe()}: {plan.grid.world_size} workers; order {plan.grid.order}"
    )
    console.print(
        f"batch: {batch.global_batch_size} sequences of {job.data.seq_len} tokens a step = "
        f"{batch.num_micro_batches} micro-batches of {batch.micro_batch_size} on each of "
        f"{batch.dp} data-parallel ranks{tail}"
    )


def _show_stages(console: Console, plan: RunPlan) -> None:
    table = Table("stage", "layers", "also", title="stages", title_justify="left")
    for stage in plan.stages:
        also = [
            name
            for name, has in (("embedding", stage.is_first), ("head, loss", stage.is_last))
            if has
        ]
        layers = f"{stage.first_layer}-{stage.first_layer + stage.num_layers - 1}"
        table.add_row(str(stage.index), layers, ", ".join(also))
    console.print(table)


def _show_ranks(console: Console, plan: RunPlan) -> None:
    table = Table(title="ranks and their state (activations not counted)", title_justify="left")
    for column in (
        "rank",
        "tp",
        "dp",
        "pp",
        "parameters",
        "weights",
        "gradients",
        "masters",
        "Adam",
        "GiB",
    ):
        table.add_column(column, justify="right")
    for rank, size in enumerate(_sizes(plan)[:MAX_ROWS]):
        at = plan.grid.coords(rank)
        parts = (size.weight_bytes, size.gradient_bytes, size.master_bytes, size.moment_bytes)
        numbers = [f"{size.num_parameters:,}", *(f"{part:,}" for part in parts)]
        row = [str(rank), str(at.tp), str(at.dp), str(at.pp), *numbers]
        table.add_row(*row, f"{size.total_bytes / GIB:.4f}")
    console.print(table)
    if plan.grid.world_size > MAX_ROWS:
        console.print(f"... and {plan.grid.world_size - MAX_ROWS} more; --json lists all")


def _show_schedule(console: Console, plan: RunPlan) -> None:
    console.print(
        f"schedule {plan.job.schedule.name}: bubble {_bubble(plan):.3f} of ideal time "
        "(forward 1, backward 2, transfers 0)"
    )
    console.print(timetable(_schedules(plan)), soft_wrap=True)
