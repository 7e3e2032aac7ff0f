"""Passes over micro-batches: forward and backward of a step, and forward of an evaluation.

A pass ends with gradients summed over all ranks. `train/step.py` divides these sums by the token
count and decides whether they update the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import torch

from raymega.errors import DataError, Fault
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.context_parallel.context import MicroBatch
from raymega.parallel.core.host_copies import to_device
from raymega.pipeline.executor import StepOutput
from raymega.train.build import TrainingComponents


def forward_backward(
    parts: TrainingComponents,
    micro_batches: Sequence[MicroBatch],
    *,
    loss_gradient: float,
    is_recording: bool = False,
) -> StepOutput:
    """Overwrite ``parts.gradients`` with the batch's; backward starts from ``loss_gradient``.

    Recorded events are those of the pipeline, the collectives of gradients and weights, and the
    transfers between context-parallel ranks.
    """
    # reset: log, gradients, router sums, losses of multi-token prediction
    parts.comm_log.new_step()
    if is_recording:
        parts.comm_log.start()
        parts.weights.record()
    # start the first all-gather of sharded weights before the executor waits for it
    parts.weights.start_gather()
    parts.gradients.zero()
    parts.routers.start_step(loss_gradient=loss_gradient)
    for module in parts.modules:
        module.mtp_loss_sum = 0.0
    # run the schedule; buckets are reduced as soon as the last backward fills them
    executor = parts.executor_for(len(micro_batches))
    parts.follow_weights(executor)
    output = executor.run(
        micro_batches,
        is_recording=is_recording,
        lengths=parts.lengths(micro_batches),
        loss_gradient=loss_gradient,
        before_last_backward=parts.gradients.launch_when_full,
        after_backward=parts.gradients.launch,
    )
    # wait for the remaining reductions, and sum the copies of a tied embedding
    parts.gradients.finish()
    return replace(output, events=parts.comm_log.pause(output.events, began_s=output.began_s))


def evaluate(parts: TrainingComponents) -> dict[str, float]:
    """Return held-out loss in nats per token and perplexity, equal on all ranks; {} when it is off.

    It reads the first ``run.eval_samples`` windows of the validation split, unshuffled.

    Raises:
        DataError: All labels of the evaluation are masked.
    """
    if parts.evaluation is None:
        return {}
    parts.weights.start_gather()
    evaluation = parts.evaluation
    micro_batches = evaluation.loader.micro_batches(evaluation.batch, 0)
    executor = evaluation.executor_for(len(micro_batches))
    lengths = parts.lengths(micro_batches)
    parts.follow_weights(executor)
    loss_sum = executor.run(micro_batches, is_recording=False, lengths=lengths).loss_sum
    # tp ranks compute the same loss; count it once
    is_counted = parts.has_loss and parts.coords.tp == 0
    tokens = float(sum(batch.num_counted for batch in micro_batches))
    mine = [float(loss_sum), tokens] if is_counted else [0.0, 0.0]
    total_loss, total_tokens = sum_over_world(parts, mine)
    if not total_tokens:
        raise DataError(no_labels("the evaluation"))
    # exp(700) is near the largest float64; a diverged loss must not raise OverflowError
    loss = total_loss / total_tokens
    return {"eval/loss": loss, "eval/perplexity": exp(min(loss, 700.0))}


def no_labels(what: str) -> Fault:
    """Return the fault of a batch (``what``) in which no token has an unmasked label."""
    return Fault(
        fact=f"{what} reads no token with a label that counts",
        rule="packed documents of one token, and what is left of longer ones, predict nothing",
        remedy="set a larger data.global_batch_size, run.eval_samples or data.seq_len",
    )


def sum_over_world(parts: TrainingComponents, numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the sum of each number over all ranks."""
    mine = to_device(numbers, parts.device)
    return tuple(read_back(all_reduce(mine, parts.groups.world)).tolist())


def read_back(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``numbers`` in host memory; of a step, here alone the host waits for the device."""
    return numbers.cpu()
