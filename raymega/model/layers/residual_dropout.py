"""Dropout of the residual stream: one place in the model and its rate.

Which elements go is parallel.dropout's.
"""

from __future__ import annotations

from torch import Tensor, nn

from raymega.parallel.core.dropout import TokenKeys, dropout, place_key


class ResidualDropout(nn.Module):
    """Drops features of what ``place`` adds to the stream."""

    def __init__(self, seed: int, place: str, rate: float) -> None:
        super().__init__()
        self.place_key = place_key(seed, place)
        self.rate = rate

    def forward(self, x: Tensor, keys: TokenKeys | None) -> Tensor:
        """x: [S/sp, B, D] -> the same; x itself without keys, as in evaluation."""
        if keys is None or not self.rate:
            return x
        return dropout(x, keys.own + self.place_key, rate=self.rate)
