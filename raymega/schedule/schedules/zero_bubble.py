"""ZB-H1 and ZB-H2: 1F1B whose backward is split in two, so that weight parts fill the bubble.

It owns their order of work. The schedules are those of Qi et al., ICLR 2024
(https://arxiv.org/abs/2401.10241, figures 2 and 3). No rank waits for the weight part of a
backward, so it may run where a rank would idle. ZB-H1 holds as many activations as
1F1B does on its first rank and leaves (pp - 1) * (F + B - W) of idle time, with F, B, W the times
of the parts. ZB-H2 also fills the warm-up with more forwards: up to 2 * pp - 1 micro-batches are
held, and (pp - 1) * (F + B - 2 * W) is left, which is nothing when the parts take equal time. Three
ranks and six micro-batches under ZB-H1:

    rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5
    rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 F5 B4 W3 B5 W4 W5
    rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5
"""

from __future__ import annotations

from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Order, Sizes


def zb_h1(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank under ZB-H1."""
    return tuple(_rank(sizes, warmup=sizes.pp - rank - 1, debt=rank) for rank in range(sizes.pp))


def zb_h2(sizes: Sizes) -> tuple[Schedule, ...]:
    """Return the work of every rank under ZB-H2."""
    return tuple(
        _rank(sizes, warmup=2 * (sizes.pp - rank - 1), debt=2 * rank) for rank in range(sizes.pp)
    )


def _rank(sizes: Sizes, *, warmup: int, debt: int) -> Schedule:
    """Return 1F1B after ``warmup`` forwards, with each weight part ``debt`` backwards late."""
    order = Order(sizes.num_micro_batches)
    # Warm-up: forwards only.
    order.forward(times=warmup)
    # Steady state, then the cool-down once forwards run out.
    for step in range(sizes.num_micro_batches):
        order.forward()
        order.backward_input()
        if step >= debt:
            order.backward_weight()
    # The weight parts still owed fill the end.
    order.settle()
    return order.work
