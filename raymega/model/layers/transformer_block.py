"""Transformer block: attention, then a feed-forward layer, each added to the residual stream.

The block is independent of family and layout: its parts are arguments, and each part is itself sharded
over the tensor-parallel ranks. Between parts a rank holds the residual stream as
`parallel/tensor_parallel/sequence_parallel.py` defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch import Tensor, nn

from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.checkpointing import checkpoint_output
from raymega.parallel.core.dropout import TokenKeys, dropout, place_key


class BlockPart(Protocol):
    """Part of a block, added to the residual stream; ``is_remade`` turns its recomputation on."""

    is_remade: bool
    __call__: Callable[..., Tensor]


class ResidualDropout(nn.Module):
    """Dropout on the output of the layer ``place``, before it is added to the residual stream."""

    def __init__(self, seed: int, place: str, rate: float) -> None:
        super().__init__()
        self.place_key = place_key(seed, place)
        self.rate = rate

    def forward(self, x: Tensor, keys: TokenKeys | None) -> Tensor:
        """Drop features of x [S/sp, B, D]; without keys, as in evaluation, return x itself."""
        if keys is None or not self.rate:
            return x
        return dropout(x, keys.own + self.place_key, rate=self.rate)


class TransformerBlock(nn.Module):
    """Pre-norm block: norm before each part, dropout after it, nothing after the sum."""

    is_norm_remade = False

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: BlockPart,
        attention_dropout: ResidualDropout,
        mlp_norm: nn.Module,
        mlp: BlockPart,
        mlp_dropout: ResidualDropout,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = attention_dropout
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = mlp_dropout

    def remake(self, parts: Collection[str]) -> None:
        """Choose what backward recomputes, by the job's memory.recompute_parts."""
        self.is_norm_remade = "norm" in parts
        self.attention.is_remade = "attention" in parts
        self.mlp.is_remade = "activation" in parts

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout there is no dropout and no cp."""
        keys = None if token_layout is None else token_layout.keys
        y = self.attention(self._normal(self.attention_norm, x), token_layout)
        x = x + self.attention_dropout(y, keys)
        y = self.mlp(self._normal(self.mlp_norm, x), token_layout)
        return x + self.mlp_dropout(y, keys)

    def _normal(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.is_norm_remade:
            return checkpoint_output(norm, x, params=tuple(norm.parameters()))
        normal: Tensor = norm(x)
        return normal
