"""DualPipe-V: on two chunks a rank, each forward beside the backward of another micro-batch.

It owns the order of work. The schedule is DeepSeek's DualPipe (DeepSeek-V3 technical report,
https://arxiv.org/abs/2412.19437) in the form that folds both directions of the pipe into a vee
(https://github.com/deepseek-ai/DualPipe). In its main phase a forward and a whole backward of
different micro-batches follow each other on a rank, so that the messages of one can travel while
the other computes; weight parts are put off only where they fill a bubble.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes, first_micro_batches
from raymega.schedule.schedules.zero_bubble_v import DOWN, UP


def dualpipe_v(sizes: Sizes) -> tuple[Schedule, ...]:
    """The work of every rank; few micro-batches are planned as if there were 2 * pp."""
    planned = max(sizes.num_micro_batches, 2 * sizes.pp)
    lists = [_rank(sizes.pp, rank, planned) for rank in range(sizes.pp)]
    return tuple(first_micro_batches(schedule, sizes.num_micro_batches) for schedule in lists)


def _rank(pp: int, rank: int, num_micro_batches: int) -> Schedule:
    order, below = Order(num_micro_batches), pp - rank - 1

    # Warm-up: the vee fills; then the first backwards come up, their weight parts at once.
    order.forward(DOWN, times=2 * below)
    for _ in range(rank + 1):
        order.forward(DOWN)
        order.forward(UP)
    for _ in range(below):
        order.backward_input(UP)
        order.backward_weight()
        order.forward(UP)

    # Steady: a forward on one chunk beside a backward on the other.
    for _ in range(num_micro_batches - 2 * pp + rank + 1):
        order.forward(DOWN)
        order.backward(UP)
        order.forward(UP)
        order.backward(DOWN)
    for _ in range(below):
        order.backward(UP)
        order.forward(UP)
        order.backward(DOWN)

    _cool_down(order, rank, below)
    return order.work


def _cool_down(order: Order, rank: int, below: int) -> None:
    """The last backwards; in their second half weight parts wait for the bubble at the end."""
    chunks = [UP, DOWN] * (rank + 1)
    for place, chunk in enumerate(chunks):
        if place > rank:
            order.backward_input(chunk)
        else:
            order.backward(chunk)
    for _ in range(below):
        order.backward_weight()
        order.backward_input(DOWN)
    order.settle()
