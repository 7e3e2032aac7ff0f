"""The job file's model.mla section: multi-head latent attention."""

from __future__ import annotations

from raymega.config.fields import NonNegative, Section


class MlaSection(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are projected from one latent per token.

    A query or key head has qk_nope_head_dim features without position and qk_rope_head_dim features
    that RoPE rotates. The rotated features of the keys are shared by all heads.
    """

    # Latents.
    kv_lora_rank: NonNegative = 0
    """Features of the latent from which keys and values of all heads are projected; 0 is ordinary
    attention."""
    q_lora_rank: NonNegative = 0
    """Features of the latent from which queries are projected; 0 projects them from the residual
    stream."""
    # Widths of one head.
    qk_nope_head_dim: NonNegative = 0
    """Features of a query or key head without position."""
    qk_rope_head_dim: NonNegative = 0
    """Features of a query or key head that RoPE rotates, in pairs of neighbours."""
    v_head_dim: NonNegative = 0
    """Features of a value head."""
    # Indexer of DeepSeek-V3.2, which chooses the tokens that its sparse attention sees.
    index_n_heads: NonNegative = 0
    """Heads of the indexer, whose weights are kept frozen and exported as they came; 0 is none. Attention sees all
    tokens: the published function where data.seq_len is at most index_topk."""
    index_head_dim: NonNegative = 0
    """Features of a head of the indexer."""
    index_topk: NonNegative = 0
    """Number of tokens that the indexer chooses for each token."""
