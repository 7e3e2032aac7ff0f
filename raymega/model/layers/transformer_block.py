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
    """Block of two parts, with norms before or after each; after dropout comes the sum, and its norm if any.

    Args:
        attention_norm: Norm before attention; None is none.
        attention: Attention.
        attention_dropout: Dropout on its output.
        mlp_norm: Norm before the feed-forward layer; None is none.
        mlp: Feed-forward layer, or a layer of experts.
        mlp_dropout: Dropout on its output.
        post_norms: Norms after attention and after the feed-forward layer; None is none.
        sum_norms: Norms after the sum of each part with its input (BERT); None is none.
        is_parallel: Whether both parts read the block's input.
        factor: Factor on what each part adds.
    """

    is_norm_remade = False

    def __init__(  # noqa: PLR0913  # one a part
        self,
        *,
        attention_norm: nn.Module | None,
        attention: BlockPart | None,
        attention_dropout: ResidualDropout,
        mlp_norm: nn.Module | None,
        mlp: BlockPart | None,
        mlp_dropout: ResidualDropout,
        post_norms: tuple[nn.Module | None, nn.Module | None] = (None, None),
        sum_norms: tuple[nn.Module | None, nn.Module | None] = (None, None),
        is_parallel: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.is_parallel, self.factor = is_parallel, factor
        self.attention_post_norm, self.mlp_post_norm = post_norms
        self.attention_sum_norm, self.mlp_sum_norm = sum_norms
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = attention_dropout
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = mlp_dropout

    def remake(self, parts: Collection[str]) -> None:
        """Choose what backward recomputes, by the job's memory.recompute_parts."""
        self.is_norm_remade = "norm" in parts
        if self.attention is not None:
            self.attention.is_remade = "attention" in parts
        if self.mlp is not None:
            self.mlp.is_remade = "activation" in parts

    def forward(self, x: Tensor, token_layout: TokenLayout | None = None) -> Tensor:
        """Map x [S/sp, B, D] to the same shape; without a layout there is no dropout and no cp."""
        keys = None if token_layout is None else token_layout.keys
        after = x
        if self.attention is not None:
            y = self.attention(self._normal(self.attention_norm, x), token_layout)
            y = self._scaled(self._normal(self.attention_post_norm, y))
            after = self._normal(self.attention_sum_norm, x + self.attention_dropout(y, keys))
        if self.mlp is None:
            return after
        y = self.mlp(self._normal(self.mlp_norm, x if self.is_parallel else after), token_layout)
        y = self._scaled(self._normal(self.mlp_post_norm, y))
        return self._normal(self.mlp_sum_norm, after + self.mlp_dropout(y, keys))

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.factor == 1.0 else y * self.factor

    def _normal(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        if self.is_norm_remade:
            return checkpoint_output(norm, x, params=tuple(norm.parameters()))
        normal: Tensor = norm(x)
        return normal
