"""Cost of a run's evaluation tasks before it starts: what they read, and how long the ranks that train wait."""

from __future__ import annotations

from functools import lru_cache

from raymega.config.schema import Job
from raymega.errors import RaymegaError
from raymega.evaluate.training_tasks import TrainingTasks, open_tasks
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.evaluation_time import evaluation_s


def waiting_s(plan: RunPlan, device: Accelerator) -> float:
    """Return the predicted seconds of one evaluation for which the ranks that train wait.

    It is 0 for workers beside the run, and where what an evaluation reads is not known here.
    """
    if plan.job.run.eval_tasks_on != "grid":
        return 0.0
    tasks, _ = look_at_tasks(plan.job)
    return evaluation_s(plan, tasks.num_rows(plan), device) if tasks else 0.0


@lru_cache(maxsize=1)
def look_at_tasks(job: Job) -> tuple[TrainingTasks | None, str]:
    """Return the evaluation tasks of a run, or why they are unknown here."""
    try:
        return open_tasks(job), ""
    except RaymegaError as error:
        return None, str(error.faults[0])
