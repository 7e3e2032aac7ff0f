"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

Logits are never gathered: ranks exchange three numbers a token. Masks and sums over tokens are the
caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.compile import fused
from raymega.parallel.tensor_parallel.vocab_embedding import local_rows

PORTION = 2**18
"""Logits that are worked on at once on a CPU: 1 MiB in float32."""


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
    logits: Tensor, labels: Tensor, tp: Group, terms: LossTerms, *, is_fused: bool = False
) -> Tensor:
    """The loss of each token.

    Args:
        logits: [S, B, V/tp] in the compute dtype; V padded. Overwritten: nobody else may need them.
        labels: [S, B] int64. A label outside [0, V) gives a finite loss without meaning.
        tp: The tensor-parallel ranks.
        terms: What the loss is made of.
        is_fused: By compiled kernels, one forward and one backward.

    Returns:
        [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _CrossEntropy.apply(logits, labels, tp, terms, is_fused)


def num_real_columns(num_columns: int, tp: Group, vocab_size: int) -> int:
    """How many of this rank's columns are tokens; the rest, its last ones, are padding."""
    return min(max(vocab_size - num_columns * tp.index, 0), num_columns)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits' memory and one number a token, and gives the gradient in the same memory.

    In max(fp32, dtype) the exponentials are made there too, with the rank's own peak: a portion is
    read from memory once. Logits of fewer bits stay as they are, and so do all where kernels are
    compiled, which read them once in either direction; backward makes the exponentials again.
    """

    @staticmethod
    def forward(  # autograd gives them one by one
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        tp: Group,
        terms: LossTerms,
        is_fused: bool,  # noqa: FBT001
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, is_elsewhere = local_rows(labels, logits.shape[-1], tp)
        num_real = num_real_columns(logits.shape[-1], tp, terms.vocab_size)
        real = logits[..., :num_real]
        picked = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1).to(wide)
        ctx.is_fused = is_fused and num_real > 0
        if ctx.is_fused:
            own_peak, sum_exp, total = fused(_row_sums, is_on=True)(real.detach())
        else:
            own_peak, sum_exp, total = _row_sums_in_portions(real, terms)
        peak = all_reduce(own_peak.clone(), tp, op="max")
        # Of a rank that has padding only, whose own peak is -inf, the sums are 0.
        lift = (own_peak - peak).clamp_(min=torch.finfo(wide).min)
        scale = lift.exp()
        sum_exp.mul_(scale)
        aim = (picked - peak).masked_fill_(is_elsewhere, 0.0)
        if terms.label_smoothing:
            mean = (total + num_real * lift) / terms.vocab_size
            aim = torch.lerp(aim, mean, terms.label_smoothing)
        sum_exp, aim = all_reduce(torch.stack((sum_exp, aim)), tp)
        log_sum = sum_exp.log()
        log_sum_exp = peak + log_sum
        ctx.is_as_it_was = ctx.is_fused or logits.dtype != wide
        number = (
            log_sum_exp if ctx.is_as_it_was else _z_factor(log_sum_exp, terms) / sum_exp * scale
        )
        ctx.save_for_backward(logits, number, rows, is_elsewhere)
        ctx.terms, ctx.num_real = terms, num_real
        loss = log_sum - aim
        return loss + terms.z_loss * log_sum_exp.square() if terms.z_loss else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """softmax * (1 + 2 z log_sum_exp) - (1 - a) * one-hot of the label - a / V."""
        logits, number, rows, is_elsewhere = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        factor = grad * (_z_factor(number, terms) if ctx.is_as_it_was else number)
        at_label = torch.where(is_elsewhere, 0.0, grad * (terms.label_smoothing - 1.0))
        everywhere = grad * (terms.label_smoothing / terms.vocab_size)
        if ctx.is_fused:
            _to_gradient(logits, number, rows, (factor, at_label, everywhere))
            logits[..., ctx.num_real :] = 0.0
            return logits, None, None, None, None
        for part in _portions(logits):
            kept = logits[part]
            softmax = _minus(kept, number[part]).exp_() if ctx.is_as_it_was else kept
            grad_logits = softmax.mul_(factor[part].unsqueeze(-1))
            grad_logits.scatter_add_(-1, rows[part].unsqueeze(-1), at_label[part].unsqueeze(-1))
            if terms.label_smoothing:
                grad_logits.sub_(everywhere[part].unsqueeze(-1))
            grad_logits[..., ctx.num_real :] = 0.0
            if ctx.is_as_it_was:
                kept.copy_(grad_logits)
        return logits, None, None, None, None


def _row_sums(real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token's logits x [S, B, columns]: p = max x, sum of exp(x - p), sum of x - p."""
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    peak = wide.amax(-1)
    shifted = wide - peak.unsqueeze(-1)
    return peak, shifted.exp().sum(-1), shifted.sum(-1)


def _row_sums_in_portions(real: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own kernels, the last where ``terms`` wants it; in max(fp32, dtype) x becomes exp(x - p)."""
    wide = torch.promote_types(real.dtype, torch.float32)
    peak, sum_exp, total = (real.new_empty(real.shape[:-1], dtype=wide) for _ in range(3))
    for part in _portions(real):
        peak[part] = _peak(real[part])
        shifted = _minus(real[part], peak[part])
        if terms.label_smoothing:
            total[part] = shifted.sum(-1)
        sum_exp[part] = shifted.exp_().sum(-1)
    return peak, sum_exp, total


def _to_gradient(
    logits: Tensor, number: Tensor, rows: Tensor, factors: tuple[Tensor, Tensor, Tensor]
) -> None:
    """In place, in one pass; a token's own label, which another rank may have, is put in after it.

    Args:
        logits: [S, B, V/tp].
        number: [S, B], log of the sum of exponentials.
        rows: [S, B], columns of the labels.
        factors: Each [S, B], of the softmax, of the label, and of every column.
    """
    factor, at_label, everywhere = factors
    columns = rows.unsqueeze(-1)
    at_columns = _minus(logits.gather(-1, columns).to(number.dtype), number).exp_().squeeze(-1)
    at_columns.mul_(factor).add_(at_label).sub_(everywhere)
    fused(_softmax_gradient, is_on=True)(logits.detach(), number, factor, everywhere)
    tokens = torch.arange(rows.numel(), device=rows.device)
    # Not scatter_, which on a CPU makes a copy of all logits and copies it back.
    by_token = logits.detach().flatten(0, 1)
    by_token[tokens, rows.flatten()] = at_columns.to(logits.dtype).flatten()


def _softmax_gradient(logits: Tensor, number: Tensor, factor: Tensor, everywhere: Tensor) -> None:
    softmax = (logits.to(number.dtype) - number.unsqueeze(-1)).exp()
    logits.copy_(softmax * factor.unsqueeze(-1) - everywhere.unsqueeze(-1))


def _portions(logits: Tensor) -> Iterator[slice]:
    """Slices of dim 0, so that what is made of one stays in a CPU's cache; one slice on a GPU.

    A temporary as large as the logits costs more than the arithmetic: the system fills it with zeros.
    """
    per_position = logits[0].numel()
    step = len(logits) if logits.is_cuda else max(1, PORTION // max(1, per_position))
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def _z_factor(log_sum_exp: Tensor, terms: LossTerms) -> Tensor | float:
    """By what the z-loss multiplies the softmax in the gradient."""
    return 1.0 + 2.0 * terms.z_loss * log_sum_exp if terms.z_loss else 1.0


def _peak(real: Tensor) -> Tensor:
    """Largest logit of each token, -inf on a rank that has padding only. real: [S, B, columns]."""
    if real.shape[-1]:
        return real.amax(-1)
    return real.new_full(real.shape[:-1], -torch.inf)


def _minus(logits: Tensor, numbers: Tensor) -> Tensor:
    """logits: [S, B, V/tp] less one of ``numbers`` [S, B] a token, in their format.

    Logits of that format are overwritten. A mixed subtraction would widen others into a buffer of its
    own: twice the memory to fill.
    """
    return logits.to(numbers.dtype).sub_(numbers.unsqueeze(-1))
