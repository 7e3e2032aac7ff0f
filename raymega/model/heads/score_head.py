"""Head without a vocabulary: a linear layer from the residual stream to scores of tokens or of documents.

Which loss the scores have is decided in `objective.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raymega.model.layers.lm_head import Head
from raymega.parallel.context_parallel.context import ScoreBatch
from raymega.parallel.tensor_parallel.layers import ParameterFactory, ReplicatedLinear
from raymega.parallel.tensor_parallel.mappings import reduce_from_tp


class ScoreHead(nn.Module):
    """Final norm, BERT's pooler where the model has it, and a linear layer to C scores; without one, C is D.

    The weights are whole on every tensor-parallel rank. With sequence parallelism a rank computes the positions
    that it has, and the ranks sum.

    Attributes:
        further: None: the head has no multi-token prediction.
        segment_pairs: None: nor a head for pairs of segments.
    """

    further: nn.Module | None = None
    segment_pairs: None = None

    def __init__(self, factory: ParameterFactory, norm: nn.Module) -> None:
        super().__init__()
        self.sp, self.norm = factory.sp, norm
        is_pooled = "head.pooler.weight" in factory.table
        self.pooler = ReplicatedLinear(factory, "head.pooler") if is_pooled else None
        has_scores = "head.score.weight" in factory.table
        self.score = ReplicatedLinear(factory, "head.score") if has_scores else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S/sp, B, D] to scores [S/sp, B, C] of this rank's tokens, in max(fp32, dtype)."""
        return self._scores(self.norm(x))

    def document_sums(self, x: Tensor, scored: ScoreBatch) -> Tensor:
        """Return the sum over this rank's tokens of each document's weighted scores, [N, C] float64.

        It is equal on all tensor-parallel ranks.

        Args:
            x: Residual stream, [S/sp, B, D].
            scored: Documents of the micro-batch.
        """
        states = self.norm(x).flatten(0, 1)
        place, weights = scored.places, scored.weights
        if self.sp.degree > 1:
            # this rank's positions: those of other ranks are read at any place, and weigh nothing
            place = place - len(states) * self.sp.tp.index
            weights = weights * ((place >= 0) & (place < len(states)))
            place = place.clamp(0, len(states) - 1)
        scores = self._scores(states[place]).double() * weights[:, None]
        sums = scores.new_zeros(scored.num_documents, scores.shape[-1])
        sums = sums.index_add(0, scored.documents, scores)
        return reduce_from_tp(sums, self.sp.tp) if self.sp.degree > 1 else sums

    def _scores(self, x: Tensor) -> Tensor:
        """Map x [..., D], after the final norm, to scores [..., C]."""
        pooled = x if self.pooler is None else torch.tanh(self.pooler(x))
        scores: Tensor = self.score(pooled)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def language_head(head: nn.Module) -> Head:
    """Return the head of a model that ends with a vocabulary."""
    assert isinstance(head, Head), "the model has another head"
    return head
