"""Permutation of tokens into rows sorted by expert, and back.

It consists of sorts and index operations on the device. Each choice of each token has at most one row,
so gradients are gathers too, without atomic adds, and each sum here has one order.
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
    """Map between the k choices of T tokens and R rows that are sorted by expert.

    Attributes:
        choices: Choice of each row, t * k + j, [R] int64; T * k for a row that stays empty.
        sources: Token of each row, [R] int64; T for a row that stays empty.
        slots: Row of each choice, [T, k] int64; R for a choice without a row.
        counts: Number of rows of each expert, [E] int64, empty ones included.
        is_whole: True where no row is empty, and every choice has a row.
    """

    choices: Tensor
    sources: Tensor
    slots: Tensor
    counts: Tensor
    is_whole: bool


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, [E] int64; number E is a dropped choice."""
    flat = experts.flatten()
    if flat.device.type == "cpu":  # bincount reads the largest number, a host sync on a GPU
        return flat.bincount(minlength=num_experts + 1)[:num_experts]
    counts = flat.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def permute(experts: Tensor, counts: Tensor, *, num_rows: int) -> Permutation:
    """Return the permutation into rows sorted by expert, and by token within an expert.

    Args:
        experts: Chosen experts [T, k] int64, all different within a token; E where a choice was dropped.
        counts: Number of choices of each expert, [E] int64.
        num_rows: Number of choices that were not dropped; or T * k, with dropped ones in the last rows.
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
    """Return the permutation with ``capacity`` rows for each expert, the last of which may stay empty."""
    # place of each choice among those of its expert
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = count_choices(experts, num_experts)
    chosen = flat[order]
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    places = torch.arange(flat.numel(), device=flat.device) - starts[chosen]
    # its row; choices that were dropped or exceed the capacity get the extra row num_rows
    num_rows = num_experts * capacity
    is_placed = (chosen < num_experts) & (places < capacity)
    rows = torch.where(is_placed, chosen * capacity + places, num_rows)
    # both directions of the map; the extra row is cut off
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
    """Gather the tokens x [T, N] into rows [R, N]; empty rows are zero."""
    return apply_linear(
        x,
        lambda tokens: rows_of_tokens(tokens, arrangement),
        lambda grad: sum_of_rows(grad.contiguous(), arrangement),
    )


def unpermute(rows: Tensor, weights: Tensor, arrangement: Permutation) -> Tensor:
    """Return the weighted sum of each token's rows, summed in the wider of both dtypes.

    Args:
        rows: Outputs of the experts, [R, N].
        weights: Weight of each choice, [T, k].
        arrangement: Permutation of the rows.

    Returns:
        Sums [T, N] in the rows' dtype; zero for a token without rows.
    """
    return _WeighRows.apply(rows, weights, arrangement)


def reorder_rows(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return x[order] of x [R, N], where ``order`` is a permutation of rows and ``back`` its inverse."""
    return apply_linear(
        x, lambda rows: rows.index_select(0, order), lambda grad: grad.index_select(0, back)
    )


def rows_of_tokens(x: Tensor, arrangement: Permutation) -> Tensor:
    """Gather as :func:`select_rows` does, without autograd."""
    return _select(x.contiguous(), arrangement.sources, is_whole=arrangement.is_whole)


def sum_of_rows(rows: Tensor, arrangement: Permutation) -> Tensor:
    """Return each token's sum of rows, [R, N] -> [T, N], in float32 or wider: select_rows backward."""
    if _has_bag(rows, rows.dtype, arrangement):
        return _bag(rows, arrangement, None)
    # one choice of all tokens at a time, always in the same order
    first, *others = arrangement.slots.unbind(1)
    total = _select(rows, first, is_whole=arrangement.is_whole)
    total = total.to(torch.promote_types(rows.dtype, torch.float32))
    for slots in others:
        total += _select(rows, slots, is_whole=arrangement.is_whole)
    return total.to(rows.dtype)


def weighed_sum(rows: Tensor, weights: Tensor, arrangement: Permutation) -> Tensor:
    """Sum as :func:`unpermute` does, without autograd."""
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
    """Return the gradients of rows [R, N] and weights [T, k] from ``grad`` [T, N]: unpermute backward."""
    is_whole, of_rows = arrangement.is_whole, rows_of_tokens(grad, arrangement)
    # gradient of the weights: product of each row with its token's gradient
    products = (rows * of_rows).sum(1, dtype=weights.dtype)
    grad_weights = _select(products, arrangement.slots.flatten(), is_whole=is_whole)
    # gradient of the rows: the token's gradient times the choice's weight
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
    """Return whether embedding_bag applies: a CPU, no empty rows, and sums in the promised dtype."""
    is_wide = rows.dtype == dtype and dtype in (torch.float32, torch.float64)
    return is_wide and arrangement.is_whole and rows.device.type == "cpu"


@lru_cache(maxsize=16)
def _starts(num_tokens: int, top_k: int) -> Tensor:
    """Return the first choice of each token, on the CPU; cached for all layers and micro-batches."""
    return torch.arange(0, num_tokens * top_k, top_k)


def _bag(rows: Tensor, arrangement: Permutation, weights: Tensor | None) -> Tensor:
    """Return each token's sum of rows, [T, N], weighted by ``weights`` [T * k] if given."""
    slots = arrangement.slots
    starts = _starts(*slots.shape)
    return torch.embedding_bag(rows, slots.flatten(), starts, False, 0, False, weights)[0]  # noqa: FBT003


def _select(x: Tensor, rows: Tensor, *, is_whole: bool) -> Tensor:
    """Return x[rows], with zeros for index N. x: [N, ...], rows: [R] -> [R, ...]."""
    if is_whole:
        return x.index_select(0, rows)
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], *x.shape[1:])
    is_none = rows >= x.shape[0]
    taken = x.index_select(0, rows.clamp(max=x.shape[0] - 1))
    return taken.masked_fill_(is_none.view(-1, *[1] * (x.dim() - 1)), 0.0)


def _inverse(order: Tensor, experts: Tensor) -> Tensor:
    """Return the slots [T, k] of an order of choices: its inverse, R for choices that it lacks."""
    num_rows = order.shape[0]
    slots = experts.new_full((experts.numel(),), num_rows)
    slots.scatter_(0, order, torch.arange(num_rows, device=order.device))
    return slots.view_as(experts)
