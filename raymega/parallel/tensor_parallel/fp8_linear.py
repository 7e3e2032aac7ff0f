"""Linear layers whose products are made in fp8, by recipes that know no layout.

rowwise: every row of what is multiplied has its own scale, over the whole inner dimension: a token's
features forward, its gradient's backward, a weight's rows and columns. So a token's numbers depend on
that token alone. Weight gradients, whose inner dimension is the tokens, stay in the compute dtype.

tensorwise: one scale for a tensor of a micro-batch, weight gradients in fp8 too, gradients in e5m2. A run with
micro-batches of another size is another run.

Where an inner dimension is cut over ranks, or the tokens are, largest magnitudes are taken over these ranks, so
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
from raymega.parallel.core.weight_grads import ComputedTerm, WeightGradQueue, accumulate_bias_grad
from raymega.parallel.tensor_parallel.fp8_tensor import (
    FORWARD,
    GRADIENT,
    Fp8Tensor,
    largest,
    product,
    quantise,
    rounding_margin,
    scale_for,
    start_gather,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel

Side = Literal["rows", "columns"]


class WeightCopies:
    """The weights of a stage in fp8, made when first used after an update.

    ``is_kept`` is false where weights are whole only in use: then each use makes its copy.
    """

    is_kept = True

    def __init__(self) -> None:
        self._copies: dict[tuple[Tensor, Side], Fp8Tensor] = {}

    def get(self, weight: Tensor, side: Side, make: Callable[[], Fp8Tensor]) -> Fp8Tensor:
        """The copy that ``make`` makes; ``side`` says along which dimension it is multiplied."""
        if not self.is_kept:
            return make()
        if (weight, side) not in self._copies:
            self._copies[weight, side] = make()
        return self._copies[weight, side]

    def forget(self) -> None:
        """Weights have changed."""
        self._copies.clear()


@dataclass(kw_only=True, slots=True)
class Margin:
    """The smallest fp8.rounding_margin seen; nothing is looked at unless ``is_watched``."""

    is_watched: bool = False
    smallest: float = inf

    def see(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """A tensor is about to be rounded."""
        if self.is_watched and x.numel():
            self.smallest = min(self.smallest, rounding_margin(x, scale, dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8:
    """How a stage's layers multiply in fp8.

    Attributes:
        by_row: rowwise; else tensorwise.
        micro: The ranks that share a micro-batch's tokens and features, tp * cp.
        is_fused: parallel.fusing compiles what makes 8 bits of a tensor.
        copies: Of the weights.
        margin: How close roundings were.
    """

    by_row: bool
    micro: Group
    is_fused: bool = False
    copies: WeightCopies = field(default_factory=WeightCopies)
    margin: Margin = field(default_factory=Margin)

    @property
    def gradient_format(self) -> torch.dtype:
        """A row of gradients has a narrow range, a tensor of them a wide one."""
        return FORWARD if self.by_row else GRADIENT

    def quantise(self, x: Tensor, cut: Group | None, dtype: torch.dtype) -> Fp8Tensor:
        """Of a micro-batch. x: [..., N], whose N is cut over ``cut``."""
        most = _largest_over(x, cut if self.by_row else self.micro, by_row=self.by_row)
        return self.by_scale(x, scale_for(most, dtype), dtype)

    def by_scale(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        """Of a scale that is known."""
        self.margin.see(x, scale, dtype)
        return quantise(x, scale, dtype, is_fused=self.is_fused)

    def rows(self, weight: Tensor, place: Fp8Placement) -> Fp8Tensor:
        """[..., out, in] for a product along ``in``."""
        over = place.inner if self.by_row else place.tp
        return self.copies.get(weight, "rows", lambda: self._of_weight(weight, over))

    def columns(self, weight: Tensor, place: Fp8Placement) -> Fp8Tensor:
        """[..., in, out] for a product along ``out``."""
        if self.by_row:
            turned = weight.detach().mT
            return self.copies.get(
                weight, "columns", lambda: self._of_weight(turned.contiguous(), place.outer)
            )
        return self.copies.get(weight, "columns", lambda: self.rows(weight, place).turned())

    def _of_weight(self, weight: Tensor, over: Group | None) -> Fp8Tensor:
        most = _largest_over(weight.detach(), over, by_row=self.by_row)
        return self.by_scale(weight.detach(), scale_for(most, FORWARD), FORWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Placement:
    """How a layer multiplies, and how it is cut.

    Attributes:
        fp8: By which recipe.
        sp: Positions are gathered from it before, and gradients summed to it after; or None.
        inner: The ranks over which input features are cut, or None.
        outer: The same of output features.
    """

    fp8: Fp8
    sp: SequenceParallel | None = None
    inner: Group | None = None
    outer: Group | None = None

    @property
    def tp(self) -> Group | None:
        """The ranks that have other parts of the weight."""
        return self.inner or self.outer


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, place: Fp8Placement, grad_queue: WeightGradQueue
) -> Tensor:
    """y = x W^T + b.

    Kept for backward is the rank's own part of x, in the compute dtype.

    Args:
        x: [S/sp, B, in] with a stream in ``place``, else [..., in/tp or in].
        weight: [out, in], this rank's part.
        bias: [out] or None.
        place: How they are multiplied and cut.
        grad_queue: Takes the weight's gradient when it is put off.

    Returns:
        [S, B, out/tp], or this rank's term of [..., out] where the input's features are cut.
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
        own = fp8.quantise(x, place.inner, FORWARD)
        ctx.save_for_backward(x)
        ctx.param, ctx.bias = weight, bias
        ctx.place, ctx.grad_queue = place, grad_queue
        ctx.scale = None if fp8.by_row else own.scale
        whole = _whole(own, place)
        y = product(whole.flat(), fp8.rows(weight, place), x.dtype)
        # No view to autograd, which refuses to let the sum over ranks overwrite one.
        y = torch.ops.aten._unsafe_view(y, (*whole.values.shape[:-1], y.shape[-1]))
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), place, fp8 = ctx.saved_tensors, ctx.place, ctx.place.fp8
        eight = fp8.quantise(grad, place.outer, fp8.gradient_format).flat()
        grad_x = product(eight, fp8.columns(ctx.param, place), x.dtype)
        grad_x = grad_x.view(*grad.shape[:-1], -1)
        summing = None
        if place.sp is not None:
            grad_x, summing = place.sp.start_sum(grad_x)

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
    """All positions of what this rank has its own of, where that is cut."""
    if place.sp is None or place.sp.degree == 1:
        return own
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


def _largest_over(x: Tensor, ranks: Group | None, *, by_row: bool) -> Tensor:
    most = largest(x, by_row=by_row)
    return most if ranks is None else all_reduce(most, ranks, "max")
