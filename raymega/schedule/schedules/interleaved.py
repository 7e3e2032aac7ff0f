"""Interleaved 1F1B: several model chunks per rank, which divides the bubble by their number.

It owns the order of work. The schedule is Megatron-LM's (Narayanan et al., SC 2021,
https://arxiv.org/abs/2104.04473, section 2.2). Micro-batches go in groups: all of a group pass
chunk 0, then all pass chunk 1, and so on; backwards do the same from the last chunk to the first.
Two ranks, two chunks and four micro-batches, ``F2.1`` being micro-batch 2's forward on chunk 1:

    rank 0  F0.0 F1.0 F0.1 F1.1 F2.0 .    B0.1 B0.1 F3.0 B1.1 B1.1 F2.1 B0.0 B0.0 F3.1 B1.0 B1.0 ...
    rank 1  .    F0.0 F1.0 F0.1 B0.1 B0.1 F1.1 B1.1 B1.1 F2.0 B0.0 B0.0 F3.0 B1.0 B1.0 F2.1 B2.1 ...

The bubble is (pp - 1) / (chunks * num_micro_batches) of the ideal time when groups are full. The
cost is ``chunks`` times as many messages, and more activations in flight.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes, first_micro_batches


def interleaved(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank, for any number of micro-batches.

    A last group that is not full is planned as a full one, and the micro-batches that do not exist
    are removed: the order of a smaller group could deadlock.
    """
    group = max(sizes.pp, sizes.microbatch_group_size_per_vp_stage)
    planned = -(-sizes.num_micro_batches // group) * group
    lists = [_rank(sizes, rank, group, planned) for rank in range(sizes.pp)]
    return tuple(first_micro_batches(schedule, sizes.num_micro_batches) for schedule in lists)


def _rank(sizes: Sizes, rank: int, group: int, num_micro_batches: int) -> Schedule:
    pp, chunks = sizes.pp, sizes.chunks
    # One turn takes a group of micro-batches through all chunks.
    turn = [chunk for chunk in range(chunks) for _ in range(group)]
    forwards = turn * (num_micro_batches // group)
    backwards = [chunks - 1 - chunk for chunk in forwards]
    warmup = min(len(forwards), 2 * (pp - rank - 1) + (chunks - 1) * group)

    # Warm-up: forwards only.
    order = Order(num_micro_batches)
    for chunk in forwards[:warmup]:
        order.forward(chunk)
    # Steady state: one forward, one backward. Backwards without a forward are the cool-down.
    for step, chunk in enumerate(backwards):
        if warmup + step < len(forwards):
            order.forward(forwards[warmup + step])
        order.backward(chunk)
    return order.work
