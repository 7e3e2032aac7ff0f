"""Check the rules of evaluation tasks during a run, as far as the job file alone decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from raymega.config.schema import EvalTask
from raymega.errors import Fault
from raymega.plan.validation.rule import reads


@reads("run.eval_tasks eval_tasks_every, data.seq_len")
def task_faults(tasks: Sequence[EvalTask], every: int, seq_len: int) -> Iterator[Fault]:
    """Check that each task has a name of its own and windows that fit, and that there is one to evaluate."""
    for title, times in Counter(entry.title for entry in tasks).items():
        if times > 1:
            yield Fault(
                fact=f"run.eval_tasks has {title} {times} times",
                rule="metrics are reported by the name of the task",
                remedy="give each entry a name of its own",
            )
    for number, entry in enumerate(tasks):
        if entry.stride > seq_len:
            yield Fault(
                fact=f"run.eval_tasks[{number}].stride={entry.stride}",
                rule=f"a window has data.seq_len={seq_len} tokens, and moves on by at most as many",
                remedy=f"use {seq_len} or less",
            )
    if every and not tasks:
        yield Fault(
            fact=f"run.eval_tasks_every={every} and run.eval_tasks=[]",
            rule="there is no task to evaluate",
            remedy="set run.eval_tasks=[{task: lambada, path: FILE}], or leave run.eval_tasks_every out",
        )


@reads("run.eval_tasks eval_tasks_every eval_tasks_on, checkpoint.every, parallel.dynamic_cp")
def task_place_faults(
    tasks: Sequence[EvalTask], every: int, on: str, checkpoint_every: int, is_dynamic: bool
) -> Iterator[Fault]:
    """Check that the workers of run.eval_tasks_on can evaluate: their checkpoints, their rows."""
    if not tasks:
        return
    if on == "beside" and every and (not checkpoint_every or every % checkpoint_every):
        yield Fault(
            fact=f"run.eval_tasks_on=beside with run.eval_tasks_every={every}",
            rule="workers beside the run load checkpoints, so each evaluated step must be saved; "
            f"checkpoint.every={checkpoint_every}",
            remedy=f"set checkpoint.every={every} or a divisor of it, or run.eval_tasks_on=grid",
        )
    if on == "grid" and is_dynamic:
        yield Fault(
            fact="run.eval_tasks_on=grid with parallel.dynamic_cp=true",
            rule="dynamic context parallelism places training documents only",
            remedy="set run.eval_tasks_on=beside",
        )
