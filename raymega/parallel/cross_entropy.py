"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

Logits are never gathered: ranks exchange three numbers a token. Masks and sums are the caller's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm import all_reduce
from raymega.parallel.groups import Group
from raymega.parallel.tensor import local_rows


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: Group) -> Tensor:
    """-log softmax(logits)[label] of each token.

    Args:
        logits: [S, B, V/tp] in the compute dtype.
        labels: [S, B] int64. A label outside [0, V) gives a finite loss without meaning.
        tp: The tensor-parallel ranks.

    Returns:
        [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _CrossEntropy.apply(logits, labels, tp)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and one number a token; backward makes the softmax again from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Group) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, is_elsewhere = local_rows(labels, logits.shape[-1], tp)
        peak = all_reduce(logits.amax(-1).to(wide), tp, op="max")
        shifted = _minus(logits, peak)
        picked = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0.0)
        sum_exp, picked = all_reduce(torch.stack((shifted.exp_().sum(-1), picked)), tp)
        log_sum = sum_exp.log()
        ctx.save_for_backward(logits, peak + log_sum, rows, is_elsewhere)
        return log_sum - picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """d loss / d logits = softmax - one-hot of the label."""
        logits, log_sum_exp, rows, is_elsewhere = ctx.saved_tensors
        softmax = _minus(logits, log_sum_exp).exp_()
        one = (~is_elsewhere).to(softmax.dtype)
        softmax.scatter_add_(-1, rows.unsqueeze(-1), -one.unsqueeze(-1))
        return softmax.mul_(grad.unsqueeze(-1)).to(logits.dtype), None, None


def _minus(logits: Tensor, numbers: Tensor) -> Tensor:
    """logits: [S, B, V/tp] less one of ``numbers`` [S, B] a token, in their format.

    A mixed subtraction would widen the logits into a buffer of its own: twice the memory to fill.
    """
    if logits.dtype == numbers.dtype:
        return logits - numbers.unsqueeze(-1)
    return logits.to(numbers.dtype).sub_(numbers.unsqueeze(-1))
