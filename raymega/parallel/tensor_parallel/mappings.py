"""Collectives that autograd can see: each function is one half of a conjugate pair.

Tensor-parallel code needs only these two sentences: where a tensor that every rank holds whole
enters work that is cut over the ranks, its gradient comes back in parts and must be summed
(`copy_to_tp`); where the parts of a sum leave that work, they are summed and the gradient is
already whole (`reduce_from_tp`). Where each rank holds its own positions only, the first becomes
`gather_positions`, the second `scatter_to_positions`. The transport itself is comm's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import all_gather, all_reduce, reduce_scatter
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.linear_map import Map, apply_linear


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Enter work that is cut over ``group``: identity forward, all-reduce backward.

    Args:
        x: Any shape, equal on all ranks of ``group``.
        group: The tensor-parallel ranks.
    """
    return x if group.size == 1 else _CopyToTp.apply(x, group)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Leave work that is cut over ``group``: all-reduce forward, identity backward.

    Args:
        x: Any shape, this rank's term of the sum; overwritten with the sum.
        group: The tensor-parallel ranks.
    """
    return x if group.size == 1 else _ReduceFromTp.apply(x, group)


def gather_positions(x: Tensor, group: Group) -> Tensor:
    """Enter work that is cut over ``group``: all-gather forward, reduce-scatter backward.

    Args:
        x: [S/tp, ...], this rank's positions.
        group: The tensor-parallel ranks.

    Returns:
        [S, ...], equal on all ranks.
    """
    return x if group.size == 1 else apply_linear(x, *_gather_and_sum(group))


def scatter_to_positions(x: Tensor, group: Group) -> Tensor:
    """Leave work that is cut over ``group``: reduce-scatter forward, all-gather backward.

    Args:
        x: [S, ...], this rank's term of the sum.
        group: The tensor-parallel ranks.

    Returns:
        [S/tp, ...], this rank's positions of the sum.
    """
    return x if group.size == 1 else apply_linear(x, *reversed(_gather_and_sum(group)))


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's part of what all ranks hold alike; backward brings the parts' gradients together.

    Args:
        x: [T, ...], equal on all ranks; their number divides T.
        group: They.

    Returns:
        [T/n, ...].
    """
    return x if group.size == 1 else apply_linear(x, *_own_and_gather(group))


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[T/n, ...] of each rank -> [T, ...] on all; backward takes own rows of a gradient that all have."""
    return x if group.size == 1 else apply_linear(x, *reversed(_own_and_gather(group)))


def _gather_and_sum(group: Group) -> tuple[Map, Map]:
    """An all-gather of positions, and its transpose."""
    return (
        lambda part: all_gather(part.contiguous(), group),
        lambda whole: reduce_scatter(whole.contiguous(), group),
    )


def _own_and_gather(group: Group) -> tuple[Map, Map]:
    """This rank's rows of a tensor that all ranks hold, and the way back."""
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
        # A clone, because autograd may hand the same gradient tensor to other branches too.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
