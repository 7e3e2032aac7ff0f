"""Evaluation of the moving average of the weights, beside that of the weights.

`train/forward_backward.py` has the evaluation, `optim/optimizer.py` puts the average in the weights' place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raymega.train.build import TrainingComponents
from raymega.train.forward_backward import evaluate

OF_SETS = "set_"
"""Begin of the short names of a validation set's metrics."""


def evaluate_average(parts: TrainingComponents) -> dict[str, float]:
    """Return the metrics of an evaluation of the average under names of their own; {} where the job has none.

    Afterwards the weights are what they were, bit for bit. All ranks call it together.
    """
    if not parts.plan.job.run.eval_ema:
        return {}
    with averaged_weights(parts):
        found = evaluate(parts)
    return {name_of_average(name): value for name, value in found.items()}


@contextmanager
def averaged_weights(parts: TrainingComponents) -> Iterator[None]:
    """Let the weights be their average in the body; before and after it they are on their way to all ranks."""
    with parts.optimizer.averaged():
        parts.weights.start_gather()
        yield
    parts.weights.start_gather()


def name_of_average(name: str) -> str:
    """Return the metric of the average for a metric of the weights: eval/ema_loss for eval/loss."""
    family, _, short = name.partition("/")
    start = OF_SETS if short.startswith(OF_SETS) else ""
    return f"{family}/{start}ema_{short.removeprefix(start)}"
