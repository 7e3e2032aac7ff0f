"""1F1B: one forward, one backward, with a flush between optimizer steps; one stage per rank.

It owns the order of work. `raymega.schedule.checker` proves that the ranks agree. The schedule is
PipeDream-Flush (Narayanan et al., ICML 2021, https://arxiv.org/abs/2006.09503), in the form of
Megatron-LM (Narayanan et al., SC 2021, https://arxiv.org/abs/2104.04473, figure 4). Four ranks
and eight micro-batches, a forward taking one unit of time and a backward two:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 ...
    rank 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 ...
    rank 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 ...
    rank 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 ...

It is as fast as GPipe: the bubble is (pp - 1) / num_micro_batches of the ideal time. But a rank
keeps the activations of at most pp - rank micro-batches, not of all, because each backward frees
the memory that the next forward needs.

When passes are paired, which needs pp=1, the rank is one forward ahead, F0 F1+B0 F2+B1 ..., and
keeps the activations of two micro-batches.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes
from raymega.schedule.schedules.interleaved import interleaved


def one_f_one_b(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank; with several chunks per rank, the interleaved schedule."""
    if sizes.chunks > 1:
        return interleaved(sizes)
    return tuple(_rank(sizes, rank) for rank in range(sizes.pp))


def _rank(sizes: Sizes, rank: int) -> Schedule:
    order = Order(sizes.num_micro_batches)

    # Warm-up: forwards only, one for each rank after this one.
    order.forward(times=sizes.pp - rank - 1 + sizes.is_paired)

    # Steady state: each forward is followed by the backward of the oldest micro-batch in flight.
    # When forwards run out, the remaining backwards are the cool-down.
    for _ in range(sizes.num_micro_batches):
        order.forward()
        order.backward()
    return order.work
