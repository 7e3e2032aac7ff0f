"""Architectures of transformers that raymega can reproduce, and the choice of one for a model.

``config.py`` and ``moe_config.py`` translate config.json; ``names.py`` translates names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raymega.config.fields import Section
from raymega.config.schema import ModelSection

Config = Mapping[str, Any]
Renames = Mapping[str, str]
"""Map from a setting of config.json to the field of a job section with the same value."""


def ours(names: Renames, config: Config) -> dict[str, Any]:
    """Return the values of our fields, read from their settings; a missing one raises KeyError."""
    return {field: config[setting] for setting, field in names.items()}


def theirs(names: Renames, section: Section) -> dict[str, Any]:
    """Return the values of their settings, read from our fields."""
    return {setting: getattr(section, field) for setting, field in names.items()}


def alike(*names: str) -> Renames:
    """Return the map of settings that have the same name on both sides."""
    return dict(zip(names, names, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """An architecture of transformers, and the settings in which it could differ from raymega.

    Attributes:
        name: Name of the class with a language-model head.
        defaults: Values of settings that a config.json may leave out.
        family: Value of ``model.family`` for the architecture.
        wanted: Settings with the only values that raymega reproduces; None stands for "left out".
    """

    name: str
    defaults: Config
    family: str
    wanted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


# Building blocks of the table below: shared restrictions and shared defaults.
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
# DeepSeek's norms of latents use an epsilon of 1e-6 whatever the config says, so it must say 1e-6.
_LATENT = {**_SAME, **_NO_BIAS, "rms_norm_eps": (1e-6,)}
# Keys are the values of model_type in config.json.
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
    """Return the ``model_type`` of the architecture nearest to ``model``, which may still differ."""
    # Latent attention: V3 has biased routing; a dense model with latents is V3 with dense blocks only.
    if model.mla.kv_lora_rank:
        return (
            "deepseek_v2" if model.moe.num_experts and not model.moe.expert_bias else "deepseek_v3"
        )
    # GPT-2 with experts has no architecture there; config_from refuses it by its settings.
    if model.moe.num_experts and model.family != "gpt2":
        return {"llama": "mixtral"}.get(model.family, f"{model.family}_moe")
    return model.family
