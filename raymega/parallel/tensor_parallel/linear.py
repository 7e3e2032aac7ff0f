"""Products of linear layers cut over the tensor-parallel ranks, with their gradients and messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from raymega.parallel.comm.work import Work
from raymega.parallel.core.weight_grads import WeightGradQueue, accumulate_bias_grad
from raymega.parallel.tensor_parallel.overlap import (
    gather_and_project,
    multiply_blocks,
    project_and_sum,
    start_gather_blocks,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.workarounds.matmul import add_outer, is_emulated, outer, product, project
from raymega.parallel.workarounds.output_cache import CpuOutputCache


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sp: SequenceParallel,
    grad_queue: WeightGradQueue,
    *,
    kept: CpuOutputCache | None = None,
) -> Tensor:
    """Return a column-parallel linear: `copy_to_tp` or `gather_positions`, then `linear`, with overlap.

    Only the rank's own part of x is saved. Backward gathers it again while the input's gradient is
    computed, and sums that gradient while the weight's is computed.

    Args:
        x: Input [S/sp, B, in].
        weight: Weight [out/tp, in].
        bias: Bias [out/tp] or None.
        sp: Placement of x on the tensor-parallel ranks.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.
        kept: Cache of memory for large outputs on CPUs; None allocates new memory.

    Returns:
        Output [S, B, out/tp].
    """
    if sp.tp.size == 1:
        return whole_linear(x.contiguous(), weight, bias, grad_queue, kept=kept)
    return _ColumnLinear.apply(x.contiguous(), weight, bias, sp, grad_queue, kept)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sp: SequenceParallel,
    grad_queue: WeightGradQueue,
) -> Tensor:
    """Return a row-parallel linear: `linear`, then the sum of all ranks' terms, then the bias once.

    Args:
        x: Input [S, B, in/tp].
        weight: Weight [out, in/tp].
        bias: Bias [out] or None.
        sp: Placement of the result on the tensor-parallel ranks.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.

    Returns:
        Output [S/sp, B, out].
    """
    if sp.tp.size == 1:
        return whole_linear(x, weight, bias, grad_queue)
    return _RowLinear.apply(x, weight, bias, sp, grad_queue)


def whole_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_queue: WeightGradQueue,
    *,
    kept: CpuOutputCache | None = None,
) -> Tensor:
    """Return a linear on one rank. x: [..., in], weight: [out, in], bias: [out] or None -> [..., out]."""
    # torch sums a bias's gradient in the layer's format; in float16 a sum over tokens may overflow.
    is_narrow = bias is not None and x.dtype == torch.float16
    if grad_queue.leaves_to_autograd(weight) and not is_emulated(x) and not is_narrow:
        return linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, grad_queue, kept)


class LinearWeightGrad(NamedTuple):
    """A term of W's gradient in y = x W^T, from the gradient of y. grad: [..., out], x: [..., in]."""

    grad: Tensor
    x: Tensor

    def compute(self) -> Tensor:
        """Return the term, [out, in]."""
        return outer(self.grad.flatten(0, -2), self.x.flatten(0, -2))

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add the term to ``total`` [out, in]; the first overwrites."""
        add_outer(total, self.grad.flatten(0, -2), self.x.flatten(0, -2), is_first=is_first)


class _Linear(torch.autograd.Function):
    """y = x W^T + b on one rank, with a weight gradient that may be deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad_queue: WeightGradQueue,
        kept: CpuOutputCache | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias, ctx.grad_queue = weight, bias, grad_queue
        return project(x, weight, bias, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, LinearWeightGrad(grad, x))
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        return product(grad, weight), grad_weight, grad_bias, None, None


class _GatheredProducts(NamedTuple):
    """A LinearWeightGrad that gathers x from this rank's ``part``; the gather may already be pending."""

    grad: Tensor
    part: Tensor
    sp: SequenceParallel
    gather: tuple[Tensor, Work] | None

    def compute(self) -> Tensor:
        return self._whole().compute()

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        self._whole().add_to(total, is_first=is_first)

    def _whole(self) -> LinearWeightGrad:
        x, gathering = self.gather or self.sp.start_gather(self.part)
        gathering.wait(self.sp.tp.timeout_s)
        return LinearWeightGrad(self.grad, x)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  # see column_linear
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sp: SequenceParallel,
        grad_queue: WeightGradQueue, kept: CpuOutputCache | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias = weight, bias
        ctx.sp, ctx.grad_queue = sp, grad_queue
        if sp.overlaps:
            return gather_and_project(x, weight, bias, sp, kept)
        # x is needed whole at once, so this gather is exposed; backward's overlaps
        whole, gathering = sp.start_gather(x)
        gathering.wait(sp.tp.timeout_s)
        return project(whole, weight, bias, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # gather x for the weight's gradient; a deferred gradient gathers later, to keep only a part of x
        is_later = ctx.grad_queue.is_open or not weight.requires_grad
        gather = None if is_later else ctx.sp.start_gather(x)
        # gradient of the input, whose sum over tp overlaps with the weight's gradient
        grad_x, summing = ctx.sp.start_sum(product(grad, weight))
        term = _GatheredProducts(grad, x, ctx.sp, gather)
        # gradients of weight and bias
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, term)
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        summing.wait(ctx.sp.tp.timeout_s)
        return grad_x, grad_weight, grad_bias, None, None, None


class _RowLinear(torch.autograd.Function):
    """Row-parallel linear: each rank's term of y, their sum, then the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sp: SequenceParallel,
        grad_queue: WeightGradQueue,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias = weight, bias
        ctx.sp, ctx.grad_queue = sp, grad_queue
        if sp.overlaps:
            y = project_and_sum(x, weight, sp)
            return y if bias is None else y.add_(bias)
        y, summing = sp.start_sum(project(x, weight, None))
        summing.wait(sp.tp.timeout_s)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sp.overlaps:
            grads = _overlapped_row_backward(ctx, grad.contiguous(), x, weight)
            return *grads, accumulate_bias_grad(ctx.bias, grad), None, None
        # the gradients of all positions, gathered while the bias's gradient is summed
        whole, gathering = ctx.sp.start_gather(grad.contiguous())
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        gathering.wait(ctx.sp.tp.timeout_s)
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, LinearWeightGrad(whole, x))
        return product(whole, weight), grad_weight, grad_bias, None, None


def _overlapped_row_backward(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x, by blocks; the weight's is held back for the next layer's messages."""
    whole, blocks = start_gather_blocks(grad, ctx.sp)
    # what the layer behind this one has held back runs while the first blocks travel
    ctx.grad_queue.run_held()
    grad_x = multiply_blocks(whole, blocks, weight, ctx.sp)
    return grad_x, ctx.grad_queue.hold(ctx.param, LinearWeightGrad(whole, x))
