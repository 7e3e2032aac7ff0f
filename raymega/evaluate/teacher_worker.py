"""Entry module of the workers that ask a teacher about a dataset: each writes the logits of its own positions.

The driver names this module by a string, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.data.distillation.stored_logits import (
    LogitWriter,
    dataset_rows,
    logit_files,
    unfinished,
)
from raymega.data.loader import Loader
from raymega.errors import Fault, NumericsError
from raymega.evaluate.worker import run_in_world
from raymega.messages import Channel, Progress, StartWorker, WorkerFinished
from raymega.model.heads.score_head import language_head
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.collectives import barrier
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.context_parallel.context import MicroBatch, held_positions
from raymega.plan.batch import SCORED_MICRO_BATCHES_PER_STAGE, make_batch
from raymega.plan.run_plan import RunPlan
from raymega.train.build import image_share
from raymega.train.build_scorer import Scorer, build_scorer, load_weights
from raymega.train.entry import ProgressReporter, abort, host_rendezvous, warm_up

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Write the logits of the dataset of ``start.entry_input`` by the checkpoint ``start.restore``."""
    run_in_world(_ask, start, channel, rendezvous)


def _ask(
    plan: RunPlan, start: StartWorker, channel: Channel, groups: Groups, device: torch.device
) -> None:
    progress = ProgressReporter(channel, start.rank)
    scorer = build_scorer(plan, rank=start.rank, groups=groups, device=device, progress=progress)
    load_weights(scorer, open_checkpoint(start.restore), groups, progress=progress)

    def report(num_rows: int) -> None:
        channel.report(Progress(rank=start.rank, step=num_rows))

    write_logits(plan, scorer, groups, start.entry_input.decode(), device=device, on_rows=report)
    channel.report(WorkerFinished(rank=start.rank, step=0, stopped=False))


def write_logits(
    plan: RunPlan,
    scorer: Scorer,
    groups: Groups,
    path: str,
    *,
    device: torch.device,
    on_rows: Callable[[int], None] = lambda _num_rows: None,
) -> None:
    """Write the k largest logits of every token of a dataset into files that are there.

    Every position of a row is of one context-parallel rank; the first tensor-parallel rank writes it.

    Args:
        plan: Plan of the teacher's grid; its job cuts the rows.
        scorer: Teacher on this rank, with its weights.
        groups: Process groups of this rank.
        path: Dataset in a folder.
        device: Device of this rank.
        on_rows: Function that is told how many rows are done.
    """
    source, files = dataset_rows(plan.job, path), unfinished(logit_files(path))
    rank = groups.world.ranks[groups.world.index]
    loader = Loader(
        source,
        dp_rank=plan.grid.coords(rank).dp,
        device=device,
        context=scorer.context,
        images=image_share(plan, rank),
        vision=plan.job.model.vision,
    )
    ids, logits = LogitWriter(files.ids), LogitWriter(files.logits)
    size = plan.batch.micro_batch_size
    # rows of one pipeline: enough to fill it, and few enough for their residual streams
    at_once = size * plan.grid.dp * SCORED_MICRO_BATCHES_PER_STAGE * plan.grid.pp
    for first in range(0, source.num_windows, at_once):
        num_rows = min(at_once, source.num_windows - first)
        batch = make_batch(global_batch_size=num_rows, micro_batch_size=size, dp=plan.grid.dp)
        micro_batches = loader.micro_batches(batch, first)
        found = scorer.forward.run(partial(_every_token, k=ids.shape[2]), micro_batches)
        # of equal copies over tp the first one is written
        is_writer = scorer.has_scores and groups.tp.index == 0
        for micro_batch, (top, tokens) in zip(
            micro_batches, found if is_writer else (), strict=False
        ):
            held = held_positions(micro_batch.rows.documents, scorer.context)  # [1 or B, S/cp]
            for place, sample in enumerate(micro_batch.samples.tolist()):
                if sample >= 0:
                    at = held[place % len(held)].numpy()
                    if not top[:, place, 0].isfinite().all():  # a NaN is sorted before all numbers
                        raise NumericsError(_not_finite(path, sample))
                    ids.write(sample, at, tokens[:, place].cpu().numpy())
                    logits.write(sample, at, top[:, place].cpu().numpy())
        on_rows(first + num_rows)
    for table in (ids, logits):
        table.close()
    barrier(groups.world)  # every rank has written before the files get their names


def _not_finite(path: str, row: int) -> Fault:
    return Fault(
        fact=f"the teacher's logits for row {row} of {path} are NaN or Inf",
        rule="a student learns from finite numbers",
        remedy="give --set precision.dtype=float32, or take an earlier checkpoint as teacher",
    )


def _every_token(
    module: StageModule, micro_batch: MicroBatch, hidden: Tensor | None, *, k: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the activation for the next stage, or the last stage's k largest logits and their tokens, [S/cp, B, k]."""
    x = module.evaluated(micro_batch, hidden)
    return x if module.head is None else language_head(module.head).largest_logits(x, k)
