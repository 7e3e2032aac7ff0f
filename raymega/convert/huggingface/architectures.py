"""The architectures of transformers that ours is equal to, and which of them a model is.

What their config.json says is config's and moe_config's, what they call tensors names'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raymega.config.fields import Section
from raymega.config.schema import ModelSection

Config = Mapping[str, Any]
Renames = Mapping[str, str]
"""A setting of theirs to the field of ours that has the same value."""


def ours(names: Renames, config: Config) -> dict[str, Any]:
    """Our fields by their settings, each of which must be there."""
    return {field: config[setting] for setting, field in names.items()}


def theirs(names: Renames, section: Section) -> dict[str, Any]:
    """Their settings by our fields."""
    return {setting: getattr(section, field) for setting, field in names.items()}


def alike(*names: str) -> Renames:
    """Settings that we call the same."""
    return dict(zip(names, names, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What transformers calls a family, and the settings by which it could differ from ours.

    Attributes:
        name: Of the class with a language-model head.
        defaults: Values that a config.json may leave out.
        wanted: Settings that ours is equal to at these values only; None stands for "left out".
        family: Ours; the architecture's own name where that is empty.
    """

    name: str
    defaults: Config
    family: str
    wanted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_SAME = {"hidden_act": ("silu",), "mlp_bias": (None, False), "quantization_config": (None,)}
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_QWEN_DEFAULTS = {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768}
_NO_WINDOW = {"use_sliding_window": (None, False)}
_NO_BIAS = {"attention_bias": (None, False)}
_QWEN_MOE_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "norm_topk_prob": False,
}
_DEEPSEEK_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 0,
}
# Their norms of latents have an epsilon of their own, which is this whatever the config says.
_LATENT = {**_SAME, **_NO_BIAS, "rms_norm_eps": (1e-6,)}
ARCHITECTURES = {
    "gpt2": Architecture(
        name="GPT2LMHeadModel",
        family="gpt2",
        defaults={
            "activation_function": "gelu_new",
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        wanted={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "add_cross_attention": (None, False),
            "quantization_config": (None,),
        },
    ),
    "llama": Architecture(
        name="LlamaForCausalLM",
        family="llama",
        defaults=_LLAMA_DEFAULTS,
        wanted={**_SAME, "attention_bias": (None, False)},
    ),
    "qwen2": Architecture(
        name="Qwen2ForCausalLM",
        family="qwen2",
        defaults=_QWEN_DEFAULTS,
        wanted={**_SAME, **_NO_WINDOW},
    ),
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        family="qwen3",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        wanted={**_SAME, **_NO_WINDOW, "attention_bias": (None, False)},
    ),
    "mixtral": Architecture(
        name="MixtralForCausalLM",
        defaults={
            **_LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "router_jitter_noise": 0.0,
        },
        wanted={**_SAME, "sliding_window": (None,)},
        family="llama",
    ),
    "qwen2_moe": Architecture(
        name="Qwen2MoeForCausalLM",
        defaults=_QWEN_MOE_DEFAULTS,
        wanted={**_SAME, **_NO_WINDOW, "qkv_bias": (None, True)},
        family="qwen2",
    ),
    "qwen3_moe": Architecture(
        name="Qwen3MoeForCausalLM",
        defaults=_QWEN_MOE_DEFAULTS,
        wanted={**_SAME, **_NO_WINDOW, **_NO_BIAS},
        family="qwen3",
    ),
    "deepseek_v2": Architecture(
        name="DeepseekV2ForCausalLM",
        defaults={**_DEEPSEEK_DEFAULTS, "topk_method": "greedy"},
        wanted={
            **_LATENT,
            "norm_topk_prob": (None, False),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        family="llama",
    ),
    "deepseek_v3": Architecture(
        name="DeepseekV3ForCausalLM",
        defaults={**_DEEPSEEK_DEFAULTS, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        wanted={**_LATENT, "rope_interleave": (None, True)},
        family="llama",
    ),
}


def architecture_of(model: ModelSection) -> str:
    """The ``model_type`` that comes nearest to ``model``."""
    if model.mla.kv_lora_rank:
        return (
            "deepseek_v2" if model.moe.num_experts and not model.moe.expert_bias else "deepseek_v3"
        )
    if model.moe.num_experts and model.family != "gpt2":
        return {"llama": "mixtral"}.get(model.family, f"{model.family}_moe")
    return model.family
