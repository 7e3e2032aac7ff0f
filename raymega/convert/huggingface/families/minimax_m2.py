"""MiniMax-M2: norms over all queries and all keys, partial RoPE, experts by biased sigmoid scores."""

from __future__ import annotations

from typing import Any

from raymega.convert.huggingface.architectures import (
    LLAMA_DEFAULTS,
    SAME,
    Architecture,
    Config,
    rope_of,
)
from raymega.convert.huggingface.families.family import HfFamily

_DEFAULTS = {
    **LLAMA_DEFAULTS, "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
    "rope_theta": 5e6, "router_jitter_noise": 0.0,
}  # fmt: skip
_WANTED = {
    **SAME, "use_qk_norm": (None, True), "qk_norm_type": (None, "per_layer"), "scoring_func": (None, "sigmoid"),
    "use_routing_bias": (None, True), "shared_intermediate_size": (None, 0),
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    # released models say how many features RoPE turns, not which share; where both are there, the share counts
    is_share = "partial_rotary_factor" in config or "partial_rotary_factor" in rope_of(config)
    if is_share or config.get("rotary_dim") is None:
        return {}
    return {"attention": {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}}


MINIMAX_M2 = HfFamily(
    architecture=Architecture("MiniMaxM2ForCausalLM", "minimax_m2", _DEFAULTS, _WANTED),
    values=_values,
    config=lambda model: {"rotary_dim": model.rope_width},
    has_partial_rotary=True,
)
