"""Embedding layer: tokens to the residual stream."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.dropout import place_key, uniform_noise
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class Embedding(nn.Module):
    """Token embedding times ``factor``, plus learned positions and token types in families that have them.

    Args:
        factory: Factory of the stage's parameters.
        factor: Factor on embedded tokens.
        first_position: Row of the position table for a document's first token.
        norm: Norm of the sum; None is none.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        factor: float = 1.0,
        *,
        first_position: int = 0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.sp, self.factor, self.first_position = factory.sp, factor, first_position
        self.tokens = VocabParallelEmbedding(factory, "embedding.tokens")
        self.positions = factory.make_if_any("embedding.positions.weight")
        self.token_types = factory.make_if_any("embedding.token_types.weight")
        self.norm = norm

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Embed tokens into the residual stream.

        Args:
            tokens: Input tokens, [B, S] int64.
            positions: Positions within documents, [S, B] or [S, 1] int64; None is 0 to S - 1.
            token_types: Types of the tokens, [B, S] int64; None is type 0, for families that have types.

        Returns:
            [S/sp, B, D].
        """
        x = self.tokens(tokens.t())
        if self.factor != 1.0:
            x = x * self.factor
        # The schedule asks for a gradient of what a stage returns, behind a frozen table too.
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()
        if self.positions is None:
            return x
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        # self.sp.own: the tokens' sum is scattered over tp already under sequence parallelism
        x = x + embedding(self.sp.own(positions + self.first_position), self.positions)
        if self.token_types is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + embedding(self.sp.own(types.t()), self.token_types)
        return x if self.norm is None else self.norm(x)


class EmbeddingNoise(nn.Module):
    """NEFTune (Jain et al. 2023): noise on embeddings in training, keyed by sample and position."""

    def __init__(self, seed: int, alpha: float) -> None:
        super().__init__()
        self.place_key, self.alpha = place_key(seed, "neftune"), alpha

    def forward(self, x: Tensor, token_layout: TokenLayout) -> Tensor:
        """Add noise from (-1, 1) times alpha / sqrt(S D) to embeddings x [S/(cp*sp), B, D]."""
        keys = token_layout.keys
        if not self.alpha or keys is None:
            return x
        num_tokens, width = keys.everywhere.shape[0] * token_layout.context.degree, x.shape[-1]
        noise = uniform_noise(keys.own + self.place_key, width, x.dtype)
        return x + noise * (self.alpha / sqrt(num_tokens * width))
