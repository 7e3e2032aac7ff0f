"""Causal attention with dropout on its weights, step by step, for want of a kernel with our masks.

It keeps the S x S weights of every head, their mask and the dropped weights: the 5 as^2b bytes of
bf16 that fused attention does without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.core.dropout import dropout


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, *, rate: float) -> Tensor:
    """dropout(softmax(q k^T / sqrt(K))) v over earlier positions.

    Args:
        q: [B, H, S, K].
        k: [B, G, S, K]; H / G neighbouring query heads read one key head.
        v: [B, G, S, K].
        keys: [B, H, S] int64, keys of the queries' rows of weights.
        rate: Of the dropout.

    Returns:
        [B, H, S, K].
    """
    groups = k.shape[1]
    weights = _CausalWeights.apply(q.unflatten(1, (groups, -1)), k)
    kept = dropout(weights, keys.unflatten(1, (groups, -1)), rate=rate)
    # One product a key head: a broadcast k or v would be copied, and kept, once a query head.
    return _Product.apply(kept.flatten(2, 3), v).unflatten(2, kept.shape[2:4]).flatten(1, 2)


class _CausalWeights(torch.autograd.Function):
    """softmax(q k^T / sqrt(K)), keeping q, k and the weights only: neither scores nor a mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        """q: [B, G, R, S, K], k: [B, G, S, K] -> [B, G, R, S, S]."""
        ctx.scale = q.shape[-1] ** -0.5
        scores = (q.flatten(2, 3) @ k.mT).mul_(ctx.scale).unflatten(2, q.shape[2:4])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        # In a narrow format the kernel still exponentiates and sums in fp32.
        weights = scores.masked_fill_(later, float("-inf")).softmax(-1)
        ctx.save_for_backward(q, k, weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k, weights = ctx.saved_tensors
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        grad = grad.mul_(ctx.scale).flatten(2, 3)
        return (grad @ k).unflatten(2, q.shape[2:4]), grad.mT @ q.flatten(2, 3)


class _Product(torch.autograd.Function):
    """a @ b, keeping both as they are: torch's would keep a copy of a b that is cut out of qkv."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad
