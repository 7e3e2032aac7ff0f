"""Held-out loss: the first eval_samples windows of the validation split, in their own order."""

from __future__ import annotations

from math import exp

import torch

from raymega.errors import DataError
from raymega.parallel.comm.collectives import all_reduce
from raymega.train.build import TrainingComponents
from raymega.train.step import no_labels


def evaluate(parts: TrainingComponents) -> dict[str, float]:
    """Loss in nats per token and its exponential; equal on all ranks, empty when it is off.

    Raises:
        DataError: No token that it reads has a label that counts.
    """
    if parts.evaluation is None:
        return {}
    parts.weights.start_gather()
    evaluation = parts.evaluation
    micro_batches = evaluation.loader.micro_batches(evaluation.batch, 0)
    executor = evaluation.executors[len(micro_batches)]
    lengths = parts.lengths(micro_batches)
    parts.follow_weights(executor)
    loss_sum = executor.run(micro_batches, is_recording=False, lengths=lengths).loss_sum
    is_counted = parts.has_loss and parts.coords.tp == 0
    tokens = sum(float(batch.mask.sum()) for batch in micro_batches)
    mine = [float(loss_sum), tokens] if is_counted else [0.0, 0.0]
    totals = torch.tensor(mine, dtype=torch.float64, device=parts.device)
    total_loss, total_tokens = all_reduce(totals, parts.groups.world).tolist()
    if not total_tokens:
        raise DataError(no_labels("the evaluation"))
    loss = total_loss / total_tokens
    return {"eval/loss": loss, "eval/perplexity": exp(min(loss, 700.0))}
