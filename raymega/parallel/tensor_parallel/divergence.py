"""Kullback-Leibler divergence between two models' next tokens, over a vocabulary that is cut over tensor-parallel ranks.

Logits are never gathered: ranks exchange five numbers a token. The caller applies masks and sums over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.tensor_parallel.cross_entropy import num_real_columns
from raymega.parallel.tensor_parallel.vocab_embedding import local_rows

LIFT, REVERSE_LIFT = 2.0**15, 2.0**6
"""Factors of a gradient that waits for backward in float16, whose numbers go from 6e-8 to 65,504."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceTerms:
    """Vocabulary, temperature and direction of a divergence.

    Attributes:
        vocab_size: Number of real tokens, V. Columns from V on are padding without probability or gradient.
        temperature: Divisor of both models' logits.
        is_reverse: False for KL(teacher || model), True for KL(model || teacher).
    """

    vocab_size: int
    temperature: float
    is_reverse: bool = False


def vocab_parallel_divergence(
    logits: Tensor, teacher: Tensor, tp: Group, terms: DivergenceTerms
) -> Tensor:
    """Return the divergence of each token; its gradient is that of the model's logits.

    Args:
        logits: Logits of the model, [S, B, V/tp] in the compute dtype, V padded; unchanged.
        teacher: Logits of the teacher, of the same shape; a constant.
        tp: Tensor-parallel ranks.
        terms: Vocabulary, temperature and direction.

    Returns:
        Divergences [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _Divergence.apply(logits, teacher, tp, terms)


def divergence_from_top(
    logits: Tensor, ids: Tensor, top: Tensor, tp: Group, terms: DivergenceTerms
) -> Tensor:
    """Return KL(teacher || model) of each token, where the teacher's distribution is that of some tokens alone.

    Args:
        logits: Logits of the model, [S, B, V/tp] in the compute dtype, V padded; unchanged.
        ids: Tokens of the teacher's distribution, [S, B, k] int64, no token twice.
        top: Logits of these by the teacher, [S, B, k].
        tp: Tensor-parallel ranks.
        terms: Vocabulary and temperature.

    Returns:
        Divergences [S, B] in max(fp32, dtype), equal on all ranks of ``tp``.
    """
    return _TopDivergence.apply(logits, ids, top, tp, terms)


class _Divergence(torch.autograd.Function):
    """Divergence that makes its gradient in forward, so that the teacher's logits are free after it."""

    @staticmethod
    def forward(  # autograd gives them one by one
        ctx: Any, logits: Tensor, teacher: Tensor, tp: Group, terms: DivergenceTerms
    ) -> Tensor:
        # log-probabilities of this rank's real columns by both models
        model_log, teacher_log = _log_probs((logits, teacher), tp, terms)
        ratio = teacher_log - model_log
        if terms.is_reverse:
            ratio.neg_()
            weights = model_log.exp_()
        else:
            weights = teacher_log.exp_()
        divergence = all_reduce((weights * ratio).sum(-1), tp)
        # temperature times the derivative by the model's logits
        if terms.is_reverse:
            gradient = weights.mul_(ratio.sub_(divergence.unsqueeze(-1)))
        else:
            gradient = model_log.exp_().sub_(weights)
        _keep(ctx, gradient, logits, terms)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the derivative by the model's logits, 0 in the padding."""
        (gradient,) = ctx.saved_tensors
        return _padded(gradient, grad * ctx.factor, ctx.num_columns), None, None, None


class _TopDivergence(torch.autograd.Function):
    """KL(teacher || model) of a teacher with k tokens, whose logits all ranks have."""

    @staticmethod
    def forward(  # autograd gives them one by one
        ctx: Any, logits: Tensor, ids: Tensor, top: Tensor, tp: Group, terms: DivergenceTerms
    ) -> Tensor:
        (model_log,) = _log_probs((logits,), tp, terms)
        teacher_log = (top.to(model_log.dtype) / terms.temperature).log_softmax(-1)
        weights = teacher_log.exp()
        # this rank's part of the sum over the k tokens: those whose columns it has
        columns, is_elsewhere = local_rows(ids, logits.shape[-1], tp)
        own = weights.masked_fill(is_elsewhere, 0.0)
        if model_log.shape[-1]:
            columns = columns.clamp(max=model_log.shape[-1] - 1)
            ratio = teacher_log - model_log.gather(-1, columns)
            divergence = all_reduce((own * ratio).sum(-1), tp)
            gradient = model_log.exp_().scatter_add_(-1, columns, -own)
        else:  # a rank of padding alone has no column of them
            divergence, gradient = all_reduce(own.new_zeros(own.shape[:-1]), tp), model_log
        _keep(ctx, gradient, logits, terms)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the derivative by the model's logits, 0 in the padding."""
        (gradient,) = ctx.saved_tensors
        return _padded(gradient, grad * ctx.factor, ctx.num_columns), None, None, None, None


def _keep(ctx: Any, gradient: Tensor, logits: Tensor, terms: DivergenceTerms) -> None:
    """Save ``gradient``, overwritten, in the format of the logits, and the factor that makes it their derivative."""
    lift = 1.0
    # The loss scale comes with backward, too late for float16: most tokens of a large vocabulary are unlikelier than
    # its smallest number. A difference of probabilities is 1 at most; one times a ratio's logarithm may be larger.
    if logits.dtype == torch.float16:
        lift = REVERSE_LIFT if terms.is_reverse else LIFT
    ctx.save_for_backward(gradient.mul_(lift).to(logits.dtype))
    ctx.factor, ctx.num_columns = 1.0 / (terms.temperature * lift), logits.shape[-1]


def _log_probs(padded: tuple[Tensor, ...], tp: Group, terms: DivergenceTerms) -> tuple[Tensor, ...]:
    """Return the log-probabilities of this rank's real columns by each model, [S, B, columns] in max(fp32, dtype)."""
    num_real = num_real_columns(padded[0].shape[-1], tp, terms.vocab_size)
    wide = torch.promote_types(padded[0].dtype, torch.float32)
    found = [each[..., :num_real].detach().to(wide) / terms.temperature for each in padded]
    # first exchange: the largest logit of all ranks; a rank of padding alone has none
    lowest = torch.finfo(wide).min
    peaks = [
        each.amax(-1) if num_real else each.new_full(each.shape[:-1], lowest) for each in found
    ]
    peak = all_reduce(torch.stack(peaks), tp, op="max").unsqueeze(-1)
    # second exchange: the sum of exponentials
    shifted = [each.sub_(top) for each, top in zip(found, peak, strict=True)]
    sums = all_reduce(torch.stack([each.exp().sum(-1) for each in shifted]), tp).log_()
    return tuple(each.sub_(total.unsqueeze(-1)) for each, total in zip(shifted, sums, strict=True))


def _padded(gradient: Tensor, factor: Tensor, num_columns: int) -> Tensor:
    """Return the gradient times each token's factor, in its own format, with columns of 0 behind it."""
    whole = gradient.new_zeros(*gradient.shape[:-1], num_columns)
    whole[..., : gradient.shape[-1]] = gradient * factor.unsqueeze(-1)
    return whole
