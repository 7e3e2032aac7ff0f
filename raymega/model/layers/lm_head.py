"""Language-model head: residual stream to logits, and to the sum of token losses.

`train/step.py` divides the sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from raymega.config.schema import ModelSection
from raymega.model.layers.encoder_head import PairHead
from raymega.parallel.context_parallel.context import MicroBatch
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.tensor_parallel.cross_entropy import (
    LossTerms,
    num_real_columns,
)
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.linear import column_linear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.token_scores import (
    MAX_PORTION,
    TokenScores,
    token_scores,
    top_tokens,
)
from raymega.parallel.tensor_parallel.vocab_logits import Loss, VocabLogits, cross_entropy
from raymega.parallel.workarounds.output_cache import CpuOutputCache


class Head(nn.Module):
    """Final norm and projection to the vocabulary, sharded over tp by rows of the vocabulary.

    The weight is an argument because it may be the token embedding's. In evaluation (``eval()``) the
    loss is plain cross entropy, without label smoothing and z-loss; ``training_loss`` may be a plug-in's.
    ``further`` is the stage's multi-token prediction, if any, ``segment_pairs`` an encoder's head for pairs of segments.

    Args:
        norm: Final norm; the identity in families without one.
        weight: Rows of the vocabulary, [V/tp, D].
        model: Model section of the job.
        factory: Factory of the stage's parameters.
        transform: Layer between norm and projection, of encoders; None is none.
    """

    def __init__(
        self,
        norm: nn.Module,
        weight: ShardedParameter,
        model: ModelSection,
        factory: ParameterFactory,
        transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.plain_terms = LossTerms(vocab_size=model.vocab_size)
        self.training_terms = replace(
            self.plain_terms, label_smoothing=model.label_smoothing, z_loss=model.z_loss
        )
        self.training_loss: Loss = cross_entropy
        self.further: nn.Module | None = None
        self.segment_pairs: PairHead | None = None
        self.norm, self.transform = norm, transform
        self.weight = weight
        self.bias = factory.make_if_any("head.bias")
        # muP, and a family's own divisor
        self.logit_scale = 1 / (model.width_ratio * model.multipliers.logits_scaling)
        self.softcap = model.multipliers.logit_softcap
        self.sp = factory.sp
        self.grad_queue, self.is_fused = factory.grad_queue, factory.is_fused
        self.kept = CpuOutputCache()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to logits [S, B, V/tp] of this rank's vocabulary, without padding."""
        logits = self._padded_logits(self.norm(x), self.sp)
        return logits[..., : self._num_columns(logits)]

    def scores(self, x: Tensor, micro_batch: MicroBatch) -> TokenScores:
        """Return the scores [S, B] of the labels that count, for x [S/sp, B, D]; 0 and False elsewhere."""
        labels = micro_batch.labels.t()
        # the counted positions first, in their order: a sort waits for no answer of the device, as nonzero does
        order = micro_batch.mask.t().flatten().argsort(descending=True, stable=True)
        at = order[: micro_batch.num_counted]
        logits = self._logits_at(x, at)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probs = logits.new_zeros(labels.numel(), dtype=wide)
        is_greedy = torch.zeros_like(log_probs, dtype=torch.bool)
        if len(at):  # the same on all tensor-parallel ranks: they hold the same positions
            aims, num_rows = labels.flatten()[at], self.weight.shape[0]
            found = token_scores(logits, aims, self.sp.tp, num_rows=num_rows)
            log_probs[at], is_greedy[at] = found.log_probs, found.is_greedy
        shape = labels.shape
        return TokenScores(log_probs=log_probs.view(shape), is_greedy=is_greedy.view(shape))

    def top_tokens(self, x: Tensor, is_asked: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits, and their tokens, at some positions.

        Args:
            x: Residual stream, [S/sp, B, D].
            is_asked: True at the n positions, [B, S] bool.
            k: Number of tokens, at most the vocabulary's.

        Returns:
            Logits in max(fp32, dtype) and ids int64, [n, k] each, by row and position.
        """
        # rows of [S * B] at which a token is asked for
        row, position = is_asked.nonzero(as_tuple=True)
        logits = self._logits_at(x, position * len(is_asked) + row)
        if not len(logits):  # the same on all tensor-parallel ranks: they hold the same positions
            ids = torch.zeros(0, k, dtype=torch.int64, device=x.device)
            return ids.to(torch.promote_types(logits.dtype, torch.float32)), ids
        return top_tokens(logits, k, self.sp.tp, num_rows=self.weight.shape[0])

    def largest_logits(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits of every token, and their ids, for x [S/sp, B, D]: [S, B, k] each.

        Positions are taken in portions, as the search sorts float32 copies of their logits.
        """
        columns = self.columns(x)
        flat = columns.flatten(0, 1)[:, : self._num_columns(columns)]
        portions = flat.split(max(1, MAX_PORTION // max(1, columns.shape[-1])))
        found = [top_tokens(e, k, self.sp.tp, num_rows=self.weight.shape[0]) for e in portions]
        logits, ids = (
            torch.cat(each).view(*columns.shape[:2], k) for each in zip(*found, strict=True)
        )
        return logits, ids

    def _logits_at(self, x: Tensor, at: Tensor) -> Tensor:
        """Return logits [n, V/tp], without padding, at the places ``at`` [n] of x [S/sp, B, D] as [S * B, D]."""
        hidden = self.norm(x)
        # positions that tensor-parallel ranks have cut are gathered before some of them are taken
        whole = self.sp.enter(hidden) if self.sp.degree > 1 else hidden
        asked = whole.flatten(0, 1)[at].unsqueeze(1)  # [n, 1, D]
        uncut = replace(self.sp, is_sequence_parallel=False)
        logits = self._padded_logits(asked, uncut).squeeze(1)
        return logits[..., : self._num_columns(logits)]

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
        losses = self.losses_of(self._padded_logits(x, self.sp), labels)
        return (losses * mask.t().to(losses.dtype)).sum()

    def columns(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the logits, padding included, for x [S/sp, B, D]: [S, B, V/tp]."""
        return self._padded_logits(self.norm(x), self.sp)

    def losses_of(self, columns: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label [B, S] by its logits, as the job trains: [S, B] in max(fp32, dtype).

        The logits [S, B, V/tp], those of :meth:`columns`, are overwritten.
        """
        terms = self.training_terms if self.training else self.plain_terms
        loss = self.training_loss if self.training else cross_entropy
        logits = VocabLogits(columns, tp=self.sp.tp, terms=terms, is_fused=self.is_fused)
        return loss(logits, labels.t())

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return -log p of each label [B, S], for x [S/sp, B, D]: [S, B] in max(fp32, dtype)."""
        logits = VocabLogits(
            self._padded_logits(self.norm(x), self.sp),
            tp=self.sp.tp,
            terms=self.plain_terms,
            is_fused=self.is_fused,
        )
        return cross_entropy(logits, labels.t())

    def _num_columns(self, logits: Tensor) -> int:
        """Return the number of columns of this rank's padded logits that are tokens."""
        return num_real_columns(logits.shape[-1], self.sp.tp, self.plain_terms.vocab_size)

    def _padded_logits(self, x: Tensor, sp: SequenceParallel) -> Tensor:
        """Return logits [S, B, V/tp], with padding, of x [S/sp, B, D] that lies on the ranks as ``sp`` says."""
        # transform of encoders, scale, projection, cap
        if self.transform is not None:
            x = self.transform(x)
        if self.logit_scale != 1.0:
            x = x * self.logit_scale
        logits = column_linear(x, self.weight, self.bias, sp, self.grad_queue, kept=self.kept)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
