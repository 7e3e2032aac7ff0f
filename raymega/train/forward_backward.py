"""The forward and backward work of one step, up to gradients that are summed over all ranks.

It decides nothing: what the sums are divided by, and whether they are used, is train.step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raymega.parallel.context_parallel.context import MicroBatch
from raymega.pipeline.executor import StepOutput
from raymega.train.build import TrainingComponents


def forward_backward(
    parts: TrainingComponents,
    micro_batches: Sequence[MicroBatch],
    *,
    loss_gradient: float,
    is_recording: bool = False,
) -> StepOutput:
    """Fill ``parts.gradients``, forgetting what was there; backward starts from ``loss_gradient``.

    Recorded events are those of the pipeline and those of the gradients' and weights' collectives, and
    transfers between context-parallel ranks.
    """
    parts.comm_log.new_step()
    if is_recording:
        parts.comm_log.start()
        parts.weights.record()
    parts.weights.start_gather()
    parts.gradients.zero()
    parts.routers.start_step(loss_gradient=loss_gradient)
    for module in parts.modules:
        module.mtp_loss_sum = 0.0
    executor = parts.executors[len(micro_batches)]
    parts.follow_weights(executor)
    output = executor.run(
        micro_batches,
        is_recording=is_recording,
        lengths=parts.lengths(micro_batches),
        loss_gradient=loss_gradient,
        before_last_backward=parts.gradients.launch_when_full,
        after_backward=parts.gradients.launch,
    )
    parts.gradients.finish()
    return replace(output, events=parts.comm_log.pause(output.events, began_s=output.began_s))
