"""Architectures of transformers that raymega can reproduce, and the choice of one for a model.

``config.py`` and ``moe_config.py`` translate config.json; ``names.py`` translates names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymega.config.fields import Section
from raymega.config.schema import ModelSection
from raymega.errors import Fault

Config = Mapping[str, Any]
ADD_IT = "convert a model without it, or add the feature to raymega/model first"
Renames = Mapping[str, str]
"""Map from a setting of config.json to the field of a job section with the same value."""


def ours(names: Renames, config: Config) -> dict[str, Any]:
    """Return the values of our fields, read from their settings; a missing one raises KeyError."""
    return {field: config[setting] for setting, field in names.items()}


def theirs(names: Renames, section: Section) -> dict[str, Any]:
    """Return the values of their settings, read from our fields."""
    return {setting: getattr(section, field) for setting, field in names.items()}


def unlike(fact: str, rule: str) -> Fault:
    """Return the fault of a setting of config.json that raymega does not reproduce."""
    return Fault(fact=f"config.json has {fact}", rule=rule, remedy=ADD_IT)


def alike(*names: str) -> Renames:
    """Return the map of settings that have the same name on both sides."""
    return dict(zip(names, names, strict=True))


LATENT_SIZES = alike(
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
)
"""Sizes of latent attention, which have one name on both sides."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of transformers, and the settings in which it could differ from raymega.

    Attributes:
        name: Name of the class with a language-model head.
        family: Value of ``model.family`` for the architecture.
        defaults: Values of settings that a config.json may leave out.
        wanted: Settings with the only values that raymega reproduces; None stands for "left out".
        alias_of: ``model_type`` of the same network under its first name, which exports have; empty for a
            network of its own.
    """

    name: str
    family: str
    defaults: Config
    wanted: Mapping[str, tuple[object, ...]]
    alias_of: str = ""


# Building blocks of the table below: shared restrictions and shared defaults.
_NO_WINDOW = {"use_sliding_window": (None, False)}
NO_BIAS = {"attention_bias": (None, False)}
SAME = {"hidden_act": ("silu",), "mlp_bias": (None, False)}
# DeepSeek's norms of latents use an epsilon of 1e-6 whatever the config says, so it must say 1e-6.
_LATENT = {**SAME, **NO_BIAS, "rms_norm_eps": (1e-6,)}
_GPT2 = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}
_GPT2_DEFAULTS = {
    "activation_function": "gelu_new", "n_positions": 1024, "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
LLAMA_DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
_MIXTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "router_jitter_noise": 0.0,
}  # fmt: skip
# A config.json without the key has Mistral's first window; null says that there is none.
_MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "sliding_window": 4096,
}  # fmt: skip
_QWEN_DEFAULTS = {**LLAMA_DEFAULTS, "max_position_embeddings": 32768}
_QWEN_MOE_DEFAULTS = {
    **_QWEN_DEFAULTS, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False,
}  # fmt: skip
_DEEPSEEK_DEFAULTS = {
    **LLAMA_DEFAULTS, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "q_lora_rank": 0,
}  # fmt: skip
NULL_IS_A_VALUE = (
    "sliding_window", "num_key_value_heads", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
"""Settings that null does not leave out: it says no window, no cap, as many key-value heads as heads."""
_V2_METHODS = ("greedy", "group_limited_greedy")
# Keys are the values of model_type in config.json.
ARCHITECTURES = {
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _GPT2_DEFAULTS, _GPT2),
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA_DEFAULTS, {**SAME, **NO_BIAS}),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _QWEN_DEFAULTS, {**SAME, **_NO_WINDOW}),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", "qwen3", {**_QWEN_DEFAULTS, "head_dim": 128},
        {**SAME, **_NO_WINDOW, **NO_BIAS},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", "llama", _MIXTRAL_DEFAULTS, {**SAME, "sliding_window": (None,)},
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM", "qwen2", _QWEN_MOE_DEFAULTS,
        {**SAME, **_NO_WINDOW, "qkv_bias": (None, True)},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3", _QWEN_MOE_DEFAULTS, {**SAME, **_NO_WINDOW, **NO_BIAS},
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM", "llama", {**_DEEPSEEK_DEFAULTS, "topk_method": "greedy"},
        {**_LATENT, "norm_topk_prob": (None, False), "topk_method": _V2_METHODS},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM", "llama",
        {**_DEEPSEEK_DEFAULTS, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {**_LATENT, "rope_interleave": (None, True)},
    ),
    # Known networks under another name.
    "mistral": Architecture(
        "MistralForCausalLM", "llama", _MISTRAL_DEFAULTS, SAME, alias_of="llama",
    ),
    "kimi_k2": Architecture(
        "DeepseekV3ForCausalLM", "llama", _DEEPSEEK_DEFAULTS,
        {
            **_LATENT, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
            "moe_layer_freq": (None, 1),
        },
        alias_of="deepseek_v3",
    ),
}  # fmt: skip


OWN_TYPES = {
    **alike(
        "olmo2",
        "olmo3",
        "phi3",
        "granite",
        "gpt_neox",
        "gemma2",
        "glm4_moe",
        "minimax_m2",
        "gpt_oss",
        "qwen3_next",
        "nemotron_h",
        "bert",
        "roberta",
        "t5",
    ),
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "llama4": "llama4_text",
    "megatron_bert": "megatron-bert",
    "t5_v1_1": "t5",
}
"""Values of model_type by ``model.family``, of the families in ``families/``."""
OWN_TYPES_WITH_EXPERTS = {"qwen3_5": "qwen3_5_moe_text"}
"""The same where a model with experts has another one."""


def architecture_of(model: ModelSection) -> str:
    """Return the ``model_type`` of the architecture nearest to ``model``, which may still differ."""
    # Latent attention: V3 has biased routing; a dense model with latents is V3 with dense blocks only.
    if model.mla.kv_lora_rank:
        is_v2 = model.moe.num_experts and not model.moe.expert_bias
        is_indexed = model.mla.index_n_heads > 0
        return "deepseek_v32" if is_indexed else "deepseek_v2" if is_v2 else "deepseek_v3"
    if model.family == "qwen3" and model.layer_sizes.is_on:
        return "openelm"
    if model.moe.num_experts and model.family in OWN_TYPES_WITH_EXPERTS:
        return OWN_TYPES_WITH_EXPERTS[model.family]
    if model.family in OWN_TYPES:
        return OWN_TYPES[model.family]
    if model.family == "llama" and not model.moe.num_experts and model.attention.sliding_window:
        return "mistral"
    if (
        model.family == "llama"
        and not model.moe.num_experts
        and "no_positions" in model.attention.layer_types
    ):
        return "smollm3"
    # GPT-2 with experts has no architecture there; config_from refuses it by its settings.
    if model.moe.num_experts and model.family != "gpt2":
        return {"llama": "mixtral"}.get(model.family, f"{model.family}_moe")
    # a plug-in's family has the name of its package and of the architecture
    return model.family.rpartition(".")[2]


def rope_of(config: Config) -> dict[str, Any]:
    """Return RoPE's settings in the form of transformers 5, from either form."""
    # Before version 5: rope_theta and rope_scaling. Since then: rope_parameters, unless rope_scaling is there, too.
    scaling, tables = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if "full_attention" in tables:
        rope = {**(tables["full_attention"] or {}), **scaling}
    else:
        rope = {**(scaling or tables)}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **rope}
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope
