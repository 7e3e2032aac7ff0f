"""Heads of encoders (BERT, Devlin et al. 2019): the transform before the vocabulary, and the pair of segments.

The projection to the vocabulary is `lm_head.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from raymega.parallel.context_parallel.context import EncoderInput
from raymega.parallel.core.linear_map import with_gradient
from raymega.parallel.tensor_parallel.layers import ParameterFactory, ReplicatedLinear
from raymega.parallel.tensor_parallel.mappings import reduce_from_tp


class HeadTransform(nn.Module):
    """Layer before the projection to the vocabulary: norm(GELU(linear(x)))."""

    def __init__(self, factory: ParameterFactory, norm: nn.Module) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(factory, "head.transform")
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to the same shape, each token independently."""
        transformed: Tensor = self.norm(gelu(self.linear(x)))
        return transformed


class PairHead(nn.Module):
    """Classifier of pairs of segments, on the pooled state of a pair's first token.

    With sequence parallelism a rank computes the pairs whose first token it has, and the ranks sum losses.

    Attributes:
        weight: Number of the step's masked tokens over that of its pairs. The step divides the sum of all
            losses by the former, and pairs have a mean of their own.
    """

    weight: Tensor | float = 1.0

    def __init__(self, factory: ParameterFactory) -> None:
        super().__init__()
        self.sp = factory.sp
        self._sum: Tensor | float = 0.0
        self.pooler = ReplicatedLinear(factory, "head.pooler")
        self.classes = ReplicatedLinear(factory, "head.pairs")

    def forward(self, states: Tensor) -> Tensor:
        """Map states of first tokens [N, D] to the logits of both classes, [N, 2]."""
        logits: Tensor = self.classes(torch.tanh(self.pooler(states)))
        return logits

    def add_gradient(self, loss: Tensor, x: Tensor, pairs: EncoderInput) -> Tensor:
        """Return ``loss``, of masked tokens, whose gradient includes that of the pairs' loss."""
        # the loss stays that of tokens; the pairs' gradient joins it with their weight
        mine, weight = self.loss_sum(x, pairs), self.weight
        self._sum = self._sum + mine.detach()
        return with_gradient(loss, mine, lambda gradient: gradient * weight)

    def start_step(self, weight: Tensor) -> None:
        """Set ``weight`` [] and reset the sum of losses, before the forward passes of a step."""
        self.weight, self._sum = weight, 0.0

    def take_loss_sum(self) -> Tensor | float:
        """Return and reset the unweighted sum of the pairs' losses in training."""
        taken, self._sum = self._sum, 0.0
        return taken

    def loss_sum(self, x: Tensor, pairs: EncoderInput) -> Tensor:
        """Return the sum of the pairs' losses, equal on all tensor-parallel ranks.

        Args:
            x: Residual stream after the final norm, [S/sp, B, D].
            pairs: Pairs of the micro-batch on this context-parallel rank.
        """
        states = x.flatten(0, 1)
        if self.sp.degree == 1:
            return self._losses(states[pairs.first], pairs.labels).sum()
        # this rank's positions: those of other ranks are read at any place, and count nothing
        place = pairs.first - len(states) * self.sp.tp.index
        is_here = (place >= 0) & (place < len(states))
        losses = self._losses(states[place.clamp(0, len(states) - 1)], pairs.labels)
        return reduce_from_tp((losses * is_here).sum(), self.sp.tp)

    def _losses(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each pair, [N] in max(fp32, dtype)."""
        logits = self(states)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(wide, labels, reduction="none")
