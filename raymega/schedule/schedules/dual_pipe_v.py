"""DualPipe-V: two chunks per rank, each forward next to the backward of another micro-batch.

It owns the order of work. The schedule is DeepSeek's DualPipe (DeepSeek-V3 technical report,
https://arxiv.org/abs/2412.19437) in the form that folds both directions of the pipe into a vee
(https://github.com/deepseek-ai/DualPipe). In its main phase a forward and a whole backward of
different micro-batches follow each other on a rank, so that the messages of one are sent while
the other computes. Weight parts are deferred only where they fill a bubble.
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes, first_micro_batches
from raymega.schedule.schedules.zero_bubble_v import DOWN, UP


def dualpipe_v(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank; at least 2 * pp micro-batches are planned."""
    planned = max(sizes.num_micro_batches, 2 * sizes.pp)
    lists = [_rank(sizes.pp, rank, planned) for rank in range(sizes.pp)]
    return tuple(first_micro_batches(schedule, sizes.num_micro_batches) for schedule in lists)


def _rank(pp: int, rank: int, num_micro_batches: int) -> Schedule:
    order, below = Order(num_micro_batches), pp - rank - 1

    # Warm-up: the vee fills; then the first backwards come up, their weight parts right after.
    order.forward(DOWN, times=2 * below)
    for _ in range(rank + 1):
        order.forward(DOWN)
        order.forward(UP)
    for _ in range(below):
        order.backward_input(UP)
        order.backward_weight()
        order.forward(UP)

    # Steady state: a forward on one chunk next to a backward on the other.
    for _ in range(num_micro_batches - 2 * pp + rank + 1):
        order.forward(DOWN)
        order.backward(UP)
        order.forward(UP)
        order.backward(DOWN)
    # No new micro-batch enters: forwards are left on the way up only.
    for _ in range(below):
        order.backward(UP)
        order.forward(UP)
        order.backward(DOWN)

    # Cool-down: backwards only.
    _cool_down(order, rank, below)
    return order.work


def _cool_down(order: Order, rank: int, below: int) -> None:
    """Add the last backwards; weight parts of the second half are deferred to the final bubble."""
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
