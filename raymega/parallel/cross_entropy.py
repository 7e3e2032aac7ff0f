"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

Logits are never gathered: ranks exchange three numbers a token. Masks and sums over tokens are the
caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm import all_reduce
from raymega.parallel.groups import Group
from raymega.parallel.tensor import local_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """What a token's loss is made of.

    With p = softmax(logits) over the V real tokens, it is (1 - a) * -log p[label] plus a times the
    mean of -log p over all of them, plus z_loss * log(sum of exp(logits))^2.

    Attributes:
        vocab_size: V. Columns from V on are padding: no probability, no gradient.
        label_smoothing: a.
        z_loss: Weight of the last term.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Group, terms: LossTerms
) -> Tensor:
    """The loss of each token.

    Args:
        logits: [S, B, V/tp] in the compute dtype; V padded.
        labels: [S, B] int64. A label outside [0, V) gives a finite loss without meaning.
        tp: The tensor-parallel ranks.
        terms: What the loss is made of.

    Returns:
        [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _CrossEntropy.apply(logits, labels, tp, terms)


def num_real_columns(num_columns: int, tp: Group, vocab_size: int) -> int:
    """How many of this rank's columns are tokens; the rest, its last ones, are padding."""
    return min(max(vocab_size - num_columns * tp.index, 0), num_columns)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and one number a token; backward makes the softmax again from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Group, terms: LossTerms) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, is_elsewhere = local_rows(labels, logits.shape[-1], tp)
        ctx.num_real = num_real_columns(logits.shape[-1], tp, terms.vocab_size)
        real = logits[..., : ctx.num_real]
        peak = all_reduce(_peak(real).to(wide), tp, op="max")
        shifted = _minus(real, peak)
        picked = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1) - peak
        aim = picked.masked_fill_(is_elsewhere, 0.0)
        if terms.label_smoothing:
            aim = torch.lerp(aim, shifted.sum(-1) / terms.vocab_size, terms.label_smoothing)
        sum_exp, aim = all_reduce(torch.stack((shifted.exp_().sum(-1), aim)), tp)
        log_sum = sum_exp.log()
        log_sum_exp = peak + log_sum
        ctx.save_for_backward(logits, log_sum_exp, rows, is_elsewhere)
        ctx.terms = terms
        loss = log_sum - aim
        return loss + terms.z_loss * log_sum_exp.square() if terms.z_loss else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """softmax * (1 + 2 z log_sum_exp) - (1 - a) * one-hot of the label - a / V."""
        logits, log_sum_exp, rows, is_elsewhere = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        grad_logits = _minus(logits, log_sum_exp).exp_()
        if terms.z_loss:
            grad_logits.mul_((1.0 + 2.0 * terms.z_loss * log_sum_exp).unsqueeze(-1))
        label = (~is_elsewhere).to(grad_logits.dtype).mul_(terms.label_smoothing - 1.0)
        grad_logits.scatter_add_(-1, rows.unsqueeze(-1), label.unsqueeze(-1))
        if terms.label_smoothing:
            grad_logits.sub_(terms.label_smoothing / terms.vocab_size)
        grad_logits.mul_(grad.unsqueeze(-1))
        grad_logits[..., ctx.num_real :] = 0.0
        return grad_logits.to(logits.dtype), None, None, None


def _peak(real: Tensor) -> Tensor:
    """Largest logit of each token, -inf on a rank that has padding only. real: [S, B, columns]."""
    if real.shape[-1]:
        return real.amax(-1)
    return real.new_full(real.shape[:-1], -torch.inf)


def _minus(logits: Tensor, numbers: Tensor) -> Tensor:
    """logits: [S, B, V/tp] less one of ``numbers`` [S, B] a token, in their format.

    A mixed subtraction would widen the logits into a buffer of its own: twice the memory to fill.
    """
    if logits.dtype == numbers.dtype:
        return logits - numbers.unsqueeze(-1)
    return logits.to(numbers.dtype).sub_(numbers.unsqueeze(-1))
