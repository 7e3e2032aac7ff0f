"""Biases of routed experts, on rows sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.core.weight_grads import ComputedTerm, accumulate_grad


def add_expert_bias(rows: Tensor, bias: Tensor, counts: Tensor, *, first: int = 0) -> Tensor:
    """Return rows [R, N] with each one's expert's bias added to its columns from ``first`` on.

    Args:
        rows: Outputs of the experts' linear layers, sorted by expert.
        bias: Bias of each expert, [E, n], n <= N. Ranks that share an expert's features each add their
            own columns of its last bias, because their outputs are summed.
        counts: Number of rows of each expert, [E] int64.
        first: First column that gets a bias.

    Returns:
        [R, N].
    """
    return _AddExpertBias.apply(rows, bias, counts, first)


class _AddExpertBias(torch.autograd.Function):
    """Sum whose bias gradient is a sum over each expert's rows, in max(fp32, dtype)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor, first: int) -> Tensor:
        ctx.counts, ctx.param = counts, bias
        ctx.columns = slice(first, first + bias.shape[1])
        y = rows.clone()
        each = bias.detach().repeat_interleave(counts, 0, output_size=rows.shape[0])
        y[:, ctx.columns].add_(each)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        def sums() -> Tensor:
            wide = grad[:, ctx.columns].to(torch.promote_types(grad.dtype, torch.float32))
            return torch.segment_reduce(
                wide.contiguous(), "sum", lengths=ctx.counts, axis=0, unsafe=True, initial=0.0
            )

        return grad, accumulate_grad(ctx.param, ComputedTerm(sums)), None, None
