"""ZB-V: no bubble at the memory of 1F1B, with two chunks per rank that run down and back up.

It owns the order of work. The schedule is that of Qi et al., NeurIPS 2024
(https://arxiv.org/abs/2405.15362, appendix): rank 0 holds the first and the last stage, so a
micro-batch's backward begins where its forward began. Every rank holds the activations of at most
2 * pp chunks, as many as 1F1B's first rank. With equal times of F, B and W there is no
bubble.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes, first_micro_batches

DOWN, UP = 0, 1
"""Numbers of a rank's two chunks: on the way to the last rank, and on the way back."""


def zb_v(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank; at least 2 * pp - 1 micro-batches are planned."""
    planned = max(sizes.num_micro_batches, 2 * sizes.pp - 1)
    lists = [_rank(sizes.pp, rank, planned) for rank in range(sizes.pp)]
    return tuple(first_micro_batches(schedule, sizes.num_micro_batches) for schedule in lists)


def _rank(pp: int, rank: int, num_micro_batches: int) -> Schedule:
    order = Order(num_micro_batches)

    # Warm-up: fill the vee until the first backward comes up again.
    order.forward(DOWN, times=2 * (pp - rank) - 1)
    for _ in range(rank):
        order.forward(UP)
        order.forward(DOWN)
    for _ in range(pp - rank):
        order.forward(UP)
        _backward_in_parts(order, UP)

    # Steady state: one forward and one backward on each chunk.
    for _ in range(num_micro_batches - pp):
        order.forward(DOWN)
        _backward_in_parts(order, DOWN)
        order.forward(UP)
        _backward_in_parts(order, UP)

    # Cool-down: input parts first, since other ranks wait for them; weight parts fill the gaps.
    for _ in range(rank):
        order.backward_input(DOWN)
        order.backward_input(UP)
    for _ in range(pp - rank):
        order.backward_input(DOWN)
        order.backward_weight_of(DOWN)
    for chunk in (UP, DOWN):
        for _ in range(pp):
            order.backward_weight_of(chunk)
    return order.work


def _backward_in_parts(order: Order, chunk: int) -> None:
    order.backward_input(chunk)
    order.backward_weight_of(chunk)
