"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

Logits are never gathered: ranks exchange three numbers a token. The caller applies masks and sums over
tokens.
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
"""Number of logits that a CPU works on at once: 1 MiB in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """Terms of a token's loss.

    With p = softmax(logits) over the V real tokens, it is (1 - a) * -log p[label] plus a times the
    mean of -log p over all V, plus z_loss * log(sum of exp(logits))^2.

    Attributes:
        vocab_size: Number of real tokens, V. Columns from V on are padding without probability or gradient.
        label_smoothing: Share of the uniform distribution in the target, a.
        z_loss: Weight of the last term.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Group, terms: LossTerms, *, is_fused: bool = False
) -> Tensor:
    """Return the loss of each token.

    Args:
        logits: Logits [S, B, V/tp] in the compute dtype, V padded. They are overwritten, so no other use
            may follow.
        labels: Labels [S, B] int64. A label outside [0, V) gives a finite but meaningless loss.
        tp: Tensor-parallel ranks.
        terms: Terms of the loss.
        is_fused: Use compiled kernels, one in forward and one in backward.

    Returns:
        Losses [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _CrossEntropy.apply(logits, labels, tp, terms, is_fused)


def num_real_columns(num_columns: int, tp: Group, vocab_size: int) -> int:
    """Return how many of this rank's columns are real tokens; its last columns are the padding."""
    return min(max(vocab_size - num_columns * tp.index, 0), num_columns)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy that saves the logits and one number a token, and writes the gradient into the logits.

    fp32 and wider logits are overwritten in forward by exp(logits - own peak), so each portion is read from
    memory once. Narrower logits stay as they are, and so do all with compiled kernels, which read them once
    in each direction; backward then recomputes the exponentials.
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
        # the label's logit, where this rank holds it
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, is_elsewhere = local_rows(labels, logits.shape[-1], tp)
        num_real = num_real_columns(logits.shape[-1], tp, terms.vocab_size)
        real = logits[..., :num_real]
        picked = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1).to(wide)
        # largest logit and sum of exponentials over this rank's columns
        ctx.is_fused = is_fused and num_real > 0
        if ctx.is_fused:
            own_peak, sum_exp, total = fused(_row_sums, is_on=True)(real.detach())
        else:
            own_peak, sum_exp, total = _row_sums_in_portions(real, terms)
        # first exchange: the largest logit of all ranks; rescale the sums to it
        peak = all_reduce(own_peak.clone(), tp, op="max")
        # A rank with only padding has own_peak -inf and sums of 0; the clamp avoids -inf * 0.
        lift = (own_peak - peak).clamp_(min=torch.finfo(wide).min)
        scale = lift.exp()
        sum_exp.mul_(scale)
        # second exchange: sum of exponentials, and label's logit (with smoothing, mixed with the mean)
        aim = (picked - peak).masked_fill_(is_elsewhere, 0.0)
        if terms.label_smoothing:
            mean = (total + num_real * lift) / terms.vocab_size
            aim = torch.lerp(aim, mean, terms.label_smoothing)
        sum_exp, aim = all_reduce(torch.stack((sum_exp, aim)), tp)
        log_sum = sum_exp.log()
        log_sum_exp = peak + log_sum
        # The one number a token that backward needs: log-sum-exp, or the factor of the saved exponentials.
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
        """Return the gradient: softmax * (1 + 2 z log_sum_exp) - (1 - a) * one-hot of the label - a / V."""
        logits, number, rows, is_elsewhere = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        # coefficients of the softmax, of the label, and of every column
        factor = grad * (_z_factor(number, terms) if ctx.is_as_it_was else number)
        at_label = torch.where(is_elsewhere, 0.0, grad * (terms.label_smoothing - 1.0))
        everywhere = grad * (terms.label_smoothing / terms.vocab_size)
        if ctx.is_fused:
            _to_gradient(logits, number, rows, (factor, at_label, everywhere))
            logits[..., ctx.num_real :] = 0.0
            return logits, None, None, None, None
        # uncompiled: portion by portion, in place where the format allows it
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
    """Return for each token of x [S, B, columns]: p = max x, sum of exp(x - p), sum of x - p."""
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    peak = wide.amax(-1)
    shifted = wide - peak.unsqueeze(-1)
    return peak, shifted.exp().sum(-1), shifted.sum(-1)


def _row_sums_in_portions(real: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of :func:`_row_sums` by uncompiled kernels, the last only with label smoothing.

    Logits of fp32 or wider are overwritten by exp(x - p).
    """
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
    """Overwrite the logits with their gradient by one compiled pass, then write the labels' columns.

    Args:
        logits: Logits [S, B, V/tp].
        number: Log-sum-exp of each token, [S, B].
        rows: Column of each label, [S, B].
        factors: Coefficients of the softmax, of the label, and of every column, each [S, B].
    """
    factor, at_label, everywhere = factors
    columns = rows.unsqueeze(-1)
    # the labels' columns first, as the pass overwrites their logits
    at_columns = _minus(logits.gather(-1, columns).to(number.dtype), number).exp_().squeeze(-1)
    at_columns.mul_(factor).add_(at_label).sub_(everywhere)
    fused(_softmax_gradient, is_on=True)(logits.detach(), number, factor, everywhere)
    tokens = torch.arange(rows.numel(), device=rows.device)
    # Not scatter_, which on a CPU copies all logits and copies them back.
    by_token = logits.detach().flatten(0, 1)
    by_token[tokens, rows.flatten()] = at_columns.to(logits.dtype).flatten()


def _softmax_gradient(logits: Tensor, number: Tensor, factor: Tensor, everywhere: Tensor) -> None:
    softmax = (logits.to(number.dtype) - number.unsqueeze(-1)).exp()
    logits.copy_(softmax * factor.unsqueeze(-1) - everywhere.unsqueeze(-1))


def _portions(logits: Tensor) -> Iterator[slice]:
    """Yield slices of dim 0 whose temporaries fit a CPU's cache; one slice on a GPU.

    On a CPU a temporary as large as the logits costs more than the arithmetic: the system zero-fills it.
    """
    per_position = logits[0].numel()
    step = len(logits) if logits.is_cuda else max(1, PORTION // max(1, per_position))
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def _z_factor(log_sum_exp: Tensor, terms: LossTerms) -> Tensor | float:
    """Return the factor of the softmax in the gradient, which the z-loss makes larger than 1."""
    return 1.0 + 2.0 * terms.z_loss * log_sum_exp if terms.z_loss else 1.0


def _peak(real: Tensor) -> Tensor:
    """Return the largest logit of each token of [S, B, columns]; -inf on a rank with only padding."""
    if real.shape[-1]:
        return real.amax(-1)
    return real.new_full(real.shape[:-1], -torch.inf)


def _minus(logits: Tensor, numbers: Tensor) -> Tensor:
    """Subtract each token's number [S, B] from its logits [S, B, V/tp], in the numbers' format.

    Logits of that format are overwritten. A subtraction of mixed formats would first widen the logits
    into a buffer of its own, which is twice the memory to fill.
    """
    return logits.to(numbers.dtype).sub_(numbers.unsqueeze(-1))
