"""Blocks of encoder-decoder families (T5): each changes the stream of its side.

The stage that runs them is in `encoder_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raymega.model.attention.relative_attention import RelativeAttention
from raymega.model.layers.embedding import Embedding
from raymega.model.layers.transformer_block import ResidualDropout, TransformerBlock
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.dropout import TokenKeys
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class Streams(NamedTuple):
    """Activations of both sides inside a stage, and what its blocks share.

    Attributes:
        encoder: Encoder's residual stream, [E/(cp*sp), B, D].
        decoder: Decoder's residual stream, [S/(cp*sp), B, D].
        encoder_bias: Bias of the encoder's scores, [B or 1, H/tp, E/cp, E]; None in stages without its blocks.
        decoder_bias: Bias of the decoder's scores, [B or 1, H/tp, S/cp, S]; None in stages without its blocks.
        cross_bias: Mask of the decoder's scores for the encoder, [B or 1, 1, S/cp, E]; None likewise.
        encoder_keys: Dropout keys of the encoder's tokens; None drops nothing.
        decoder_keys: Dropout keys of the decoder's tokens; None drops nothing.
    """

    encoder: Tensor
    decoder: Tensor
    encoder_bias: Tensor | None = None
    decoder_bias: Tensor | None = None
    cross_bias: Tensor | None = None
    encoder_keys: TokenKeys | None = None
    decoder_keys: TokenKeys | None = None


class StreamBlock(TransformerBlock):
    """Block of one side: self-attention, in the decoder attention to the encoder, and a feed-forward layer.

    Args:
        cross: Norm before attention to the encoder, that attention, and dropout on its output; None in the encoder.
        end: Norm of the encoder's output, in its last block, and dropout on it; None in others.
        parts: Parts of a :class:`TransformerBlock`.
    """

    attention: RelativeAttention

    def __init__(
        self,
        *,
        cross: tuple[nn.Module, RelativeAttention, ResidualDropout] | None,
        end: tuple[nn.Module, ResidualDropout] | None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.cross_norm: nn.Module | None = None
        self.cross_attention: RelativeAttention | None = None
        self.cross_dropout: ResidualDropout | None = None
        if cross is not None:
            self.cross_norm, self.cross_attention, self.cross_dropout = cross
        self.end_norm: nn.Module | None = None
        self.end_dropout: ResidualDropout | None = None
        if end is not None:
            self.end_norm, self.end_dropout = end

    def remake(self, parts: Collection[str]) -> None:
        """Choose what backward recomputes, by the job's memory.recompute_parts."""
        super().remake(parts)
        if self.cross_attention is not None:
            self.cross_attention.is_remade = "attention" in parts

    def changed(self, streams: Streams) -> Tensor:
        """Return the stream that the block changes."""
        return streams.encoder if self.cross_attention is None else streams.decoder

    def forward(self, streams: Streams, token_layout: TokenLayout) -> Streams:  # type: ignore[override]
        """Return the streams after the block, which changes one of them."""
        context, cross = token_layout.context.outer, self.cross_attention
        x = self.changed(streams)
        bias = streams.encoder_bias if cross is None else streams.decoder_bias
        keys = streams.encoder_keys if cross is None else streams.decoder_keys
        assert bias is not None, "the stage has made the biases of its blocks"
        # attention within the stream, attention to the encoder, feed-forward layer
        normal = self._normal(self.attention_norm, x)
        y = self.attention(normal, normal, bias, context, keys)
        x = x + self.attention_dropout(y, keys)
        if cross is not None:
            assert streams.cross_bias is not None, "the stage has made it"
            assert self.cross_dropout is not None, "it comes with the attention"
            normal = self._normal(self.cross_norm, x)
            y = cross(normal, streams.encoder, streams.cross_bias, context, keys)
            x = x + self.cross_dropout(y, keys)
        assert self.mlp is not None, "a block of either side has one"
        x = x + self.mlp_dropout(self.mlp(self._normal(self.mlp_norm, x)), keys)
        if cross is not None:
            return streams._replace(decoder=x)
        if self.end_dropout is not None:
            x = self.end_dropout(self._normal(self.end_norm, x), keys)
        return streams._replace(encoder=x)


class StreamEmbedding(Embedding):
    """Token table of both sides, with the tables of relative positions."""

    def __init__(self, factory: ParameterFactory) -> None:
        super().__init__(factory)
        self.encoder_positions = factory.make("embedding.encoder_positions.weight")
        self.decoder_positions = factory.make("embedding.decoder_positions.weight")

    def tables(self) -> Tensor:
        """Return a copy of both tables, [2, buckets, H/tp]."""
        return torch.stack((self.encoder_positions, self.decoder_positions))
