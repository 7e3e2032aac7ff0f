"""Grouped GEMM: rows sorted by expert, each expert's rows times its own weight.

torch's grouped_mm is one kernel on a GPU, and a loop in C++ on a CPU. On a CPU, groups of equal size are
multiplied as one batch (bmm), which is faster. Two cases that grouped_mm does not support are padded to
a batch: float64, which the tests use, and rows that are not multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from raymega.parallel.core.weight_grads import WeightGradQueue, add
from raymega.parallel.workarounds.matmul import add_outer

# limits of torch's grouped_mm
GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_ALIGNMENT_BYTES = 16
FRESH_BYTES = 2**20
"""Bytes of a result from which a CPU gets fresh memory from the system, page by page. That takes longer
than one product after another into existing sums."""


class GroupSizes(NamedTuple):
    """Sizes of the groups of rows, read once for all products with them.

    Attributes:
        counts: Number of rows of each expert, [E] int64.
        ends: End of each expert's rows, [E] int32.
        largest: Number of rows to which groups are padded as a batch; -1 where grouped_mm takes them.
    """

    counts: Tensor
    ends: Tensor
    largest: int


def group_sizes(rows: Tensor, counts: Tensor, *, inner: int, adapter_rank: int = 0) -> GroupSizes:
    """Return the sizes of the groups of ``rows`` [R, N], for products with weights [E, inner, N].

    Adapters of these weights have products of width ``adapter_rank`` too; 0 without them.

    On a GPU the host does not wait where torch's grouped_mm can be used.
    """
    widths = (rows.shape[1], inner, adapter_rank)
    has_product = rows.dtype in GROUPED_DTYPES and not any(
        width * rows.element_size() % ROW_ALIGNMENT_BYTES for width in widths
    )
    # a batch: always where grouped_mm does not apply, and on a CPU if all groups are equal
    largest = -1
    if not has_product or rows.device.type == "cpu":
        largest = max(counts.tolist())
        if has_product and counts.shape[0] * largest != rows.shape[0]:
            largest = -1
    return GroupSizes(counts, counts.cumsum(0, dtype=torch.int32), largest)


def grouped_linear(
    rows: Tensor, weight: Tensor, sizes: GroupSizes, grad_queue: WeightGradQueue
) -> Tensor:
    """Return y = x W^T for each expert's rows.

    Args:
        rows: Inputs [R, in], sorted by expert.
        weight: Weights [E, out, in].
        sizes: Sizes of the experts' groups of rows.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.

    Returns:
        Outputs [R, out].
    """
    return _GroupedLinear.apply(rows, weight, sizes, grad_queue)


def grouped_product(rows: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Multiply rows [R, in] by weights [E, in, out] of any strides -> [R, out], without autograd."""
    if sizes.largest < 0:
        return grouped_mm(rows, weight, offs=sizes.ends)
    batch, places = _as_batch(rows, sizes)
    filled = torch.bmm(batch, weight).flatten(0, 1)
    return filled if places is None else filled.index_select(0, places)


def grouped_outer(grad: Tensor, rows: Tensor, sizes: GroupSizes) -> Tensor:
    """Return each expert's sum of outer products: [R, out] and [R, in] -> [E, out, in]."""
    if sizes.largest < 0:
        return grouped_mm(grad.T, rows, offs=sizes.ends)
    return torch.bmm(_as_batch(grad, sizes)[0].mT, _as_batch(rows, sizes)[0])


class GroupedWeightGrad(NamedTuple):
    """A term of a weight's gradient, computed by :func:`grouped_outer`."""

    grad: Tensor
    rows: Tensor
    sizes: GroupSizes

    def compute(self) -> Tensor:
        return grouped_outer(self.grad, self.rows, self.sizes)

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add the term to ``total`` [E, out, in]; in place for one expert, a batch, and large sums on a CPU."""
        # one expert has all rows: an ordinary product, which on a GPU adds to wider sums too
        if total.shape[0] == 1:
            add_outer(total[0], self.grad, self.rows, is_first=is_first)
            return
        # another format, or grouped_mm, which has no accumulating form: a new tensor, then a sum
        is_uneven = self.sizes.largest < 0
        is_short = total.device.type != "cpu" or total.nbytes < FRESH_BYTES
        if total.dtype != self.rows.dtype or (is_uneven and is_short):
            add(self.compute(), total, is_first=is_first)
            return
        # large on a CPU: one addmm an expert
        if is_uneven:
            self._add_one_by_one(total, is_first=is_first)
            return
        # a batch
        batches = _as_batch(self.grad, self.sizes)[0].mT, _as_batch(self.rows, self.sizes)[0]
        if is_first:
            torch.bmm(*batches, out=total)
        else:
            total.baddbmm_(*batches)

    def _add_one_by_one(self, total: Tensor, *, is_first: bool) -> None:
        counts = self.sizes.counts.tolist()
        columns, rows = self.grad.T.split(counts, 1), self.rows.split(counts)
        for one, a, b in zip(total.unbind(0), columns, rows, strict=True):
            # beta 0 ignores what the sum held, NaN included
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
    """Return the rows as a batch [E, largest, N], padded with zeros, and each row's place in it.

    The places are None where all groups are full, so that the batch is a view.
    """
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
