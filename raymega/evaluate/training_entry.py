"""Entry module of workers that train and also evaluate the run's tasks, on the grid that trains.

It is `train/entry.py` with an evaluator. The driver sends the requests with the start message and judges the scores
(`evaluate/training_tasks.py`); rank 0 reports these.
"""

from __future__ import annotations

from collections.abc import Callable

from raymega.evaluate.requests import pack_scores, unpack_requests
from raymega.evaluate.worker import score_requests
from raymega.messages import Channel, EntryOutput, StartWorker
from raymega.train import entry
from raymega.train.build import TrainingComponents
from raymega.train.build_scorer import scorer_of
from raymega.train.entry import ProgressReporter, abort, held_step, host_rendezvous, warm_up

__all__ = ["abort", "held_step", "host_rendezvous", "run_worker", "warm_up"]


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Train as `train/entry.py` does, and score the requests of ``start.entry_input`` when they are due."""
    entry.run_worker(start, channel, rendezvous, make_evaluator)


def make_evaluator(
    parts: TrainingComponents, start: StartWorker, channel: Channel
) -> Callable[[int], None]:
    """Return the function that scores the requests after a step; all ranks call it together."""
    requests = unpack_requests(start.entry_input)
    scorer = scorer_of(parts, ProgressReporter(channel, start.rank))

    def evaluate(step: int) -> None:
        log_probs, is_greedy = score_requests(
            parts.plan, scorer, parts.groups, requests, device=parts.device
        )
        if start.rank == 0:
            data = pack_scores(log_probs, is_greedy)
            channel.report(EntryOutput(rank=0, step=step, data=data))

    return evaluate
