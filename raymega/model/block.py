"""The transformer block: attention, then a feed-forward layer, each added to the residual stream.

It knows neither the family nor the layout: parts are handed in, and each part is cut over the
tensor-parallel ranks in itself. Between parts a rank holds the stream as parallel.stream says.
"""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Norm before each part, nothing after the sum (pre-norm)."""

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """x: [S/sp, B, D] -> [S/sp, B, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))
