"""Language-model head: residual stream to logits, and to the sum of token losses.

`train/step.py` divides the sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.tensor_parallel.cross_entropy import (
    LossTerms,
    num_real_columns,
    vocab_parallel_cross_entropy,
)
from raymega.parallel.tensor_parallel.layers import ParameterFactory, column_linear
from raymega.parallel.tensor_parallel.token_scores import (
    TokenScores,
    token_scores,
    top_tokens,
)
from raymega.parallel.workarounds.output_cache import CpuOutputCache


class Head(nn.Module):
    """Final norm and projection to the vocabulary, sharded over tp by rows of the vocabulary.

    The weight is an argument because it may be the token embedding's. In evaluation (``eval()``) the
    loss is plain cross entropy, without label smoothing and z-loss. ``further`` is the stage's
    multi-token prediction, if any.
    """

    def __init__(
        self,
        norm: nn.Module,
        weight: ShardedParameter,
        model: ModelSection,
        factory: ParameterFactory,
    ) -> None:
        super().__init__()
        self.plain_terms = LossTerms(vocab_size=model.vocab_size)
        self.training_terms = replace(
            self.plain_terms, label_smoothing=model.label_smoothing, z_loss=model.z_loss
        )
        self.further: nn.Module | None = None
        self.norm = norm
        self.weight = weight
        self.logit_scale = 1 / model.width_ratio  # muP
        self.sp = factory.sp
        self.grad_queue, self.is_fused = factory.grad_queue, factory.is_fused
        self.kept = CpuOutputCache()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to logits [S, B, V/tp] of this rank's vocabulary, without padding."""
        logits = self._padded_logits(self.norm(x))
        tp, vocab_size = self.sp.tp, self.plain_terms.vocab_size
        return logits[..., : num_real_columns(logits.shape[-1], tp, vocab_size)]

    def scores(self, x: Tensor, labels: Tensor) -> TokenScores:
        """Return the scores [S, B] of the next tokens ``labels`` [B, S], for x [S/sp, B, D]."""
        num_rows = self.weight.shape[0]
        return token_scores(self(x), labels.t(), self.sp.tp, num_rows=num_rows)

    def top_tokens(self, x: Tensor, is_asked: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits, and their tokens, at some positions.

        Args:
            x: Residual stream, [S/sp, B, D].
            is_asked: True at the n positions, [B, S] bool.
            k: Number of tokens, at most the vocabulary's.

        Returns:
            Logits in max(fp32, dtype) and ids int64, [n, k] each, by row and position.
        """
        logits = self(x).transpose(0, 1)[is_asked]
        if not len(logits):  # the same on all tensor-parallel ranks: they hold the same positions
            ids = torch.zeros(0, k, dtype=torch.int64, device=x.device)
            return ids.to(torch.promote_types(logits.dtype, torch.float32)), ids
        return top_tokens(logits, k, self.sp.tp, num_rows=self.weight.shape[0])

    def loss_sum(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the token losses where ``mask`` is 1.

        Args:
            x: Residual stream, [S/sp, B, D].
            labels: Next tokens, [B, S] int64; any number where ``mask`` is 0.
            mask: Loss mask, [B, S], 0 or 1.

        Returns:
            A scalar in max(fp32, dtype), equal on all tensor-parallel ranks.
        """
        return self.loss_sum_after_norm(self.norm(x), labels, mask)

    def loss_sum_after_norm(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Return :meth:`loss_sum` of an x that has passed the final norm."""
        terms = self.training_terms if self.training else self.plain_terms
        logits = self._padded_logits(x)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.sp.tp, terms, is_fused=self.is_fused
        )
        return (losses * mask.t().to(losses.dtype)).sum()

    def _padded_logits(self, x: Tensor) -> Tensor:
        if self.logit_scale != 1.0:
            x = x * self.logit_scale
        return column_linear(x, self.weight, None, self.sp, self.grad_queue, kept=self.kept)
