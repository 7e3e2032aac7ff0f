"""GPT-OSS: sinks, windows in every second layer, biases of attention and experts, clamped SwiGLU, YaRN.

Released weights of experts are in MXFP4.
"""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    LLAMA_DEFAULTS,
    Architecture,
    Config,
    alike,
    ours,
    theirs,
)
from raymega.convert.huggingface.families.family import HfFamily, StackedExperts

_CLAMP = alike("swiglu_alpha", "swiglu_limit")
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_DEFAULTS = {
    **LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "head_dim": 64, "rope_theta": 150000.0, "sliding_window": 128,
    "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "attention_bias": True,
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    return {**ours(_CLAMP, config), "attention": {"sinks": True}}


def _config(model: ModelSection) -> dict[str, Any]:
    return {**theirs(_CLAMP, model), "attention_bias": True}


GPT_OSS = HfFamily(
    architecture=Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        _DEFAULTS,
        {"hidden_act": ("silu",), "attention_bias": (True,)},
    ),
    tensors={
        "self_attn.sinks": "attention.sinks.bias",
        "mlp.router.weight": "moe.router.weight",
        "mlp.router.bias": "moe.router.linear.bias",
    },
    experts=StackedExperts(module="mlp.experts", is_interleaved=True),
    values=_values,
    config=_config,
    default_rope=_YARN,
    layer_types=lambda _: ("sliding_attention", "full_attention"),
)
