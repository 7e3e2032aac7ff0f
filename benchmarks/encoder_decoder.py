"""Parameters and model FLOPs of encoder-decoder models of T5's kind: counts alone, no family is built from them.

Raffel et al., Exploring the limits of transfer learning with a unified text-to-text transformer, 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.plan.flops import FORWARD_AND_BACKWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderDecoder:
    """A model of T5's kind: matrices without biases, norms with a scale alone, one table for both sides.

    Attributes:
        encoder_layers: Number of layers, each with self-attention and a feed-forward layer.
        decoder_layers: Number of layers, each with causal self-attention, attention to the encoder, and a feed-forward
            layer.
        width: Width of the residual stream.
        num_heads: Number of heads of every attention.
        head_width: Width of one head; all heads together need not be as wide as the stream.
        ffn_hidden_size: Hidden width of the feed-forward layers.
        vocab_size: Number of rows of the embedding table.
        is_gated: Whether feed-forward layers have a gate (T5 1.1).
        tie_word_embeddings: Whether the head shares the embedding table (T5 1.0).
        position_buckets: Number of buckets of relative positions, each with a bias per head in the first layer of each side.
    """

    encoder_layers: int
    decoder_layers: int
    width: int
    num_heads: int
    head_width: int
    ffn_hidden_size: int
    vocab_size: int
    is_gated: bool = False
    tie_word_embeddings: bool = True
    position_buckets: int = 32

    @property
    def _projection(self) -> int:
        """Weights of one of an attention's four matrices."""
        return self.width * self.num_heads * self.head_width

    @property
    def _feed_forward(self) -> int:
        return (3 if self.is_gated else 2) * self.width * self.ffn_hidden_size

    def num_parameters(self) -> int:
        """Return the parameters of the whole model, a tied table counted once."""
        # a layer: four matrices of attention (twice in the decoder), the feed-forward layer, a norm before each part
        encoder = 4 * self._projection + self._feed_forward + 2 * self.width
        decoder = 8 * self._projection + self._feed_forward + 3 * self.width
        table = self.vocab_size * self.width * (1 if self.tie_word_embeddings else 2)
        # the last norm and the table of position biases, on each side
        ends = 2 * self.width + 2 * self.position_buckets * self.num_heads
        return self.encoder_layers * encoder + self.decoder_layers * decoder + table + ends

    def flops_per_pair(self, *, source_tokens: int, target_tokens: int) -> float:
        """Return the FLOPs of forward and backward on a source and its target, counted as `plan/flops.py` does.

        Attention to the encoder makes keys and values of source tokens, queries and outputs of target
        tokens; the decoder's own attention is causal, the other two see everything.
        """
        scores = 2 * self.num_heads * self.head_width  # of one product, a pair of positions
        encoder = 2 * source_tokens * (4 * self._projection + self._feed_forward)
        encoder += 2 * scores * source_tokens**2
        # of target tokens: own attention's four projections, and queries and outputs of that to the encoder
        decoder = 2 * target_tokens * (6 * self._projection + self._feed_forward)
        # of source tokens: its keys and values
        decoder += 2 * source_tokens * 2 * self._projection
        decoder += scores * target_tokens**2 + 2 * scores * target_tokens * source_tokens
        head = 2 * target_tokens * self.vocab_size * self.width
        forward = self.encoder_layers * encoder + self.decoder_layers * decoder + head
        return float(FORWARD_AND_BACKWARD * forward)
