"""Embedding layer: tokens to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class Embedding(nn.Module):
    """Token embedding, plus learned positions in families that have them."""

    def __init__(self, factory: ParameterFactory) -> None:
        super().__init__()
        self.sp = factory.sp
        self.tokens = VocabParallelEmbedding(factory, "embedding.tokens")
        self.positions = factory.make_if_any("embedding.positions.weight")

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed tokens into the residual stream.

        Args:
            tokens: Input tokens, [B, S] int64.
            positions: Positions within documents, [S, B] or [S, 1] int64; None is 0 to S - 1.

        Returns:
            [S/sp, B, D].
        """
        x = self.tokens(tokens.t())
        if self.positions is None:
            return x
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        # self.sp.own: the tokens' sum is scattered over tp already under sequence parallelism
        return x + embedding(self.sp.own(positions), self.positions)
