"""Steps that autograd is told of: a linear map with its transpose, and a gradient for a bystander."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


def apply_linear(x: Tensor, forward: Map, transpose: Map) -> Tensor:
    """Return ``forward(x)``; the gradient of x is ``transpose`` of the result's.

    Args:
        x: What the map takes; nothing of it is kept.
        forward: A linear map, such as an all-gather.
        transpose: The map that gradients take back, such as a reduce-scatter.
    """
    return _LinearMap.apply(x, forward, transpose)


def with_gradient(x: Tensor, other: Tensor, gradient: Map) -> Tensor:
    """Return ``x`` as it is; its backward goes into ``other``, a scalar, too.

    Args:
        x: Of any shape.
        other: A loss that is not part of x.
        gradient: From the gradient of the result to that of ``other``.
    """
    return _WithGradient.apply(x, other, gradient)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, gradient: Map) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient(grad), None
