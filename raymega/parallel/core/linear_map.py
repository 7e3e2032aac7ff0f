"""A linear map and its transpose as one step that autograd sees: each is the other's backward."""

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


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None
