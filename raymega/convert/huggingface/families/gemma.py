"""Gemma 2 and 3 (text): norms before and after, with 1 + w; GeGLU; windows; a scaled embedding.

Gemma 2 caps scores and logits. Gemma 3 has norms of queries and keys, and a base of RoPE for windows.
"""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import LLAMA_DEFAULTS, NO_BIAS, Architecture, Config
from raymega.convert.huggingface.families.family import HfFamily, scale_of

GELU = "gelu_pytorch_tanh"
_MODULES = {
    "post_attention_layernorm": ("attention_post_norm",),
    "pre_feedforward_layernorm": ("mlp_norm",),
    "post_feedforward_layernorm": ("mlp_post_norm",),
}
_DEFAULTS = {
    **LLAMA_DEFAULTS, "hidden_act": GELU, "hidden_activation": GELU, "head_dim": 256,
    "query_pre_attn_scalar": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096,
}  # fmt: skip
_WANTED = {
    **NO_BIAS, "hidden_activation": (GELU,), "use_bidirectional_attention": (None, False),
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    # query_pre_attn_scalar is the square of the divisor of scores
    scale = scale_of(config["query_pre_attn_scalar"] ** -0.5, config["head_dim"])
    caps = config.get("attn_logit_softcapping", 0), config.get("final_logit_softcapping", 0)
    return {
        "attention": {"score_scale": scale, "softcap": float(caps[0])},
        "multipliers": {"logit_softcap": float(caps[1])},
    }


def _config(model: ModelSection) -> dict[str, Any]:
    scale = model.attention.score_scale
    scalar = scale**-2 if scale else model.head_width
    # the whole number that was read, where its root is the same
    if scale and round(scalar) ** -0.5 == scale:
        scalar = round(scalar)
    return {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": model.attention.softcap or None,
        "final_logit_softcapping": model.multipliers.logit_softcap or None,
    }


def _gemma3_types(config: Config) -> tuple[str, ...]:
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return (*["sliding_attention"] * (period - 1), "full_attention")


GEMMA2 = HfFamily(
    architecture=Architecture(
        "Gemma2ForCausalLM", "gemma2",
        {
            **_DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _WANTED,
    ),
    modules=_MODULES,
    values=_values,
    config=_config,
    layer_types=lambda _: ("sliding_attention", "full_attention"),
)  # fmt: skip
GEMMA3 = HfFamily(
    # transformers reads attn_logit_softcapping here, and never applies it
    architecture=Architecture(
        "Gemma3ForCausalLM", "gemma3",
        {**_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {**_WANTED, "attn_logit_softcapping": (None,)},
    ),
    modules=_MODULES,
    values=_values,
    config=_config,
    layer_types=_gemma3_types,
    has_rope_by_type=True,
)  # fmt: skip
