"""Linear layers with fp8 matrix products, by two recipes that give the same numbers on every layout.

rowwise: each row of an operand has its own scale, over the whole inner dimension: a token's features in
forward, its gradient in backward, a weight's rows and columns. So a token's numbers depend on that token
alone. Weight gradients, whose inner dimension is the tokens, stay in the compute dtype.

tensorwise: one scale for a tensor of a micro-batch. Weight gradients are in fp8 too, and gradients are
e5m2. Another micro-batch size therefore changes the numbers.

Where ranks cut an inner dimension, or the tokens, the largest magnitude is reduced over them (max), so
that scales are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.compile import fused
from raymega.parallel.core.weight_grads import ComputedTerm, WeightGradQueue, accumulate_bias_grad
from raymega.parallel.tensor_parallel.fp8_tensor import (
    FORWARD,
    GRADIENT,
    Fp8Tensor,
    largest,
    product,
    quantise,
    quantise_rows,
    rounding_margin,
    scale_for,
    start_gather,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel

Side = Literal["rows", "columns"]


class WeightCopies:
    """Cache of a stage's weights in fp8, each quantised at its first use after an update.

    ``is_kept`` is False where weights are whole only in use (ZeRO-3); then each use quantises again.
    """

    is_kept = True

    def __init__(self) -> None:
        self._copies: dict[tuple[Tensor, Side], Fp8Tensor] = {}

    def get(self, weight: Tensor, side: Side, make: Callable[[], Fp8Tensor]) -> Fp8Tensor:
        """Return the cached copy, or that of ``make``; ``side`` is the dimension of its inner product."""
        if not self.is_kept:
            return make()
        if (weight, side) not in self._copies:
            self._copies[weight, side] = make()
        return self._copies[weight, side]

    def forget(self) -> None:
        """Drop all copies, because the weights have changed."""
        self._copies.clear()


@dataclass(kw_only=True, slots=True)
class Margin:
    """The smallest :func:`rounding_margin` seen; computed only if ``is_watched``."""

    is_watched: bool = False
    smallest: float = inf

    def see(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Record the margin of ``x``, which is about to be rounded to ``dtype``."""
        if self.is_watched and x.numel():
            self.smallest = min(self.smallest, rounding_margin(x, scale, dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8:
    """The fp8 recipe of a stage's layers.

    Attributes:
        by_row: True for rowwise scales, False for tensorwise.
        micro: The tp x cp ranks, which share a micro-batch's tokens and features.
        is_fused: Compile the quantisation (`core/compile.py`).
        copies: Cache of the weights in fp8.
        margin: Record of how close values came to rounding differently.
    """

    by_row: bool
    micro: Group
    is_fused: bool = False
    copies: WeightCopies = field(default_factory=WeightCopies)
    margin: Margin = field(default_factory=Margin)

    @property
    def gradient_format(self) -> torch.dtype:
        """Format of gradients: e4m3 for a row's narrow range, e5m2 for a whole tensor's wide one."""
        return FORWARD if self.by_row else GRADIENT

    def quantise(self, x: Tensor, cut: Group | None, dtype: torch.dtype) -> Fp8Tensor:
        """Return a micro-batch's x [..., N] in fp8, with the scale reduced over ``cut``, which cuts N."""
        if self.by_row and cut is None:
            eight = quantise_rows(x, dtype, is_fused=self.is_fused)
            self.margin.see(x, eight.scale, dtype)
            return eight
        most = self._largest_over(x, cut if self.by_row else self.micro)
        return self.by_scale(x, scale_for(most, dtype), dtype)

    def by_scale(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        """Return ``x`` in fp8 with a given scale."""
        self.margin.see(x, scale, dtype)
        return quantise(x, scale, dtype, is_fused=self.is_fused)

    def rows(self, weight: Tensor, place: Fp8Placement) -> Fp8Tensor:
        """Return the weight [..., out, in] in fp8, for a product along ``in``."""
        over = place.inner if self.by_row else place.tp
        return self.copies.get(weight, "rows", lambda: self._of_weight(weight, over))

    def columns(self, weight: Tensor, place: Fp8Placement) -> Fp8Tensor:
        """Return the weight's transpose [..., in, out] in fp8, for a product along ``out``."""
        # Column scales differ from row scales. With a single scale the rows' copy is transposed.
        if self.by_row:
            turned = weight.detach().mT
            return self.copies.get(
                weight, "columns", lambda: self._of_weight(turned.contiguous(), place.outer)
            )
        return self.copies.get(weight, "columns", lambda: self.rows(weight, place).turned())

    def _of_weight(self, weight: Tensor, over: Group | None) -> Fp8Tensor:
        if self.by_row:
            return self.quantise(weight.detach(), over, FORWARD)
        most = self._largest_over(weight.detach(), over)
        return self.by_scale(weight.detach(), scale_for(most, FORWARD), FORWARD)

    def _largest_over(self, x: Tensor, ranks: Group | None) -> Tensor:
        most = fused(largest, is_on=self.is_fused and x.is_cuda)(x, by_row=self.by_row)
        return most if ranks is None else all_reduce(most, ranks, "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Placement:
    """A layer's fp8 recipe, and the ranks that cut the layer.

    Attributes:
        fp8: Recipe of the products.
        sp: Residual stream from which a column-parallel layer gathers its input, and to which it sums
            the input's gradient; None for other layers.
        inner: Ranks that cut the input features, or None.
        outer: Ranks that cut the output features, or None.
    """

    fp8: Fp8
    sp: SequenceParallel | None = None
    inner: Group | None = None
    outer: Group | None = None

    @property
    def tp(self) -> Group | None:
        """Ranks that hold the other parts of the weight."""
        return self.inner or self.outer


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, place: Fp8Placement, grad_queue: WeightGradQueue
) -> Tensor:
    """Return y = x W^T + b.

    The rank's own part of x is saved for backward, in the compute dtype.

    Args:
        x: Input [S/sp, B, in] if ``place.sp`` is set, else [..., in/tp or in].
        weight: Part of the weight that this rank holds, [out, in].
        bias: Bias [out] or None.
        place: Recipe, and the ranks that cut the layer.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.

    Returns:
        Output [S, B, out/tp], or this rank's term of [..., out] where the input features are cut.
    """
    return _Fp8Linear.apply(x.contiguous(), weight, bias, place, grad_queue)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Fp8Placement,
        grad_queue: WeightGradQueue,
    ) -> Tensor:
        fp8 = place.fp8
        # quantise before the gather, which then moves one byte a number
        own = fp8.quantise(x, place.inner, FORWARD)
        ctx.save_for_backward(x)
        ctx.param, ctx.bias = weight, bias
        ctx.place, ctx.grad_queue = place, grad_queue
        ctx.scale = None if fp8.by_row else own.scale
        whole = _whole(own, place)
        y = product(whole.flat(), fp8.rows(weight, place), x.dtype, is_fast=True)
        # Not a view for autograd, which forbids overwriting one in place, as reduce_from_tp does.
        y = torch.ops.aten._unsafe_view(y, (*whole.values.shape[:-1], y.shape[-1]))
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), place, fp8 = ctx.saved_tensors, ctx.place, ctx.place.fp8
        # gradient of the input; its sum over tp runs while the weight's gradient is computed
        eight = fp8.quantise(grad, place.outer, fp8.gradient_format).flat()
        grad_x = product(eight, fp8.columns(ctx.param, place), x.dtype)
        grad_x = grad_x.view(*grad.shape[:-1], -1)
        summing = None
        if place.sp is not None:
            grad_x, summing = place.sp.start_sum(grad_x)

        # gradient of the weight, now or deferred: in fp8 only with tensorwise scales
        def make() -> Tensor:
            if not fp8.by_row:
                whole = _whole(fp8.by_scale(x, ctx.scale, FORWARD), place).flat()
                return product(eight.turned(), whole.turned(), x.dtype)
            return grad.flatten(0, -2).T @ _gathered(x, place).flatten(0, -2)

        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, ComputedTerm(make))
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        if summing is not None:
            summing.wait(place.sp.tp.timeout_s)
        return grad_x, grad_weight, grad_bias, None, None


def _whole(own: Fp8Tensor, place: Fp8Placement) -> Fp8Tensor:
    """Return ``own`` gathered over all positions, where sequence parallelism cuts them."""
    if place.sp is None or place.sp.degree == 1:
        return own
    # Scales by row are gathered too; a tensorwise scale is already equal on all ranks.
    whole, under_way = start_gather(own, place.sp, by_row=place.fp8.by_row)
    for pending in under_way:
        pending.wait(place.sp.tp.timeout_s)
    return whole


def _gathered(x: Tensor, place: Fp8Placement) -> Tensor:
    if place.sp is None:
        return x
    whole, pending = place.sp.start_gather(x)
    pending.wait(place.sp.tp.timeout_s)
    return whole
