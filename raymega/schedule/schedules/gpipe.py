"""GPipe: every forward, then every backward; and a forward-only order, for evaluation.

It owns the order of work. The schedule is that of Huang et al., NeurIPS 2019
(https://arxiv.org/abs/1811.06965): the simplest correct one, and the reference for others. Every
rank keeps the activations of all micro-batches, so it suits only small numbers of them.
"""

from __future__ import annotations

from raymega.schedule.instructions import Instruction, Op, Schedule
from raymega.schedule.order import Order, Sizes
from raymega.schedule.stage_placement import Placement


def gpipe(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank, the same for all: chunk after chunk forward, then back."""
    order = Order(sizes.num_micro_batches)
    for chunk in range(sizes.chunks):
        order.forward(chunk, times=sizes.num_micro_batches)
    for chunk in reversed(range(sizes.chunks)):
        order.backward(chunk, times=sizes.num_micro_batches)
    return (order.work,) * sizes.pp


def forward_only(placement: Placement, num_micro_batches: int) -> tuple[Schedule, ...]:
    """Return the work of every rank without gradients, in order of earliest possible arrival."""

    def arrival(rank: int, chunk: int, micro_batch: int) -> tuple[int, int]:
        return micro_batch + placement.stage(rank, chunk), micro_batch

    # A micro-batch reaches stage s after s hops: sort by that time, then older micro-batches first.
    lists = []
    for rank in range(placement.pp):
        keys = [
            (*arrival(rank, chunk, micro_batch), chunk)
            for chunk in range(placement.chunks)
            for micro_batch in range(num_micro_batches)
        ]
        lists.append(
            tuple(
                Instruction(op=Op.FORWARD, micro_batch=micro_batch, chunk=chunk)
                for _, micro_batch, chunk in sorted(keys)
            )
        )
    return tuple(lists)
