"""Rows by expert: from tokens that chose experts to rows that lie together, and back.

All of it is sorts and index operations on the device. Every choice of every token has at most one
row, so gradients are gathered too and never added by atomics: equal runs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.core.linear_map import apply_linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Where the choices of T tokens lie in R rows that are sorted by expert.

    Attributes:
        choices: [R] int64, which choice, t * k + j, each row is; T * k for a row that stays empty.
        sources: [R] int64, the token of each row; T for a row that stays empty.
        slots: [T, k] int64, the row of each choice; R for one that has none.
        counts: [E] int64, rows of each expert, empty ones included.
        is_whole: There are no empty rows, and no choices without one.
    """

    choices: Tensor
    sources: Tensor
    slots: Tensor
    counts: Tensor
    is_whole: bool


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen: [E] int64; the number E stands for none."""
    flat = experts.flatten()
    if flat.device.type == "cpu":  # where its look at the largest number makes nobody wait
        return flat.bincount(minlength=num_experts + 1)[:num_experts]
    counts = flat.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def permute(experts: Tensor, counts: Tensor, *, num_rows: int) -> Permutation:
    """Rows in the order of experts, those of one in the order of tokens.

    Args:
        experts: [T, k] int64, all different in a row; E where a choice was dropped.
        counts: [E] int64, how often each is chosen.
        num_rows: How many choices were not dropped; or all T * k, and those that were come last.
    """
    order = experts.flatten().argsort(stable=True)[:num_rows]
    slots = _inverse(order, experts)
    return Permutation(
        choices=order,
        sources=order // experts.shape[1],
        slots=slots,
        counts=counts,
        is_whole=num_rows == experts.numel(),
    )


def permute_evenly(experts: Tensor, num_experts: int, *, capacity: int) -> Permutation:
    """The same with ``capacity`` rows for each expert, of which the last stay empty."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = count_choices(experts, num_experts)
    chosen = flat[order]
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    places = torch.arange(flat.numel(), device=flat.device) - starts[chosen]
    num_rows = num_experts * capacity
    is_placed = (chosen < num_experts) & (places < capacity)
    rows = torch.where(is_placed, chosen * capacity + places, num_rows)
    choices = flat.new_full((num_rows + 1,), flat.numel())
    choices.scatter_(0, rows, torch.where(is_placed, order, flat.numel()))
    slots = torch.empty_like(flat).scatter_(0, order, rows)
    return Permutation(
        choices=choices[:-1],
        sources=choices[:-1] // experts.shape[1],
        slots=slots.view_as(experts),
        counts=torch.full_like(counts, capacity),
        is_whole=False,
    )


def select_rows(x: Tensor, arrangement: Permutation) -> Tensor:
    """x: [T, N] -> [R, N]; empty rows are zero."""
    return apply_linear(
        x,
        lambda tokens: rows_of_tokens(tokens, arrangement),
        lambda grad: sum_of_rows(grad.contiguous(), arrangement),
    )


def unpermute(rows: Tensor, weights: Tensor, arrangement: Permutation) -> Tensor:
    """The weighted sum of each token's rows, added up in the weights' dtype or the rows' if wider.

    Args:
        rows: [R, N].
        weights: [T, k].
        arrangement: Of the rows.

    Returns:
        [T, N] in the rows' dtype; zero for a token without rows.
    """
    return _WeighRows.apply(rows, weights, arrangement)


def reorder_rows(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """x[order] where ``order`` is a permutation of rows and ``back`` its inverse; x: [R, N]."""
    return apply_linear(
        x, lambda rows: rows.index_select(0, order), lambda grad: grad.index_select(0, back)
    )


def rows_of_tokens(x: Tensor, arrangement: Permutation) -> Tensor:
    """:func:`select_rows`, of which autograd is not told."""
    return _select(x.contiguous(), arrangement.sources, is_whole=arrangement.is_whole)


def sum_of_rows(rows: Tensor, arrangement: Permutation) -> Tensor:
    """Backward of :func:`select_rows`: [R, N] -> [T, N], added up in float32 or wider."""
    if _has_bag(rows, rows.dtype, arrangement):
        return _bag(rows, arrangement, None)
    first, *others = arrangement.slots.unbind(1)
    total = _select(rows, first, is_whole=arrangement.is_whole)
    total = total.to(torch.promote_types(rows.dtype, torch.float32))
    for slots in others:
        total += _select(rows, slots, is_whole=arrangement.is_whole)
    return total.to(rows.dtype)


def weighed_sum(rows: Tensor, weights: Tensor, arrangement: Permutation) -> Tensor:
    """:func:`unpermute`, of which autograd is not told."""
    if _has_bag(rows, weights.dtype, arrangement):
        return _bag(rows, arrangement, weights.flatten())
    slots, columns = arrangement.slots.unbind(1), weights.unsqueeze(2).unbind(1)
    is_whole = arrangement.is_whole
    total = _select(rows, slots[0], is_whole=is_whole) * columns[0]
    for places, weight in zip(slots[1:], columns[1:], strict=True):
        total.addcmul_(_select(rows, places, is_whole=is_whole).to(total.dtype), weight)
    return total.to(rows.dtype)


def weighed_sum_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, arrangement: Permutation
) -> tuple[Tensor, Tensor]:
    """Backward of :func:`unpermute`: [T, N] -> [R, N] and [T, k]."""
    is_whole, of_rows = arrangement.is_whole, rows_of_tokens(grad, arrangement)
    products = (rows * of_rows).sum(1, dtype=weights.dtype)
    grad_weights = _select(products, arrangement.slots.flatten(), is_whole=is_whole)
    weight = _select(weights.flatten(), arrangement.choices, is_whole=is_whole)
    if weight.dtype == of_rows.dtype:
        grad_rows = of_rows.mul_(weight.unsqueeze(1))
    else:
        grad_rows = (of_rows * weight.unsqueeze(1)).to(rows.dtype)
    return grad_rows, grad_weights.view_as(weights)


class _WeighRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, arrangement: Permutation) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.arrangement = arrangement
        return weighed_sum(rows, weights, arrangement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        return *weighed_sum_gradients(grad, rows, weights, ctx.arrangement), None


def _has_bag(rows: Tensor, dtype: torch.dtype, arrangement: Permutation) -> bool:
    """torch's one kernel for sums of rows can be used, and it adds up in the dtype that is promised."""
    is_wide = rows.dtype == dtype and dtype in (torch.float32, torch.float64)
    return is_wide and arrangement.is_whole and rows.device.type == "cpu"


@lru_cache(maxsize=16)
def _starts(num_tokens: int, top_k: int) -> Tensor:
    """Where each token's choices begin, on the CPU; made once for all layers and micro-batches."""
    return torch.arange(0, num_tokens * top_k, top_k)


def _bag(rows: Tensor, arrangement: Permutation, weights: Tensor | None) -> Tensor:
    """Each token's rows, each by its weight: [T, N]. weights: [T * k]."""
    slots = arrangement.slots
    starts = _starts(*slots.shape)
    return torch.embedding_bag(rows, slots.flatten(), starts, False, 0, False, weights)[0]  # noqa: FBT003


def _select(x: Tensor, rows: Tensor, *, is_whole: bool) -> Tensor:
    """x[rows], and zero for the number behind the last row. x: [N, ...], rows: [R] -> [R, ...]."""
    if is_whole:
        return x.index_select(0, rows)
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], *x.shape[1:])
    is_none = rows >= x.shape[0]
    taken = x.index_select(0, rows.clamp(max=x.shape[0] - 1))
    return taken.masked_fill_(is_none.view(-1, *[1] * (x.dim() - 1)), 0.0)


def _inverse(order: Tensor, experts: Tensor) -> Tensor:
    """Slots of an order of some choices."""
    num_rows = order.shape[0]
    slots = experts.new_full((experts.numel(),), num_rows)
    slots.scatter_(0, order, torch.arange(num_rows, device=order.device))
    return slots.view_as(experts)
