"""Entry module of an evaluation's workers: loads a checkpoint's weights and scores requests.

Rank 0 reports the scores. The driver names this module by a string, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.data.loader import Loader
from raymega.evaluate.requests import (
    Floats,
    Request,
    pack_scores,
    rows_on_grid,
    unpack_requests,
)
from raymega.messages import Channel, EntryOutput, Progress, StartWorker, WorkerFinished
from raymega.parallel.comm import world
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Groups, groups_of_plan
from raymega.parallel.context_parallel.context import MicroBatch, held_positions
from raymega.parallel.tensor_parallel.token_scores import TokenScores
from raymega.plan.batch import SCORED_MICRO_BATCHES_PER_STAGE, make_batch
from raymega.plan.run_plan import RunPlan, read_plan
from raymega.train.build import image_share
from raymega.train.build_scorer import Scorer, build_scorer, load_weights
from raymega.train.entry import ProgressReporter, abort, host_rendezvous, warm_up
from raymega.train.environment import listen_towards, prepare_process

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]

Bools = npt.NDArray[np.bool_]
Work = Callable[[RunPlan, StartWorker, Channel, Groups, torch.device], None]
"""Function of one rank: plan, start message, channel to the driver, process groups, device."""


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Score the requests of ``start.entry_input`` with the weights of the checkpoint ``start.restore``."""
    run_in_world(_score, start, channel, rendezvous)


def run_in_world(work: Work, start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Call ``work`` on this rank, in a world that is open meanwhile."""
    plan = read_plan(start.plan_json)
    device = prepare_process(plan, device=start.device, local_rank=start.local_rank)
    timeout_s = plan.job.elastic.collective_timeout_s
    listen_towards(start.rendezvous)
    world.open_world(
        rank=start.rank,
        world_size=plan.grid.world_size,
        rendezvous=start.rendezvous,
        store=cast(world.Store | None, rendezvous),
        timeout_s=timeout_s,
        device=device,
    )
    try:
        groups = groups_of_plan(plan, start.rank, timeout_s=timeout_s)
        work(plan, start, channel, groups, device)
    finally:
        world.close_world()


def _score(
    plan: RunPlan, start: StartWorker, channel: Channel, groups: Groups, device: torch.device
) -> None:
    progress = ProgressReporter(channel, start.rank)
    scorer = build_scorer(plan, rank=start.rank, groups=groups, device=device, progress=progress)
    load_weights(scorer, open_checkpoint(start.restore), groups, progress=progress)
    requests = unpack_requests(start.entry_input)

    def report(num_rows: int) -> None:
        channel.report(Progress(rank=start.rank, step=num_rows))

    scores = score_requests(plan, scorer, groups, requests, device=device, on_rows=report)
    if start.rank == 0:
        log_probs, is_greedy = scores
        channel.report(EntryOutput(rank=0, data=pack_scores(log_probs, is_greedy)))
    channel.report(WorkerFinished(rank=start.rank, step=0, stopped=False))


def score_requests(
    plan: RunPlan,
    scorer: Scorer,
    groups: Groups,
    requests: Sequence[Request],
    *,
    device: torch.device,
    on_rows: Callable[[int], None] = lambda _num_rows: None,
) -> tuple[list[Floats], list[Bools]]:
    """Return the log-probabilities and greedy matches of each request's targets, equal on all ranks.

    Args:
        plan: Plan of the evaluation's grid.
        scorer: Scorer of this rank, with its weights.
        groups: Process groups of this rank.
        requests: Requests of at most ``data.seq_len`` inputs, the same on all ranks.
        device: Device of this rank.
        on_rows: Function that is told how many rows are done.
    """
    dp, rank = plan.grid.dp, groups.world.ranks[groups.world.index]
    source = rows_on_grid(requests, plan)
    # texts alone leave the tower out, on all ranks alike
    has_images = any(request.images for request in requests)
    loader = Loader(
        source,
        dp_rank=plan.grid.coords(rank).dp,
        device=device,
        context=scorer.context,
        images=image_share(plan, rank) if has_images else None,
        vision=plan.job.model.vision if has_images else None,
    )
    micro_batch_size = plan.batch.micro_batch_size
    at_once = micro_batch_size * dp * SCORED_MICRO_BATCHES_PER_STAGE * plan.grid.pp
    log_probs: dict[int, Floats] = {}  # by the request's number
    is_greedy: dict[int, Bools] = {}
    for first in range(0, source.num_rows, at_once):
        # forward of some rows
        num_rows = min(at_once, source.num_rows - first)
        batch = make_batch(global_batch_size=num_rows, micro_batch_size=micro_batch_size, dp=dp)
        micro_batches = loader.micro_batches(batch, first)
        scores = scorer.run(micro_batches)
        # each position of each row is scored on one rank: put together, every rank has them all
        table = torch.zeros(num_rows, source.seq_len, 2, dtype=torch.float64)
        if scorer.has_scores and groups.tp.index == 0:
            for micro_batch, scored in zip(micro_batches, scores, strict=True):
                _write_scores(table, micro_batch, scored, scorer, first)
        table = all_reduce(table.to(device), groups.world).cpu()
        # each request's targets
        for row in range(num_rows):
            for number in source.members(first + row):
                at = source.targets(number)
                log_probs[number] = table[row, at, 0].numpy().copy()
                is_greedy[number] = table[row, at, 1].numpy() > 0
        on_rows(first + num_rows)
    order = range(len(requests))
    return [log_probs[number] for number in order], [is_greedy[number] for number in order]


def _write_scores(
    table: torch.Tensor, micro_batch: MicroBatch, scored: TokenScores, scorer: Scorer, first: int
) -> None:
    """Write a micro-batch's scores to the rows of ``table`` [rows, S, 2], whose first row is ``first``."""
    held = held_positions(micro_batch.rows.documents, scorer.context)  # [1 or B, S/cp]
    values = torch.stack((scored.log_probs, scored.is_greedy.to(scored.log_probs.dtype)), -1)
    values = values.transpose(0, 1).double().cpu()  # [B, S/cp, 2]
    for place, sample in enumerate(micro_batch.samples.tolist()):
        if sample >= 0:
            table[sample - first, held[place % len(held)]] = values[place]
