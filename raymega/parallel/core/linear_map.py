"""Autograd functions: a linear map with its transpose, and an identity that feeds a second loss."""

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
        x: Input of the map; it is not saved.
        forward: A linear map, such as an all-gather.
        transpose: Map of the gradients, such as a reduce-scatter.
    """
    return _LinearMap.apply(x, forward, transpose)


def with_gradient(x: Tensor, other: Tensor, gradient: Map) -> Tensor:
    """Return ``x`` unchanged; its backward also continues into ``other``, a scalar.

    Args:
        x: Tensor of any shape.
        other: Loss that x does not depend on.
        gradient: Function from the gradient of the result to that of ``other``.
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
        # a new tensor of the same memory, so that x itself keeps its own graph
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient(grad), None
