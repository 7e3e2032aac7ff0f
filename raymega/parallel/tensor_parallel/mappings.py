"""Differentiable collectives: each function is one half of a conjugate pair, as Megatron's mappings.

A tensor that all ranks hold whole enters tensor-parallel work through `copy_to_tp`: the ranks'
gradients are terms, and are summed. The terms of a sum leave it through `reduce_from_tp`: the gradient
is already whole. With sequence parallelism each rank holds only its own positions, and these become
`gather_positions` and `scatter_to_positions`. `comm/collectives.py` sends the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_exchange,
)
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.linear_map import Map, apply_linear


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Enter tensor-parallel work: identity forward, all-reduce backward.

    Args:
        x: Tensor of any shape, equal on all ranks of ``group``.
        group: Tensor-parallel ranks.
    """
    return x if group.size == 1 else _CopyToTp.apply(x, group)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Leave tensor-parallel work: all-reduce forward, identity backward.

    Args:
        x: Term of this rank of the sum, of any shape; overwritten with the sum.
        group: Tensor-parallel ranks.
    """
    return x if group.size == 1 else _ReduceFromTp.apply(x, group)


def gather_positions(x: Tensor, group: Group) -> Tensor:
    """Enter tensor-parallel work: all-gather forward, reduce-scatter backward.

    Args:
        x: Positions of this rank, [S/tp, ...].
        group: Tensor-parallel ranks.

    Returns:
        All positions [S, ...], equal on all ranks.
    """
    return x if group.size == 1 else apply_linear(x, *_gather_and_sum(group))


def scatter_to_positions(x: Tensor, group: Group) -> Tensor:
    """Leave tensor-parallel work: reduce-scatter forward, all-gather backward.

    Args:
        x: Term of this rank of the sum, [S, ...].
        group: Tensor-parallel ranks.

    Returns:
        This rank's positions of the sum, [S/tp, ...].
    """
    return x if group.size == 1 else apply_linear(x, *reversed(_gather_and_sum(group)))


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of a tensor that all ranks hold; backward all-gathers the gradients.

    Args:
        x: Tensor [T, ...], equal on all n ranks; n divides T.
        group: Ranks that share the rows out.

    Returns:
        Rows [T/n, ...].
    """
    return x if group.size == 1 else apply_linear(x, *_own_and_gather(group))


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """All-gather rows, [T/n, ...] -> [T, ...]; backward takes this rank's rows of the equal gradients."""
    return x if group.size == 1 else apply_linear(x, *reversed(_own_and_gather(group)))


def exchange_rows(
    x: Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send rows to other ranks, [sum of sent, ...] -> [sum of received, ...]; backward sends the gradients back.

    Args:
        x: Rows, those of the rank at place 0 first.
        group: Ranks that exchange rows.
        sent: Numbers of rows that go to each place.
        received: Numbers of rows that come from each place.
    """

    def exchanged(rows: Tensor, to: Sequence[int], back: Sequence[int]) -> Tensor:
        found, pending = start_exchange(rows.contiguous(), group, sent=to, received=back)
        pending.wait(group.timeout_s)
        return found

    return apply_linear(
        x,
        lambda rows: exchanged(rows, sent, received),
        lambda rows: exchanged(rows, received, sent),
    )


def _gather_and_sum(group: Group) -> tuple[Map, Map]:
    """Return an all-gather of positions, and its transpose, a reduce-scatter."""
    return (
        lambda part: all_gather(part.contiguous(), group),
        lambda whole: reduce_scatter(whole.contiguous(), group),
    )


def _own_and_gather(group: Group) -> tuple[Map, Map]:
    """Return the choice of this rank's rows of an equal tensor, and the all-gather as its transpose."""
    return (
        lambda whole: whole.chunk(group.size)[group.index],
        lambda part: all_gather(part.contiguous(), group),
    )


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A clone, because autograd may give the same gradient tensor to other branches too.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        # Tells autograd that x is overwritten.
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
