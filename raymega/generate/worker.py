"""Entry module of the workers of `raymega generate --grid`: loads a checkpoint's weights and continues prompts.

Rank 0 reports the answers. The driver names this module by a string, so it never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.evaluate.worker import run_in_world
from raymega.generate.answers import Task, unpack_task
from raymega.messages import Channel, EntryOutput, Progress, StartWorker, WorkerFinished
from raymega.parallel.comm.process_groups import Groups
from raymega.plan.run_plan import RunPlan
from raymega.train.build_scorer import Scorer, build_scorer, load_weights
from raymega.train.entry import ProgressReporter, abort, host_rendezvous, warm_up
from raymega.train.sampling import TokenGenerator

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Continue the prompts of ``start.entry_input`` with the weights of the checkpoint ``start.restore``."""
    run_in_world(_generate, start, channel, rendezvous)


def _generate(
    plan: RunPlan, start: StartWorker, channel: Channel, groups: Groups, device: torch.device
) -> None:
    progress = ProgressReporter(channel, start.rank)
    scorer = build_scorer(plan, rank=start.rank, groups=groups, device=device, progress=progress)
    load_weights(scorer, open_checkpoint(start.restore), groups, progress=progress)

    def report(count: int) -> None:
        channel.report(Progress(rank=start.rank, step=count))

    answers = continue_prompts(
        plan, scorer, groups, unpack_task(start.entry_input), device=device, on_token=report
    )
    if start.rank == 0:
        channel.report(EntryOutput(rank=0, data=json.dumps(answers).encode()))
    channel.report(WorkerFinished(rank=start.rank, step=0, stopped=False))


def continue_prompts(
    plan: RunPlan,
    scorer: Scorer,
    groups: Groups,
    task: Task,
    *,
    device: torch.device,
    on_token: Callable[[int], None] = lambda _count: None,
) -> list[list[int]]:
    """Return the tokens of each answer, equal on all ranks."""
    generator = TokenGenerator(
        plan,
        scorer.forward,
        groups,
        context=scorer.context,
        device=device,
        seq_len=plan.job.data.seq_len,
    )
    return generator.answers(
        task.prompts,
        task.sampling,
        images=task.images,
        is_done=partial(task.is_done, task.codec()),
        on_token=on_token,
    )
