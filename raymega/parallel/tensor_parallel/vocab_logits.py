"""Logits that are cut by the vocabulary over the tensor-parallel ranks, as a loss gets them.

A loss that uses the methods of :class:`VocabLogits` alone is the same on any layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.tensor_parallel.cross_entropy import (
    LossTerms,
    num_real_columns,
    vocab_parallel_cross_entropy,
)
from raymega.parallel.tensor_parallel.mappings import reduce_from_tp
from raymega.parallel.tensor_parallel.vocab_embedding import local_rows


class VocabLogits:
    """Logits of the tokens [S, B] of a micro-batch over the whole vocabulary, of which a rank holds a part."""

    def __init__(self, padded: Tensor, *, tp: Group, terms: LossTerms, is_fused: bool) -> None:
        """Take this rank's logits [S, B, V/tp], V padded, and the terms that the job sets."""
        self.padded, self.tp, self.terms, self.is_fused = padded, tp, terms, is_fused

    @property
    def own(self) -> Tensor:
        """Logits of this rank's real tokens, [S, B, columns], in float32 or wider."""
        num_real = num_real_columns(self.padded.shape[-1], self.tp, self.terms.vocab_size)
        wide = torch.promote_types(self.padded.dtype, torch.float32)
        return self.padded[..., :num_real].to(wide)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over the vocabulary, [S, B], of a function of :attr:`own` of its shape."""
        return reduce_from_tp(own.sum(-1), self.tp)

    def at(self, labels: Tensor) -> Tensor:
        """Return the logits of ``labels`` [S, B] int64, [S, B]; of a label outside of the vocabulary 0."""
        # at most one rank has a label's logit, the others add 0
        rows, is_elsewhere = local_rows(labels, self.padded.shape[-1], self.tp)
        wide = torch.promote_types(self.padded.dtype, torch.float32)
        picked = self.padded.gather(-1, rows.unsqueeze(-1)).squeeze(-1).to(wide)
        return reduce_from_tp(picked.masked_fill(is_elsewhere, 0.0), self.tp)

    def log_sum_exp(self) -> Tensor:
        """Return log(sum of exp(logits)) over the vocabulary, [S, B]."""
        own = self.own
        # a rank of padding alone has no logit
        lowest = torch.finfo(own.dtype).min
        peak = own.detach().amax(-1) if own.shape[-1] else own.new_full(own.shape[:-1], lowest)
        # subtract the largest logit of all ranks, so that no exponential overflows
        peak = all_reduce(peak.clone(), self.tp, op="max")
        return peak + self.sum((own - peak.unsqueeze(-1)).exp()).log()

    def log_probs(self, labels: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of ``labels`` [S, B] int64, [S, B]."""
        return self.at(labels) - self.log_sum_exp()


Loss = Callable[[VocabLogits, Tensor], Tensor]
"""Function of the logits and the labels [S, B] int64 to the loss of each token, [S, B]."""


def cross_entropy(logits: VocabLogits, labels: Tensor) -> Tensor:
    """Return cross entropy with the job's label smoothing and z-loss; it overwrites the logits."""
    return vocab_parallel_cross_entropy(
        logits.padded, labels, logits.tp, logits.terms, is_fused=logits.is_fused
    )
