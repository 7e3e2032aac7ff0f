"""Nemotron-H: blocks of one part each, Mamba-2, attention without positions, ReLU^2, or experts with ReLU^2."""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    Architecture,
    Config,
    alike,
    ours,
    theirs,
    unlike,
)
from raymega.convert.huggingface.families.family import HfFamily, shortest_period
from raymega.convert.huggingface.moe_config import expert_config, expert_values
from raymega.errors import ConfigError
from raymega.plan.layers.layer_pattern import EXPERTS, FEED_FORWARD, MAMBA, layer_pattern

_SETTINGS = {
    **alike("vocab_size", "tie_word_embeddings", "initializer_range", "hidden_size", "head_dim"),
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}
_SIZES = {
    "n_groups": "num_key_heads",
    "mamba_num_heads": "num_value_heads",
    "ssm_state_size": "key_head_dim",
    "mamba_head_dim": "value_head_dim",
    "conv_kernel": "conv_kernel_dim",
    "time_step_min": "time_step_min",
}
_KINDS = {
    "linear_attention": MAMBA,
    "full_attention": "no_positions",
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_DEFAULTS = {
    "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "initializer_range": 0.02, "head_dim": 128, "num_key_value_heads": 8, "n_groups": 8, "mamba_num_heads": 128,
    "ssm_state_size": 128, "mamba_head_dim": 64, "conv_kernel": 4, "time_step_min": 0.001,
    "mlp_hidden_act": "relu2", "use_conv_bias": True, "mamba_hidden_act": "silu",
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip
_NONE = (None, False)
_WANTED = {
    "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "use_conv_bias": (True,), "mlp_bias": _NONE,
    "attention_bias": _NONE, "use_bias": _NONE, "mamba_proj_bias": _NONE, "residual_in_fp32": _NONE,
    "sliding_window": (None,), "num_nextn_predict_layers": (None, 0), "moe_latent_size": (None,), "n_shared_experts": (1,),
    # further names of settings, which would win over those above
    **dict.fromkeys(("mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_conv_bias"), (None,)),
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    # kinds of blocks: a list, under either name, or a letter each
    listed = config.get("layer_types") or config.get("layers_block_type")
    listed = listed or [
        _LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]
    ]
    there = [_OLD_KINDS.get(kind, kind) for kind in listed]
    unknown = sorted(set(there) - _KINDS.keys())
    if unknown:
        raise ConfigError(unlike(f"blocks of kind {', '.join(unknown)}", "they are not built"))
    kinds = [_KINDS[kind] for kind in there]
    sizes = {"linear_attention": ours(_SIZES, config)} if MAMBA in kinds else {}
    return {
        **ours(_SETTINGS, config),
        "num_kv_heads": config["num_key_value_heads"],
        "num_layers": len(kinds),
        "attention": {"layer_types": shortest_period(kinds)},
        **sizes,
        **(expert_values(config) if EXPERTS in kinds else {}),
    }


def _config(model: ModelSection) -> dict[str, Any]:
    words, layers = {kind: word for word, kind in _KINDS.items()}, layer_pattern(model)
    has_states = any(each.is_linear for each in layers)
    # a letter for each block would win over the list
    return {
        **theirs(_SETTINGS, model),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "layers_block_type": [words.get(each.attention, "") for each in layers],
        "mlp_hidden_act": "relu2",
        **(theirs(_SIZES, model.linear_attention) if has_states else {}),
        **(expert_config(model) if model.moe.num_experts else {}),
    }


_MAMBA, _ATTENTION = "linear_attention", "attention"
NEMOTRON_H = HfFamily(
    architecture=Architecture(
        "NemotronHForCausalLM", "nemotron_h", {**_DEFAULTS, **_EXPERTS}, _WANTED
    ),
    prefix="backbone.layers",
    outer={
        "backbone.embeddings": ("embedding.tokens",),
        "backbone.norm_f": ("final_norm",),
        "lm_head": ("head",),
    },
    modules={
        "norm": ("norm",),
        "mixer.in_proj": tuple(f"{_MAMBA}.{part}" for part in ("z", "x", "B", "C", "dt")),
        "mixer.conv1d": tuple(f"{_MAMBA}.{part}_conv" for part in "xBC"),
        "mixer.norm": (f"{_MAMBA}.norm",),
        "mixer.out_proj": (f"{_MAMBA}.out",),
        **{f"mixer.{part}_proj": (f"{_ATTENTION}.{part}",) for part in "qkv"},
        "mixer.o_proj": (f"{_ATTENTION}.out",),
        **{
            f"mixer.{module}{part}_proj": (f"{ours}.{part}",)
            for module, ours in (("", "mlp"), ("shared_experts.", "moe.shared"))
            for part in ("up", "down")
        },
    },
    tensors={f"mixer.{name}": f"{_MAMBA}.{name}" for name in ("A_log", "D", "dt_bias")},
    values=_values,
    config=_config,
    further_kinds=(*_KINDS, *_OLD_KINDS),
    expert_module="mixer",
    owns_settings=True,
)
