"""1F1B: one forward, one backward, with a flush between optimizer steps.

It owns one stage's order of work; that the stages agree is checker's to prove. The schedule is
PipeDream-Flush (Narayanan et al., ICML 2021, https://arxiv.org/abs/2006.09503), in the form of
Megatron-LM (Narayanan et al., SC 2021, https://arxiv.org/abs/2104.04473, figure 4). Four stages
and eight micro-batches, a forward taking one unit of time and a backward two:

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 ...
    stage 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 ...
    stage 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 ...
    stage 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 ...

It is as fast as GPipe: (pp - 1) / num_micro_batches of the ideal time is bubble. But a stage keeps
the activations of at most pp - stage micro-batches, not of all, because each backward frees what
the next forward needs.
"""

from __future__ import annotations

from raymega.schedule.instructions import (
    Instruction,
    Schedule,
    backward_pass,
    forward_pass,
    refuse_chunks,
)


def one_f_one_b(*, pp: int, stage: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """The instructions of stage ``stage``, in [0, pp), for one optimizer step."""
    refuse_chunks("1f1b", chunks)
    warmup = min(pp - stage - 1, num_micro_batches)

    def forward(micro_batch: int) -> Schedule:
        return forward_pass(pp=pp, stage=stage, micro_batch=micro_batch)

    def backward(micro_batch: int) -> Schedule:
        return backward_pass(pp=pp, stage=stage, micro_batch=micro_batch)

    schedule: list[Instruction] = []

    # Warm-up: forwards alone, one for each stage between this one and the last.
    for i in range(warmup):
        schedule += forward(i)

    # Steady: each new forward is followed by the backward of the oldest micro-batch in flight.
    for i in range(num_micro_batches - warmup):
        schedule += forward(warmup + i)
        schedule += backward(i)

    # Cool-down: the backwards of what the warm-up brought in.
    for i in range(num_micro_batches - warmup, num_micro_batches):
        schedule += backward(i)

    return tuple(schedule)
