"""Grouped linear: rows that lie together by expert, each expert's times its own weight.

torch's grouped matrix product is one kernel on a GPU and one loop in C++ on a CPU. It has no float64,
in which the proofs run: there the groups are filled up to the largest and multiplied as a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from raymega.parallel.deferral import Deferral

GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral) -> Tensor:
    """y = x W^T, expert by expert.

    Args:
        rows: [R, in], sorted by expert.
        weight: [E, out, in].
        counts: [E] int64, rows of each expert; R in all.
        deferral: Takes the weight's gradient when it is put off.

    Returns:
        [R, out].
    """
    return _GroupedLinear.apply(rows, weight, counts, deferral)


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows: [R, in], weight: [E, in, out] of any strides -> [R, out]; autograd is not told."""
    if _has_kernel(rows):
        return grouped_mm(rows, weight, offs=_ends(counts))
    batch, places = _as_batch(rows, counts)
    return torch.bmm(batch, weight).flatten(0, 1).index_select(0, places)


def grouped_outer(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Each expert's sum of outer products: [R, out] and [R, in] -> [E, out, in]."""
    if _has_kernel(rows):
        return grouped_mm(grad.T, rows, offs=_ends(counts))
    return torch.bmm(_as_batch(grad, counts)[0].mT, _as_batch(rows, counts)[0])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.param, ctx.deferral = weight, deferral
        return grouped_product(rows, weight.mT, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weight = ctx.deferral.settle_or_owe(
            ctx.param, lambda: grouped_outer(grad, rows, counts)
        )
        return grouped_product(grad, weight, counts), grad_weight, None, None


def _has_kernel(rows: Tensor) -> bool:
    """What torch's kernel takes; on a GPU rows must begin at multiples of 16 bytes."""
    return rows.dtype in GROUPED_DTYPES


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _as_batch(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """[E, largest count, N], zero where there are no rows; and where each row lies in it."""
    largest = int(counts.max())
    experts = torch.arange(counts.shape[0], device=counts.device)
    of_rows = experts.repeat_interleave(counts, output_size=rows.shape[0])
    starts = counts.cumsum(0) - counts
    places = torch.arange(rows.shape[0], device=rows.device) - starts[of_rows] + of_rows * largest
    batch = rows.new_zeros(counts.shape[0] * largest, rows.shape[1])
    batch.index_copy_(0, places, rows)
    return batch.view(counts.shape[0], largest, rows.shape[1]), places
