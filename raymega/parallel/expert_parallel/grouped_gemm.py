"""Grouped linear: rows that lie together by expert, each expert's times its own weight.

torch's grouped matrix product is one kernel on a GPU, and on a CPU one product after another in C++.
Where all groups are equally large on a CPU, they are one batch, which costs less than the calls; and in
float64, in which the proofs run and which it does not know, they are filled up to be one, as are
rows that do not begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from raymega.parallel.core.weight_grads import WeightGradQueue, add

GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_ALIGNMENT_BYTES = 16
FRESH_BYTES = 2**20
"""From here on a CPU's memory for a result comes fresh from the system, page by page, which takes longer
than one product after another into sums that are there."""


class GroupSizes(NamedTuple):
    """How the rows lie, read once for all products with them.

    ``counts`` [E] int64 are rows of each expert, ``ends`` [E] int32 where its rows end; ``largest`` is
    what groups are filled up to as a batch, -1 where torch's grouped product takes them as they are.
    """

    counts: Tensor
    ends: Tensor
    largest: int


def group_sizes(rows: Tensor, counts: Tensor, *, inner: int) -> GroupSizes:
    """Sizes of the groups of ``rows`` [R, N], which go through products with [E, inner, N].

    On a GPU the host waits for nothing where torch's grouped product can be used.
    """
    widths = (rows.shape[1], inner)
    has_product = rows.dtype in GROUPED_DTYPES and not any(
        width * rows.element_size() % ROW_ALIGNMENT_BYTES for width in widths
    )
    largest = -1
    if not has_product or rows.device.type == "cpu":
        largest = max(counts.tolist())
        if has_product and counts.shape[0] * largest != rows.shape[0]:
            largest = -1
    return GroupSizes(counts, counts.cumsum(0, dtype=torch.int32), largest)


def grouped_linear(
    rows: Tensor, weight: Tensor, sizes: GroupSizes, grad_queue: WeightGradQueue
) -> Tensor:
    """y = x W^T, expert by expert.

    Args:
        rows: [R, in], sorted by expert.
        weight: [E, out, in].
        sizes: Of the experts' rows.
        grad_queue: Takes the weight's gradient when it is put off.

    Returns:
        [R, out].
    """
    return _GroupedLinear.apply(rows, weight, sizes, grad_queue)


def grouped_product(rows: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """rows: [R, in], weight: [E, in, out] of any strides -> [R, out]; autograd is not told."""
    if sizes.largest < 0:
        return grouped_mm(rows, weight, offs=sizes.ends)
    batch, places = _as_batch(rows, sizes)
    filled = torch.bmm(batch, weight).flatten(0, 1)
    return filled if places is None else filled.index_select(0, places)


def grouped_outer(grad: Tensor, rows: Tensor, sizes: GroupSizes) -> Tensor:
    """Each expert's sum of outer products: [R, out] and [R, in] -> [E, out, in]."""
    if sizes.largest < 0:
        return grouped_mm(grad.T, rows, offs=sizes.ends)
    return torch.bmm(_as_batch(grad, sizes)[0].mT, _as_batch(rows, sizes)[0])


class GroupedWeightGrad(NamedTuple):
    """The term of a weight's gradient: see :func:`grouped_outer`."""

    grad: Tensor
    rows: Tensor
    sizes: GroupSizes

    def compute(self) -> Tensor:
        return grouped_outer(self.grad, self.rows, self.sizes)

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """total: [E, out, in]; what is one batch, or long on a CPU, is added where it lies."""
        is_uneven = self.sizes.largest < 0
        is_short = total.device.type != "cpu" or total.nbytes < FRESH_BYTES
        if total.dtype != self.rows.dtype or (is_uneven and is_short):
            add(self.compute(), total, is_first=is_first)
            return
        if is_uneven:
            self._add_one_by_one(total, is_first=is_first)
            return
        batches = _as_batch(self.grad, self.sizes)[0].mT, _as_batch(self.rows, self.sizes)[0]
        if is_first:
            torch.bmm(*batches, out=total)
        else:
            total.baddbmm_(*batches)

    def _add_one_by_one(self, total: Tensor, *, is_first: bool) -> None:
        counts = self.sizes.counts.tolist()
        columns, rows = self.grad.T.split(counts, 1), self.rows.split(counts)
        for one, a, b in zip(total.unbind(0), columns, rows, strict=True):
            one.addmm_(a, b, beta=0 if is_first else 1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: GroupSizes, grad_queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.param, ctx.sizes, ctx.grad_queue = weight, sizes, grad_queue
        return grouped_product(rows, weight.mT, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (rows, weight), sizes, grad = ctx.saved_tensors, ctx.sizes, grad.contiguous()
        grad_weight = ctx.grad_queue.accumulate_or_defer(
            ctx.param, GroupedWeightGrad(grad, rows, sizes)
        )
        return grouped_product(grad, weight, sizes), grad_weight, None, None


def _as_batch(rows: Tensor, sizes: GroupSizes) -> tuple[Tensor, Tensor | None]:
    """[E, largest, N], zero where there are no rows; and where each row lies in it, if not in order."""
    counts, largest = sizes.counts, sizes.largest
    num_experts, width = counts.shape[0], rows.shape[1]
    if num_experts * largest == rows.shape[0]:
        return rows.view(num_experts, largest, width), None
    experts = torch.arange(num_experts, device=counts.device)
    of_rows = experts.repeat_interleave(counts, output_size=rows.shape[0])
    starts = counts.cumsum(0) - counts
    places = torch.arange(rows.shape[0], device=rows.device) - starts[of_rows] + of_rows * largest
    batch = rows.new_zeros(num_experts * largest, width)
    batch.index_copy_(0, places, rows)
    return batch.view(num_experts, largest, width), places
