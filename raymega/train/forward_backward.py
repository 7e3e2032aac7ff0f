"""Passes over micro-batches: forward and backward of a step, and forward of an evaluation.

A pass ends with gradients summed over all ranks. `train/step.py` divides these sums by the token
count and decides whether they update the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import NamedTuple

import torch

from raymega.errors import DataError, Fault
from raymega.model.heads.objective import ACCURACY, reported_statistics
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.world import raise_if_aborted
from raymega.parallel.context_parallel.context import MicroBatch
from raymega.parallel.core.host_copies import to_device
from raymega.pipeline.executor import StepOutput
from raymega.train.build import Evaluation, TrainingComponents


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
        if module.objective:
            module.objective.take_sums()
    weigh_pairs(parts, micro_batches)
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


def weigh_pairs(parts: TrainingComponents, micro_batches: Sequence[MicroBatch]) -> None:
    """Set the weight of an encoder's pairs of segments: the step's masked tokens over its pairs.

    It takes one all-reduce, and no number of the device comes to the host.
    """
    if not parts.plan.job.model.encoder.has_pairs:
        return
    counts = [sum(batch.num_counted for batch in micro_batches), num_segment_pairs(micro_batches)]
    is_counted = parts.has_loss and parts.coords.tp == 0
    mine = to_device([float(n) * is_counted for n in counts], parts.device)
    tokens, pairs = all_reduce(mine, parts.groups.world).unbind()
    for module in parts.modules:
        if module.head is not None and module.head.segment_pairs is not None:
            module.head.segment_pairs.start_step(tokens / pairs.clamp(min=1))


def num_segment_pairs(micro_batches: Sequence[MicroBatch]) -> int:
    """Return the number of pairs of segments whose first token this rank has."""
    encoders = (batch.encoder for batch in micro_batches)
    return sum(encoder.first.numel() for encoder in encoders if encoder is not None)


def evaluate(parts: TrainingComponents) -> dict[str, float]:
    """Return held-out loss in nats per token and perplexity, equal on all ranks; {} when it is off.

    It reads the first ``run.eval_samples`` samples of each validation set. Named sets have a loss each;
    that of the first is the run's too.

    Raises:
        DataError: All labels of a set are masked.
    """
    if parts.evaluation is None:
        return {}
    found = {
        name: _evaluate_set(parts, parts.evaluation, name, loader.micro_batches(batch, 0))
        for name, (batch, loader) in parts.evaluation.sets.items()
    }
    # The loss of a pair or of a class is no logarithm of a token's probability.
    job = parts.plan.job
    has_accuracy = job.model.head.is_on and "accuracy" in reported_statistics(job)
    metrics_of = _with_perplexity
    if job.preference.is_on or job.model.head.is_on:
        metrics_of = _with_accuracy if has_accuracy else _loss_alone
    metrics = metrics_of("eval/", "", next(iter(found.values())))
    for name, each in found.items():
        metrics |= metrics_of("eval/set_", f"/{name}", each) if name else {}
    return metrics


class SetMeans(NamedTuple):
    """Means over a validation set: loss in nats per token, or of a pair or document, and share of right answers."""

    loss: float
    accuracy: float


def _loss_alone(prefix: str, suffix: str, means: SetMeans) -> dict[str, float]:
    return {f"{prefix}loss{suffix}": means.loss}


def _with_accuracy(prefix: str, suffix: str, means: SetMeans) -> dict[str, float]:
    return {f"{prefix}loss{suffix}": means.loss, f"{prefix}accuracy{suffix}": means.accuracy}


def _with_perplexity(prefix: str, suffix: str, means: SetMeans) -> dict[str, float]:
    # exp(700) is near the largest float64; a diverged loss must not raise OverflowError
    perplexity = exp(min(means.loss, 700.0))
    return {f"{prefix}loss{suffix}": means.loss, f"{prefix}perplexity{suffix}": perplexity}


def _evaluate_set(
    parts: TrainingComponents,
    evaluation: Evaluation,
    name: str,
    micro_batches: Sequence[MicroBatch],
) -> SetMeans:
    """Return the means over a validation set."""
    objectives = [module.objective for module in parts.modules if module.objective]
    for objective in objectives:  # what training left is no part of this set
        objective.take_sums()
    if parts.teacher is None:  # a held-out loss is that of labels, without a teacher
        micro_batches = parts.add_reference(micro_batches)
    parts.weights.start_gather()
    executor = evaluation.executor_for(len(micro_batches))
    lengths = parts.lengths(micro_batches)
    parts.follow_weights(executor)
    loss_sum = executor.run(micro_batches, is_recording=False, lengths=lengths).loss_sum
    # tp ranks compute the same loss; count it once
    is_counted = parts.has_loss and parts.coords.tp == 0
    right = sum(float(each.take_sums()[ACCURACY]) for each in objectives)
    tokens = float(sum(batch.divisor for batch in micro_batches))
    mine = [float(loss_sum), tokens] if is_counted else [0.0, 0.0]
    total_loss, total_tokens, total_right = sum_over_world(parts, [*mine, right * is_counted])
    if not total_tokens:
        raise DataError(no_labels(f"the evaluation of {name!r}" if name else "the evaluation"))
    return SetMeans(loss=total_loss / total_tokens, accuracy=total_right / total_tokens)


def no_labels(what: str) -> Fault:
    """Return the fault of a batch (``what``) in which no token has an unmasked label."""
    return Fault(
        fact=f"{what} reads no token with a label that counts",
        rule="packed documents of one token, what is left of longer ones, and conversations whose answers lie "
        "behind data.seq_len, predict nothing",
        remedy="set a larger data.global_batch_size, run.eval_samples or data.seq_len",
    )


def sum_over_world(parts: TrainingComponents, numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the sum of each number over all ranks."""
    mine = to_device(numbers, parts.device)
    total = read_back(all_reduce(mine, parts.groups.world), "a sum over all ranks")
    return tuple(total.tolist())


def read_back(numbers: torch.Tensor, what: str) -> torch.Tensor:
    """Return ``numbers`` in host memory; of a step, here alone the host waits for the device.

    Raises:
        CommunicationError: The world was aborted, so the numbers, named ``what``, may be garbage.
    """
    host = numbers.cpu()
    raise_if_aborted(what)
    return host
