"""GPipe: every forward, then every backward; and its first half alone, for evaluation.

It owns one stage's order of work. The schedule is that of Huang et al., NeurIPS 2019
(https://arxiv.org/abs/1811.06965): the simplest that is right, and the reference for others. Every
stage keeps the activations of all micro-batches, so it suits few of them.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule, backward_pass, forward_pass, refuse_chunks


def gpipe(*, pp: int, stage: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """The instructions of stage ``stage``, in [0, pp), for one optimizer step."""
    refuse_chunks("gpipe", chunks)
    forwards = forward_only(pp=pp, stage=stage, num_micro_batches=num_micro_batches)
    backwards = tuple(
        instruction
        for micro_batch in range(num_micro_batches)
        for instruction in backward_pass(pp=pp, stage=stage, micro_batch=micro_batch)
    )
    return forwards + backwards


def forward_only(*, pp: int, stage: int, num_micro_batches: int) -> Schedule:
    """The instructions of stage ``stage``, in [0, pp), when no gradient is wanted."""
    return tuple(
        instruction
        for micro_batch in range(num_micro_batches)
        for instruction in forward_pass(pp=pp, stage=stage, micro_batch=micro_batch)
    )
