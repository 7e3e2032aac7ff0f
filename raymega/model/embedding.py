"""From tokens to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from raymega.parallel.tensor import ParameterFactory, VocabParallelEmbedding


class Embedding(nn.Module):
    """Token embedding, plus learned positions in families that have them."""

    def __init__(self, factory: ParameterFactory) -> None:
        super().__init__()
        self.stream = factory.stream
        self.tokens = VocabParallelEmbedding(factory, "embedding.tokens")
        self.positions = factory.make_if_any("embedding.positions.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] int64 -> [S/sp, B, D]."""
        x = self.tokens(tokens.t())
        if self.positions is None:
            return x
        first = self.stream.first_position(x.shape[0])
        return x + self.positions[first : first + x.shape[0], None]
