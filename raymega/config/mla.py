"""The part of the model section that turns attention into multi-head latent attention."""

from __future__ import annotations

from pydantic import Field

from raymega.config.fields import NonNegative, Section


class MlaSection(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are made of one small vector a token.

    A query or key head has qk_nope_head_dim that know no position and qk_rope_head_dim that RoPE turns;
    those of the keys are shared by all heads.
    """

    kv_lora_rank: NonNegative = Field(
        default=0,
        description="Features of the latent that keys and values of all heads are made of; 0 is "
        "ordinary attention.",
    )
    q_lora_rank: NonNegative = Field(
        default=0,
        description="Features of the latent that queries are made of; 0 makes them of the stream.",
    )
    qk_nope_head_dim: NonNegative = Field(
        default=0, description="Of a query or key head, those without position."
    )
    qk_rope_head_dim: NonNegative = Field(
        default=0,
        description="Of a query or key head, those that RoPE turns, neighbours by pairs.",
    )
    v_head_dim: NonNegative = Field(default=0, description="Of a value head.")
