"""Output of `raymega plan` on evaluation tasks: what one evaluation reads, and the time that it takes."""

from __future__ import annotations

from raymega.errors import counted
from raymega.evaluate.cost import look_at_tasks
from raymega.evaluate.plan import plan_beside
from raymega.evaluate.training_tasks import TrainingTasks
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.evaluation_time import evaluation_s
from raymega.planner.cost.simulated_step import played_step


def tasks_object(plan: RunPlan, device: Accelerator | None) -> dict[str, object]:
    """Return the cost of run.eval_tasks as a JSON object."""
    tasks, why = look_at_tasks(plan.job)
    return {"eval_tasks": _costs(plan, tasks, device) if tasks else {"unknown": why}}


def show_tasks(plan: RunPlan, device: Accelerator | None) -> None:
    """Print the cost of run.eval_tasks."""
    run = plan.job.run
    names = ", ".join(entry.title for entry in run.eval_tasks)
    when = (
        f"every {counted(run.eval_tasks_every, 'step')} and at the end"
        if run.eval_tasks_every
        else "at the end"
    )
    tasks, why = look_at_tasks(plan.job)
    print(f"\nevaluation tasks {when}: {names}")
    if tasks is None:
        print(f"what they read is not known here ({why})")
        return
    costs = _costs(plan, tasks, device)
    grid = _plan_of(plan).grid
    print(
        f"one evaluation reads {counted(int(costs['tokens']), 'token')} in {counted(int(costs['rows']), 'row')} of "
        f"{plan.job.data.seq_len:,}, on {_place(plan)} (grid {grid.describe()})"
    )
    if "seconds" in costs:
        share = f"; {costs['share']:.2%} of training time" if "share" in costs else ""
        print(f"predicted: {costs['seconds']:.3g} s an evaluation{share}")


def _costs(
    plan: RunPlan, tasks: TrainingTasks, device: Accelerator | None
) -> dict[str, int | float]:
    used = _plan_of(plan)
    costs: dict[str, int | float] = {"tokens": tasks.num_tokens, "rows": tasks.num_rows(used)}
    if device is None:
        return costs
    seconds = costs["seconds"] = evaluation_s(used, tasks.num_rows(used), device)
    every = plan.job.run.eval_tasks_every
    if every and plan.job.run.eval_tasks_on == "grid":
        steps_s = every * played_step(plan, device).total_s
        costs["share"] = seconds / (seconds + steps_s)
    return costs


def _plan_of(plan: RunPlan) -> RunPlan:
    return plan if plan.job.run.eval_tasks_on == "grid" else plan_beside(plan.job)


def _place(plan: RunPlan) -> str:
    if plan.job.run.eval_tasks_on == "grid":
        return "the ranks that train, which wait for it"
    return "workers beside the run, which does not wait"
